"""The magics in real kernels: what Tab and `?` offer, and what a magic in the wrong place says."""

from __future__ import annotations

import pytest

from kernel.harness import RealKernel


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%%accel", "%%accelerate"),
        ("%%accelerate --mi", "--mixed-precision"),
        ("%%accelerate --mixed-precision b", "bf16"),
        ("%%accelerate -n 2 --oom s", "shrink"),
        ("%%accelerate --out hist", "history"),
        ("%accelerate con", "config"),
        ("%accelerate config acc", "accumulate="),
        ("%accelerate config mixed-precision=f", "fp16"),
        ("%accelerate config seed=3 --s", "--save"),
    ],
)
def test_tab_offers_flags_choices_names_and_settings(kernel: RealKernel, line: str, offered: str) -> None:
    kernel.do("history = []")
    assert offered in kernel.completions(line)


def test_help_names_every_flag_and_command(kernel: RealKernel) -> None:
    kernel.do(
        "flags = get_ipython().magics_manager.registry['AccelerateMagics'].accelerate.parser._option_string_actions"
    )
    shown = kernel.value("get_ipython().object_inspect_text('%accelerate') or ''")
    for word in [*kernel.value("list(flags)"), "config", "doctor", "memory", "why", "--save"]:
        assert word in shown


def test_a_magic_below_code_says_where_it_belongs(kernel: RealKernel) -> None:
    ended = kernel.run("above = 1\n%%accelerate -n 2\nbelow = 2")
    assert ended.status == "error"
    assert "UsageError: %%accelerate has to be the first line of its cell, below comments at most" in ended.text
