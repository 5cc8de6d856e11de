"""NowAndThen: a line about the run every half minute, for unattended runs and where nothing else can be shown.

Runs in the kernel. Each line is complete and flushed, so that a reader of a remote log sees that the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nbaccel.launch.screen.painter import Screen
from nbaccel.launch.screen.place import Place
from nbaccel.launch.screen.shown import TICK_SLACK_S, ShownRun
from nbaccel.view.panel import Panel
from nbaccel.view.state import Facts, State
from nbaccel.view.text import line

__all__ = ["NowAndThen"]

_EVERY_S = 30.0


class NowAndThen(ShownRun):
    """Writes lines of text; at the end one more, and a picture if there is a `place` for it."""

    def __init__(
        self,
        screen: Screen,
        world_size: int,
        facts: Facts,
        *,
        place: Place | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(screen, world_size, facts, clock)
        self._place = place
        self._due = self._began + _EVERY_S
        self._unfinished = ("stdout", "")  # the content of the last line

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

    def _conclude(self, seconds: float, state: State) -> None:
        if not self._is_worth_a_word(seconds):
            return
        if self._place is not None:
            self._place.conclude(self._screen, Panel(self.history, self.facts), seconds, state)
        self._say(line(self.history, self.facts, seconds, state))

    def _say(self, words: str) -> None:
        """Write a separate line: a bar is wiped, and drawn again below at its next change; other text is ended."""
        stream, unfinished = self._unfinished
        if "\r" in unfinished:
            width = len(unfinished.rpartition("\r")[2])
            super().write(stream, f"\r{' ' * width}\r")
        elif unfinished:
            super().write(stream, "\n")
        self.write("stdout", f"{words}\n")
