"""ShownRun: the view of a run while it goes on, and the result that stays of it. Runs in the kernel.

It stands between the output of ranks and the screen, and listens to their reports. This class shows only their output,
and keeps the history; others add a panel, or a line from time to time.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nbaccel.events import Event, Listener
from nbaccel.launch.screen.painter import Screen
from nbaccel.view.history import History
from nbaccel.view.state import Facts, State

__all__ = ["TICK_SLACK_S", "ShownRun"]

_SHORT_S = 2.0
_LONGEST_WHY = 160

TICK_SLACK_S = 0.1
"""Tolerance for ticks, some half a second apart: what is due at the next one must not wait for the one after."""


class ShownRun(Listener):
    """The view of a run of `world_size` ranks on `screen`.

    history: the reports so far.  seconds, state: the duration and the end, once the run is over.
    """

    def __init__(
        self, screen: Screen, world_size: int, facts: Facts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.facts = facts
        self._screen = screen
        self._clock = clock
        self._began = clock()
        self.seconds = 0.0
        self.state: State | None = None
        self.history = History(world_size, self._began)

    # --- a screen for the output of ranks ------------------------------------------------------------------------

    def write(self, stream: str, text: str) -> None:
        """Write text of the ranks."""
        self._screen.write(stream, text)

    def publish(self, message: dict[str, Any]) -> None:
        """Show a rich message of the ranks."""
        self._screen.publish(message)

    def show_too(self, screen: Screen) -> None:
        """Show in another cell as well what can be seen in two cells at once, if anything."""

    @property
    def has_room_for_bars(self) -> bool:
        return False

    def show_bars(self, rows: Sequence[str]) -> None:
        """Set the bars that the ranks draw now."""

    # --- a listener for what they report --------------------------------------------------------------------------

    def feed(self, rank: int, at: float, event: Event) -> None:
        self.history.feed(rank, at, event)

    def tick(self, now: float) -> None:
        """Show what is due."""

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the run began, with all its attempts, and the start of their ranks."""
        return self._clock() - self._began

    def end(self, word: str, seconds: float, error: BaseException | None = None, rank: int | None = None) -> None:
        """End the view, and show the result that stays. An error in that does not harm the run.

        word: "done", "failed" or "stopped".  seconds: `elapsed_s` by then.  error: the exception of the run, which
        began in `rank`.
        """
        self.seconds = seconds
        why = "" if error is None or word != "failed" else f"{_who(rank)}{type(error).__name__}{_first_line(error)}"
        try:
            history = self.history
            ended = State.ended(word, seconds, history.steps, why, history.attempts, history.kept_steps)
            self.state = ended
            self._conclude(seconds, ended)
        except Exception as trouble:
            self.write("stderr", f"this run could not be drawn ({type(trouble).__name__}: {trouble})\n")

    @contextmanager
    def until_its_end(self) -> Iterator[None]:
        """Mark the block as the run, in this process."""
        try:
            yield
        except BaseException as error:
            word = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            if isinstance(error, SystemExit) and not error.code:
                word = "done"
            self.end(word, self.elapsed_s, error)
            raise
        self.end("done", self.elapsed_s)

    def _conclude(self, seconds: float, state: State) -> None:
        """Show the result that stays."""

    def _is_worth_a_word(self, seconds: float) -> bool:
        """Return whether the run leaves a result: a short one that reported no number does not."""
        return self.history.has_curves or seconds >= _SHORT_S


def _who(rank: int | None) -> str:
    return "" if rank is None else f"rank {rank}, "


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f": {textwrap.shorten(lines[0], _LONGEST_WHY, placeholder=' …')}" if lines else ""
