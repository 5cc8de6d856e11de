"""Panel that follows a run in the notebook, and becomes its picture at the end. Runs in the kernel.

Reasons: docs/design/screen.md
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nbaccel.display.run_view import TICK_SLACK_S, PanelSink, RunView
from nbaccel.display.summary import RUNNING, RunFacts, RunState, line
from nbaccel.features.panel.display_slot import DisplaySlot
from nbaccel.features.panel.panel import Panel
from nbaccel.output.painter import Screen

__all__ = ["LivePanel"]

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
            importlib.import_module("nbaccel.features.panel.run_figure")
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
