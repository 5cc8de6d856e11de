"""Refusals: finds wrong requests of a cell before anything starts. Runs in the kernel; changes nothing.

It finds flags that exclude each other, places that do not exist, and a front end that cannot do what a flag needs.
Mistakes in one flag alone are found where its value is read; requests beyond the machine, by the plan.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from IPython.core.error import UsageError

from nbaccel.base.settings import CHECKPOINT_DIR, SHRINK
from nbaccel.errors import LaunchRefused
from nbaccel.options.run_options import RunOptions

__all__ = [
    "EXCLUSIONS",
    "Exclusion",
    "refuse_contradictions",
    "refuse_without_input",
    "refuse_wrong_places",
    "without_a_missing_source",
]

_GIVEN: dict[str, Callable[[RunOptions], bool]] = {
    "--pdb": lambda options: options.pdb is not None,
    "--bg": lambda options: bool(options.bg),
    "--free-kernel": lambda options: bool(options.free_kernel),
    "--start inline": lambda options: options.start == "inline",
    "--sweep": lambda options: bool(options.sweep),
    "--keep": lambda options: bool(options.keep),
    "--only": lambda options: options.only is not None,
    "--resume": lambda options: options.resume is not None,
    "--check": lambda options: options.check is not None,
    "--speed": lambda options: options.speed is not None,
    "--nodes": lambda options: options.nodes is not None,
    "--start": lambda options: options.start is not None,
    "--oom shrink": lambda options: options.oom == SHRINK,
    "--devices": lambda options: options.devices is not None,
}
"""Requests that may exclude others, and the test for each."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Two flags of which a cell may have only one.

    Args:
        why: Half a sentence.
    """

    flag: str
    other: str
    why: str

    def applies(self, options: RunOptions) -> bool:
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
    Exclusion("--free-kernel", "--bg", "cells that run meanwhile would find models of the notebook on the host"),
    Exclusion("--free-kernel", "--start inline", "the notebook's own process computes with its own models"),
    Exclusion("--sweep", "--start inline", "each run needs processes of its own"),
    Exclusion("--sweep", "--pdb", "several runs go on at once, and one person answers one debugger"),
    Exclusion("--sweep", "--bg", "a sweep is watched by the cell that runs it"),
    Exclusion("--sweep", "--keep", "the ranks of each run end with it"),
    Exclusion("--sweep", "--only", "each run has ranks of its own, which do not stay"),
    Exclusion("--sweep", "--free-kernel", "runs begin and end while others go on"),
    Exclusion("--sweep", "--resume", "one checkpoint belongs to one run, and finished runs are found by themselves"),
    Exclusion("--check", "--start inline", "a check needs processes that it can throw away"),
    Exclusion("--check", "--sweep", "a check is of one run; give the cell the values of one in a line of its own"),
    Exclusion("--check", "--bg", "a check takes half a minute, and its report stands below its cell"),
    Exclusion("--check", "--keep", "the ranks of a check end with it"),
    Exclusion("--check", "--only", "a check has ranks of its own, which do not stay"),
    Exclusion("--check", "--pdb", "a check ends loops early, which nobody wants to debug"),
    Exclusion("--speed", "--check", "each shows a report of its own; a check comes first"),
    Exclusion("--speed", "--start inline", "trials need processes that they can throw away"),
    Exclusion("--speed", "--sweep", "trials are of one run; give the cell the values of one in a line of its own"),
    Exclusion("--speed", "--bg", "cells that run meanwhile would make the trials slower"),
    Exclusion("--speed", "--keep", "the ranks of a trial end with it"),
    Exclusion("--speed", "--only", "trials have ranks of their own, which do not stay"),
    Exclusion("--nodes", "--keep", "ranks that stay are ranks of this machine"),
    Exclusion("--nodes", "--only", "it names ranks that stay, which are ranks of this machine"),
    Exclusion("--nodes", "--sweep", "the runs of a sweep are runs of this machine"),
    Exclusion("--nodes", "--check", "a check keeps the files of this machine as they are, and of no other"),
    Exclusion("--nodes", "--speed", "trials are of this machine"),
    Exclusion("--nodes", "--start", "ranks of other machines have one way to start"),
    Exclusion("--nodes", "--devices", "each node shows its ranks its own GPUs"),
    Exclusion("--nodes", "--oom shrink", "a run on several machines is not started again for memory"),
    Exclusion("--nodes", "--free-kernel", "the notebook's models are on this machine's GPUs"),
    Exclusion("--speed", "--pdb", "a trial is ended as soon as its speed is known"),
)


def refuse_contradictions(options: RunOptions) -> None:
    """Refuse flags that exclude each other.

    Raises:
        UsageError: Two of the flags exclude each other.
    """
    for exclusion in EXCLUSIONS:
        if exclusion.applies(options):
            raise UsageError(str(exclusion))
    for flag, value in (("--slots", options.slots), ("--gpus-per-run", options.gpus_per_run)):
        if value is not None and not options.sweep:
            raise UsageError(
                f"{flag} {value} is about the runs of a sweep, and this cell has no --sweep; leave it out."
            )
    if options.node_timeout is not None and options.nodes is None:
        raise UsageError("--node-timeout is about other machines, and this cell has no --nodes; leave it out.")


def refuse_wrong_places(options: RunOptions) -> None:
    """Refuse places for checkpoints that cannot be right.

    Raises:
        LaunchRefused: Checkpoints could not be written where the flags say, or the place to read them from looks like a
            typing mistake.
    """
    folder, source = options.checkpoint_dir, options.resume
    if folder and Path(folder).expanduser().is_file():
        raise LaunchRefused(f"--checkpoint-dir {folder}: that is a file, and checkpoints need a folder; name another.")
    if _is_missing(source) and (near := _alike(Path(source).expanduser())):
        raise LaunchRefused(
            f"--resume {source}: there is neither a checkpoint nor a folder of some; did you mean {near}? Or write "
            "--resume alone for the newest in --checkpoint-dir."
        )


def without_a_missing_source(options: RunOptions) -> tuple[RunOptions, str]:
    """Return the options of a cell whose `--resume PATH` does not exist, and a line that says what they are now.

    A hosted notebook runs the same cells in its first version, which has no checkpoint to continue from, and in later
    ones, to which the output of the last is attached. If the path exists, the line is empty and the options are the
    same.
    """
    source = options.resume
    if not _is_missing(source):
        return options, ""
    line = f"--resume {source}: nothing is attached there, so this training begins anew"
    folder = Path(options.checkpoint_dir or CHECKPOINT_DIR).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        line = (
            f"--resume {source}: nothing is attached there; the newest checkpoint in {folder} is taken, if there is one"
        )
    return replace(options, resume=""), line


def _is_missing(source: str | None) -> TypeGuard[str]:
    return bool(source) and not Path(str(source)).expanduser().exists()


def _alike(path: Path) -> str:
    """Return the path that was probably meant, if one part of it is misspelled; empty if none is similar."""
    there = next(parent for parent in path.absolute().parents if parent.exists())
    rest = path.absolute().relative_to(there)
    names = difflib.get_close_matches(rest.parts[0], [each.name for each in there.iterdir()], n=1, cutoff=0.8)
    return str(there.joinpath(names[0], *rest.parts[1:])) if names else ""


def refuse_without_input(pdb: int | None, shell: Any) -> None:
    """Refuse a debugger in a front end without input.

    Args:
        pdb: The rank with a debugger; None for no rank.
        shell: The notebook's.

    Raises:
        LaunchRefused: A debugger was asked for where no input can be typed.
    """
    if pdb is None or _takes_input(shell):
        return
    raise LaunchRefused(
        f"--pdb {pdb}: a debugger asks for commands, and here nobody can type any (this front end takes no "
        "input, as under nbconvert and papermill); leave --pdb out."
    )


def _takes_input(shell: Any) -> bool:
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return sys.stdin is not None and sys.stdin.isatty()
    return bool(getattr(kernel, "_allow_stdin", True))  # the front end sets it with each cell
