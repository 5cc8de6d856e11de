"""Refusals: what a cell may not ask for, found before anything starts. Runs in the kernel; changes nothing.

Flags that exclude each other, places that are none, and a front end that cannot do what a flag needs. What is wrong
with one flag by itself is said where its value is read; what the machine cannot do, by the plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

from nbaccel.errors import LaunchRefused
from nbaccel.notebook.options import Options

__all__ = ["EXCLUSIONS", "Exclusion", "refuse_contradictions", "refuse_without_input", "refuse_wrong_places"]

_GIVEN: dict[str, Callable[[Options], bool]] = {
    "--pdb": lambda options: options.pdb is not None,
    "--bg": lambda options: bool(options.bg),
    "--start inline": lambda options: options.start == "inline",
}
"""What may exclude something else, and how to know that it was asked for."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two flags of which a cell has one at most.  why: half a sentence."""

    flag: str
    other: str
    why: str

    def applies(self, options: Options) -> bool:
        return _GIVEN[self.flag](options) and _GIVEN[self.other](options)

    def __str__(self) -> str:
        return f"{self.flag} and {self.other} exclude each other: {self.why}; leave one of them out."


EXCLUSIONS = (
    Exclusion(
        "--pdb",
        "--start inline",
        "in the notebook's own process breakpoint() needs no flag, and after an error there is %debug",
    ),
    Exclusion("--pdb", "--bg", "a debugger asks for commands in the cell that runs"),
    Exclusion("--bg", "--start inline", "the notebook's own process runs one thing at a time"),
)


def refuse_contradictions(options: Options) -> None:
    """
    Raises:
        UsageError: two of the flags exclude each other.
    """
    for exclusion in EXCLUSIONS:
        if exclusion.applies(options):
            raise UsageError(str(exclusion))


def refuse_wrong_places(options: Options) -> None:
    """
    Raises:
        LaunchRefused: checkpoints could not be written, or read, where the flags say.
    """
    folder, source = options.checkpoint_dir, options.resume
    if folder and Path(folder).expanduser().is_file():
        raise LaunchRefused(f"--checkpoint-dir {folder}: that is a file, and checkpoints need a folder; name another.")
    if source and not Path(source).expanduser().exists():
        raise LaunchRefused(
            f"--resume {source}: there is neither a checkpoint nor a folder of some in {Path.cwd()}; correct the path, "
            "or write --resume alone for the newest in --checkpoint-dir."
        )


def refuse_without_input(options: Options, shell: Any) -> None:
    """
    Raises:
        LaunchRefused: a debugger was asked for where nobody can type.
    """
    if options.pdb is None or _takes_input(shell):
        return
    raise LaunchRefused(
        f"--pdb {options.pdb}: a debugger asks for commands, and here nobody can type any (this front end takes no "
        "input, as under nbconvert and papermill); leave --pdb out."
    )


def _takes_input(shell: Any) -> bool:
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return sys.stdin is not None and sys.stdin.isatty()
    return bool(getattr(kernel, "_allow_stdin", True))  # what the front end said with this cell
