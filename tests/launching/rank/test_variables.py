"""The environment of a rank: what Python, C code and child processes of it read."""

from __future__ import annotations

import ctypes
import os
import subprocess
from typing import Any

import pytest

from nbaccel.launching.api import launch
from nbaccel.launching.rank import process_setup
from nbaccel.launching.rank.process_setup import Variables

_NAMES = ("OWN", "KEPT", "KEPT_BY_C", "CHANGED", "DEFAULT", "SET_BEFORE")


def read() -> dict[str, list[str]]:
    """Return what this process reads of its variables, what C code does, and what a child prints."""
    of_c = ctypes.CDLL(None).getenv
    of_c.restype = ctypes.c_char_p
    printed = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {
        name: [
            os.environ.get(name, ""),
            (of_c(name.encode()) or b"").decode(),
            *(line.partition("=")[2] for line in printed if line.startswith(f"{name}=")),
        ]
        for name in _NAMES
    }


def in_child(work: Any) -> dict[str, list[str]]:
    """Return what `work` returns in a fork of this process."""
    found, told = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(told, repr(work()).encode())
        finally:
            os._exit(0)
    os.close(told)
    os.waitpid(pid, 0)
    with open(found) as file:
        return dict(eval(file.read()))


@pytest.mark.parametrize("has_table", [True, False], ids=["with the C library's table", "without"])
def test_variables_are_the_same_for_python_c_and_children(has_table: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEPT", "CHANGED", "SET_BEFORE"):
        monkeypatch.setenv(name, "notebook")
    if not has_table:
        monkeypatch.setattr(process_setup, "_library", None)

    def work() -> dict[str, list[str]]:
        os.putenv("KEPT_BY_C", "c")
        variables = Variables({"OWN": "ä=b", "CHANGED": ""}, {"DEFAULT": "lo", "SET_BEFORE": "lo"})
        variables.install()
        return read()

    assert in_child(work) == {
        "OWN": ["ä=b"] * 3,
        "KEPT": ["notebook"] * 3,
        "KEPT_BY_C": ["", "c", "c"],
        "CHANGED": [""] * 3,
        "DEFAULT": ["lo"] * 3,
        "SET_BEFORE": ["notebook"] * 3,
    }


def test_a_program_sets_changes_and_deletes_variables_of_its_rank(start_method: str) -> None:
    def work() -> tuple[Any, ...]:
        os.environ["OWN"] = "new"
        os.environ["RANK"] = "7"
        del os.environ["WORLD_SIZE"]
        printed = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.splitlines()
        lines = sorted(line for line in printed if line.startswith(("OWN=", "RANK=", "WORLD_SIZE=")))
        return lines, os.environ["MASTER_ADDR"] != "", "GLOO_SOCKET_IFNAME" in os.environ

    assert launch(work, 1, start_method=start_method).value == (["OWN=new", "RANK=7"], True, True)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
