"""Audience: chooses how a run is shown: as a panel, as lines of text, or not at all. Runs in the kernel."""

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
    """Chooses the view of this process's runs. It remembers the place that shows the runs of the latest cell."""

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
        """Return the view of a run.

        shell: IPython's, None in a script, which shows only the output of its ranks.  is_plain: show text only.
        frames: shows the states of a panel.  screen: of a notebook; None for the cell that runs.
        says_end: the end of a panel is also written as a line of text.
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
        """Return one place for all runs that a cell starts."""
        cell = _cell(shell)
        if cell is None or cell != self._place.cell:
            self._place = Place(cell, functools.partial(_when_the_cell_ends, shell))
        return self._place


def _cell(shell: Any) -> str | None:
    """Return the id of the message that asked for this execution; it differs from that of every other execution."""
    parent = getattr(shell, "parent_header", None) or {}
    found: str | None = parent.get("header", parent).get("msg_id")
    return found


def can_answer(shell: Any) -> bool:
    """Return whether the front end that sent the running cell can be asked for input.

    Front ends say so, and programs that execute notebooks say that they cannot.
    """
    parent = getattr(shell, "parent_header", None) or {}
    return bool(parent.get("content", {}).get("allow_stdin"))


def _when_the_cell_ends(shell: Any, call: Callable[[], None]) -> None:
    """Call `call` once the code of the present cell is done; its output still belongs to the cell."""

    def once(result: Any) -> None:
        shell.events.unregister("post_run_cell", once)
        call()

    shell.events.register("post_run_cell", once)


def runs_unattended(platform: Platform, parent: int | None = None, root: Path = Path("/")) -> bool:
    """Return whether a program executes the notebook from its first cell to its last, with no person watching.

    Kaggle states it; kernels of nbconvert, papermill and `jupyter execute` are their children.

    parent: process id, by default that of this process's parent.  root: replaces the root of the file system, in tests.
    """
    if platform is Platform.KAGGLE_BATCH:
        return True
    try:
        command = (root / "proc" / str(parent or os.getppid()) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:  # no Linux
        return False
    words = [Path(word).name for word in command.split("\0")[:4]]  # python -m nbconvert --execute
    return any(name in word for word in words for name in _UNATTENDED)
