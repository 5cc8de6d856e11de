"""Views that follow a run: a panel in the notebook, or lines of text; and the choice between them. Run in the kernel.

`Views` chooses the view: a `LivePanel` in a notebook, `PeriodicText` in a terminal, for unattended runs and where
nothing else can be shown, and the output of ranks alone in a script. The panel becomes the picture of its run at the
end. All runs of a cell share one display: updates replace it, and the notebook saves one state.

Reasons: docs/design/screen.md
"""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbaccel.base.hardware import Platform
from nbaccel.base.world import is_notebook_kernel
from nbaccel.display.panel import Panel
from nbaccel.display.run_view import TICK_SLACK_S, DisplaySlot, PanelSink, RunView
from nbaccel.display.summary import RUNNING, RunFacts, RunState, line
from nbaccel.output.painter import Screen
from nbaccel.output.screens import ConsoleScreen, JupyterScreen

__all__ = [
    "LivePanel",
    "PeriodicText",
    "Views",
    "can_answer",
    "runs_unattended",
]

_FRAME_S = 0.5
"""The shortest time between two frames."""

_SHARE_OF_CORE = 0.03
_BYTES_PER_S = 30_000
"""Limits of a frame's cost, for the kernel and for a distant front end; the next frame waits accordingly."""


class LivePanel(RunView):
    """Shows the run at `place` once it has numbers, or takes longer than two seconds.

    Args:
        frames: Shows its states while the run goes on.
        says_end: The end is also written as a line of text. Text in a picture is lost for people who do not see it, and
            front ends do not read it to them.
    """

    def __init__(
        self,
        screen: Screen,
        world_size: int,
        facts: RunFacts,
        place: DisplaySlot | None = None,
        *,
        frames: PanelSink | None = None,
        says_end: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(screen, world_size, facts, clock)
        self._panel = Panel(self.history, facts)
        self._place = place or DisplaySlot()
        self._frames = frames or PanelSink()
        self._says_end = says_end
        self._due = self._began
        self._bars: list[str] = []
        self._bars_room = 0  # rows are kept, so that the panel does not jump when a bar ends

    @property
    def has_room_for_bars(self) -> bool:
        return True

    def show_bars(self, rows: Sequence[str]) -> None:
        self._bars = list(rows)
        self._bars_room = max(self._bars_room, len(rows))

    def show_too(self, screen: Screen) -> None:
        """Show the run in another cell as well.

        If widgets show the states and cannot be shown there, the present state stays.
        """
        running = {} if self.state is not None else self._bundle(self._clock() - self._began)
        self._place.show_too(screen, running)

    def tick(self, now: float) -> None:
        if now < self._due - TICK_SLACK_S or not self._is_worth_a_word(now - self._began):
            return
        self.write_heading()  # a run that says nothing yet has its panel below that line
        self._frames.get_ready()
        cpu_s = time.thread_time()
        bundle = self._bundle(now - self._began)
        self._show_frame(bundle)
        cpu_s = time.thread_time() - cpu_s
        if self.history.has_curves:  # their picture needs matplotlib: loaded now, the end does not wait for it
            importlib.import_module("nbaccel.display.run_figure")
        nbytes = sum(map(len, bundle.values()))
        self._due = now + max(_FRAME_S, cpu_s / _SHARE_OF_CORE, nbytes / _BYTES_PER_S)

    def _bundle(self, seconds: float) -> dict[str, str]:
        """Return the run as it is now, below the finished runs of its place."""
        bars = (*self._bars, *[""] * (self._bars_room - len(self._bars)))
        state = replace(RUNNING, bars=bars, hint=self._frames.hint)
        return self._place.comparison.bundle(self._panel, seconds, state)

    def _conclude(self, seconds: float, state: RunState) -> None:
        try:
            self._show_end(seconds, state)
        finally:
            self._frames.close()

    def _show_end(self, seconds: float, state: RunState) -> None:
        place = self._place
        if state.is_written:
            self.write("stdout", f"{state.sentence}\n")
        if not (self._is_worth_a_word(seconds) or place.comparison.runs or place.is_open):
            return
        if not place.comparison.runs:  # visible at once, while the picture is being drawn
            self._show_frame(self._panel.bundle(seconds, state))
        place.conclude(self._screen, self._panel, seconds, state)
        if self._says_end and not state.is_written and place.comparison.runs == 1:
            self.write("stdout", f"{line(self.history, self.facts, seconds, state)}\n")

    def _show_frame(self, bundle: Mapping[str, str]) -> None:
        data = self._frames.show(dict(bundle))
        if data is not None:
            self._place.show(self._screen, data)


_EVERY_S = 30.0


class PeriodicText(RunView):
    """Writes lines of text; at the end one more, and a picture if there is a `place` for it.

    There is one line every half minute. Each line is complete and flushed, so that a reader of a remote log sees that
    the run goes on.
    """

    def __init__(
        self,
        screen: Screen,
        world_size: int,
        facts: RunFacts,
        *,
        place: DisplaySlot | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(screen, world_size, facts, clock)
        self._place = place
        self._due = self._began + _EVERY_S
        self._unfinished = ("stdout", "")  # the content of the last line

    def head(self, line: str) -> None:
        super().head(line)
        if self._place is None:  # nothing else shows that a run has begun
            self.write_heading()

    def write(self, stream: str, text: str) -> None:
        super().write(stream, text)
        before = self._unfinished[1] if "\n" not in text else ""
        row = before + text.rpartition("\n")[2]
        _, rewritten, state = row.rpartition("\r")
        self._unfinished = (stream, rewritten + state)

    @property
    def has_room_for_bars(self) -> bool:
        """Return whether the run is unattended; then the last state of a bar is enough.

        Programs that run notebooks save everything that was rewritten on a line, and four states a second would add up
        to megabytes.
        """
        return self._place is not None

    def tick(self, now: float) -> None:
        if now >= self._due - TICK_SLACK_S:
            self._due = now + _EVERY_S
            self._say(line(self.history, self.facts, now - self._began))

    def _conclude(self, seconds: float, state: RunState) -> None:
        if not self._is_worth_a_word(seconds):
            super()._conclude(seconds, state)
            return
        if self._place is not None:
            self._place.conclude(self._screen, Panel(self.history, self.facts), seconds, state)
        self._say(state.sentence if state.is_written else line(self.history, self.facts, seconds, state))

    def _say(self, words: str) -> None:
        """Write a separate line: a bar is wiped, and drawn again below at its next change; other text is ended."""
        stream, unfinished = self._unfinished
        if "\r" in unfinished:
            width = len(unfinished.rpartition("\r")[2])
            super().write(stream, f"\r{' ' * width}\r")
        elif unfinished:
            super().write(stream, "\n")
        self.write("stdout", f"{words}\n")


_UNATTENDED = ("nbconvert", "papermill", "jupyter-execute")


class Views:
    """Chooses the view of this process's runs. It remembers the place that shows the runs of the latest cell."""

    def __init__(self) -> None:
        self._place = DisplaySlot()

    def show(
        self,
        shell: Any,
        world_size: int,
        facts: RunFacts,
        platform: Platform,
        *,
        is_plain: bool = False,
        says_end: bool = True,
        frames: PanelSink | None = None,
        screen: Screen | None = None,
    ) -> RunView:
        """Return the view of a run.

        Args:
            shell: IPython's, None in a script, which shows only the output of its ranks.
            is_plain: Show text only.
            says_end: The end of a panel is also written as a line of text.
            frames: Shows the states of a panel.
            screen: The screen of a notebook; None for the cell that runs.
        """
        if shell is None:
            return RunView(ConsoleScreen(), world_size, facts)
        if is_plain:
            return PeriodicText(screen or ConsoleScreen(), world_size, facts)
        if not is_notebook_kernel():  # a terminal cannot take back what it has shown
            return PeriodicText(JupyterScreen(shell), world_size, facts)
        place = self.place_in(shell)
        if runs_unattended(platform):
            return PeriodicText(JupyterScreen(shell), world_size, facts, place=place)
        screen = screen or JupyterScreen(shell)
        return LivePanel(screen, world_size, facts, place, frames=frames, says_end=says_end)

    def place_in(self, shell: Any) -> DisplaySlot:
        """Return one place for all runs that a cell starts."""
        cell = _cell(shell)
        if cell is None or cell != self._place.cell:
            self._place = DisplaySlot(cell, functools.partial(_when_the_cell_ends, shell))
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

    Args:
        parent: Process id, by default that of this process's parent.
        root: Replaces the root of the file system, in tests.
    """
    if platform is Platform.KAGGLE_BATCH:
        return True
    try:
        command = (root / "proc" / str(parent or os.getppid()) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:  # no Linux
        return False
    words = [Path(word).name for word in command.split("\0")[:4]]  # python -m nbconvert --execute
    return any(name in word for word in words for name in _UNATTENDED)
