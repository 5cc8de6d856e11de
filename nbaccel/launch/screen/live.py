"""LivePanel: a panel in the notebook that follows a run, and becomes its picture. Runs in the kernel.

There is one display per run, or per cell if several runs are started in one: updates replace it, and one state is
saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from nbaccel.launch.screen.frames import Frames
from nbaccel.launch.screen.painter import Screen
from nbaccel.launch.screen.place import Place
from nbaccel.launch.screen.shown import TICK_SLACK_S, ShownRun
from nbaccel.view.panel import Panel
from nbaccel.view.state import RUNNING, Facts, State
from nbaccel.view.text import line

__all__ = ["LivePanel"]

_FRAME_S = 0.5
_SHARE_OF_CORE = 0.03
_BYTES_PER_S = 30_000
"""Limits of a frame's cost, for the kernel and for a distant front end; the next frame waits accordingly."""


class LivePanel(ShownRun):
    """Shows the run at `place` once it has numbers, or takes longer than two seconds.

    frames: shows its states while the run goes on.
    says_end: the end is also written as a line of text. Text in a picture is lost for people who do not see it, and
    front ends do not read it to them.
    """

    def __init__(
        self,
        screen: Screen,
        world_size: int,
        facts: Facts,
        place: Place | None = None,
        *,
        frames: Frames | None = None,
        says_end: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(screen, world_size, facts, clock)
        self._panel = Panel(self.history, facts)
        self._place = place or Place()
        self._frames = frames or Frames()
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
        self._frames.get_ready()
        cpu_s = time.thread_time()
        bundle = self._bundle(now - self._began)
        self._show_frame(bundle)
        cpu_s = time.thread_time() - cpu_s
        nbytes = sum(map(len, bundle.values()))
        self._due = now + max(_FRAME_S, cpu_s / _SHARE_OF_CORE, nbytes / _BYTES_PER_S)

    def _bundle(self, seconds: float) -> dict[str, str]:
        """Return the run as it is now, below the finished runs of its place."""
        bars = (*self._bars, *[""] * (self._bars_room - len(self._bars)))
        state = replace(RUNNING, bars=bars, hint=self._frames.hint)
        return self._place.board.bundle(self._panel, seconds, state)

    def _conclude(self, seconds: float, state: State) -> None:
        try:
            self._show_end(seconds, state)
        finally:
            self._frames.close()

    def _show_end(self, seconds: float, state: State) -> None:
        place = self._place
        if not (self._is_worth_a_word(seconds) or place.board.runs or place.is_open):
            return
        if not place.board.runs:  # visible at once, while the picture is being drawn
            self._show_frame(self._panel.bundle(seconds, state))
        place.conclude(self._screen, self._panel, seconds, state)
        if self._says_end and place.board.runs == 1:
            self.write("stdout", f"{line(self.history, self.facts, seconds, state)}\n")

    def _show_frame(self, bundle: Mapping[str, str]) -> None:
        data = self._frames.show(dict(bundle))
        if data is not None:
            self._place.show(self._screen, data)
