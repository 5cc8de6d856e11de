"""What Tab offers behind each beginning of a line: flags, their values, commands, settings and names."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter

from nbaccel.features.completion.offers import candidates
from nbaccel.notebook.magics import AccelerateMagics
from nbaccel.options.flags import flags_parser
from nbaccel.options.parsing import COMMANDS

PARSER = flags_parser()


def long(action: argparse.Action) -> str:
    return action.option_strings[-1]


@pytest.mark.parametrize(
    ("line", "symbol", "expected"),
    [
        ("%%accelerate --mi", "--mi", ["--mixed-precision"]),
        (
            "%%accelerate -n 2 --s",
            "--s",
            ["--seed", "--slots", "--speed", "--start", "--strategy", "--strict", "--sweep"],
        ),
        ("%%accelerate -p ", "", ["auto", "no", "fp16", "bf16"]),
        ("%%accelerate --mixed-precision=b", "b", ["bf16"]),
        ("%%accelerate --start z", "z", ["zygote"]),
        ("%%accelerate --strategy ", "", ["auto", "single", "ddp", "fsdp", "deepspeed"]),
        ("%%accelerate --strategy=f", "f", ["fsdp"]),
        ("%accelerate config strategy=d", "d", ["ddp", "deepspeed"]),
        ("%%accelerate --out ", "", ["history", "model", "cell", "none"]),
        ("%%accelerate --out=n", "n", ["none"]),
        ("%%accelerate --out model,h", "h", ["history"]),
        ("%%accelerate --out model, h", "h", ["history"]),
        ("%%accelerate -i mo", "mo", ["model"]),
        ("%%accelerate --out model --d", "--d", ["--debug", "--devices"]),
        ("%%accelerate --cpu --pl", "--pl", ["--plain", "--plot"]),
        ("%%accelerate", "%%accelerate", []),
        ("%accelerate ", "", list(COMMANDS)),
        ("%accelerate d", "d", ["doctor"]),
        ("%accelerate config acc", "acc", ["accumulate="]),
        ("%accelerate config seed=3 acc", "acc", ["accumulate="]),
        ("%accelerate config --s", "--s", ["--save"]),
        ("%accelerate config mixed-precision=", "", ["auto", "no", "fp16", "bf16"]),
        ("%accelerate config cpu=f", "f", ["false"]),
        ("%accelerate config out=", "", ["cell", "none"]),
        ("%accelerate config sed=", "", []),
        ("%accelerate doctor ", "", []),
        ("%accelerate push mo", "mo", ["model"]),
        ("%accelerate pull model,h", "h", ["history"]),
        ("%accelerate start -p b", "b", ["bf16"]),
        ("%accelerate start --mi", "--mi", ["--mixed-precision"]),
    ],
)
def test_what_fits_is_offered(line: str, symbol: str, expected: list[str]) -> None:
    parser = AccelerateMagics.accelerate.parser
    assert candidates(parser, line, symbol, ["model", "history", "_hidden"]) == expected


def completed(shell: Any, line: str) -> list[str]:
    """What a kernel would offer at the end of the first line of a cell."""
    with provisionalcompleter():
        return [completion.text for completion in shell.Completer.completions(f"{line}\nx = 1", len(line))]


@pytest.mark.parametrize(
    ("line", "expected"),
    [("%%accelerate --mi", "--mixed-precision"), ("%%accelerate -p b", "bf16"), ("%accelerate do", "doctor")],
)
def test_the_shell_completes(planned: Any, line: str, expected: str) -> None:
    assert expected in completed(planned.shell, line)


def test_completion_is_taken_back(planned: Any) -> None:
    line = "%%accelerate --mi"
    magics = planned.shell.magics_manager.registry["AccelerateMagics"]
    magics._completer.remove()
    assert "--mixed-precision" not in completed(planned.shell, line)
    magics._completer.install()


@pytest.mark.parametrize("action", PARSER._actions, ids=long)
def test_completion_offers_the_flag_and_its_values(action: argparse.Action) -> None:
    flag = long(action)
    assert flag in candidates(PARSER, f"%%accelerate {flag[:-1]}", flag[:-1], ())
    if action.nargs == 0:
        return
    offered = candidates(PARSER, f"%%accelerate {flag} ", "", ["model"])
    assert offered, f"nothing is offered behind {flag}"
    assert not any(word.startswith("-") for word in offered)
    read = action.type or str
    for word in offered:
        read(word)  # type: ignore[operator]
