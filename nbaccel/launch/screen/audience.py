"""Who sees a run, and so how it is shown: a panel, lines of text, or nothing. Runs in the kernel."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbaccel.hardware import Platform
from nbaccel.launch.screen.console import JupyterScreen
from nbaccel.launch.screen.frames import Frames
from nbaccel.launch.screen.live import LivePanel
from nbaccel.launch.screen.nowandthen import NowAndThen
from nbaccel.launch.screen.painter import Screen
from nbaccel.launch.screen.place import Place
from nbaccel.launch.screen.router import ConsoleScreen
from nbaccel.launch.screen.shown import ShownRun
from nbaccel.view.state import Facts
from nbaccel.world import is_notebook_kernel

__all__ = ["Audience", "can_answer", "runs_unattended"]

_UNATTENDED = ("nbconvert", "papermill", "jupyter-execute")


class Audience:
    """Those in front of this process's notebook. Remembers where the runs of the latest cell are shown."""

    def __init__(self) -> None:
        self._place = Place()

    def show(
        self,
        shell: Any,
        world_size: int,
        facts: Facts,
        platform: Platform,
        *,
        is_plain: bool = False,
        says_end: bool = True,
        frames: Frames | None = None,
        screen: Screen | None = None,
    ) -> ShownRun:
        """A run for this audience.

        shell: IPython's, None in a script, which shows only what its ranks print.  is_plain: text only, please.
        frames: how the states of a panel are shown.  screen: of a notebook; None for the cell that runs.
        says_end: a panel's end is also said in a line of text.
        """
        if shell is None:
            return ShownRun(ConsoleScreen(), world_size, facts)
        if is_plain:
            return NowAndThen(screen or ConsoleScreen(), world_size, facts)
        if not is_notebook_kernel():  # a terminal cannot take back what it has shown
            return NowAndThen(JupyterScreen(shell), world_size, facts)
        place = self._place_in(shell)
        if runs_unattended(platform):
            return NowAndThen(JupyterScreen(shell), world_size, facts, place=place)
        screen = screen or JupyterScreen(shell)
        return LivePanel(screen, world_size, facts, place, frames=frames, says_end=says_end)

    def _place_in(self, shell: Any) -> Place:
        """One place for all runs that a cell starts."""
        cell = _cell(shell)
        if cell is None or cell != self._place.cell:
            self._place = Place(cell, functools.partial(_when_the_cell_ends, shell))
        return self._place


def _cell(shell: Any) -> str | None:
    """What tells this execution of a cell from all others: the message that asked for it."""
    parent = getattr(shell, "parent_header", None) or {}
    found: str | None = parent.get("header", parent).get("msg_id")
    return found


def can_answer(shell: Any) -> bool:
    """Whether whoever sent the cell that runs can be asked something: front ends say so, and programs that execute
    notebooks say that they cannot."""
    parent = getattr(shell, "parent_header", None) or {}
    return bool(parent.get("content", {}).get("allow_stdin"))


def _when_the_cell_ends(shell: Any, call: Callable[[], None]) -> None:
    """Call this once the code of the present cell is through; what it shows then is the cell's still."""

    def once(result: Any) -> None:
        shell.events.unregister("post_run_cell", once)
        call()

    shell.events.register("post_run_cell", once)


def runs_unattended(platform: Platform, parent: int | None = None, root: Path = Path("/")) -> bool:
    """Whether a program that nobody looks at executes the notebook from its first cell to its last.

    Kaggle says so; kernels of nbconvert, papermill and `jupyter execute` are their children.

    parent: process id, by default this one's parent's.  root: stands in for the file system's, in tests.
    """
    if platform is Platform.KAGGLE_BATCH:
        return True
    try:
        command = (root / "proc" / str(parent or os.getppid()) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:  # no Linux
        return False
    words = [Path(word).name for word in command.split("\0")[:4]]  # python -m nbconvert --execute
    return any(name in word for word in words for name in _UNATTENDED)
