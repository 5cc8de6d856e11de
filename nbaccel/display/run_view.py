"""View of a run while it goes on, and the result that stays in the notebook after it. Runs in the kernel.

A `RunView` stands between the output of ranks and the screen, and listens to their reports. It shows only their output,
and keeps the history; subclasses add a panel, or a line from time to time. It draws nothing.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

from nbaccel.base.events import Event, Listener
from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts, RunState
from nbaccel.output.merge import NOTICE
from nbaccel.output.painter import Screen

__all__ = [
    "TICK_SLACK_S",
    "PanelSink",
    "RunView",
    "failure_in_a_line",
]

_SHORT_S = 2.0
_LONGEST_WHY = 160
_LONGEST_LINE = 120
"""Characters of a first line that also has the first notice: what a notebook shows in one row."""

TICK_SLACK_S = 0.1
"""Ticks come about half a second apart: what falls due within this time after a tick is done by it, not by the next."""


class RunView(Listener):
    """The view of a run of `world_size` ranks on `screen`.

    Attributes:
        history: The reports so far.
        seconds, state: The duration and the end, once the run is over.
    """

    def __init__(
        self, screen: Screen, world_size: int, facts: RunFacts, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.facts = facts
        self._screen = screen
        self._clock = clock
        self._began = clock()
        self._heading = ""
        self._notices: set[str] = set()
        self.seconds = 0.0
        self.state: RunState | None = None
        self.history = History(world_size, self._began)

    # --- a screen for the output of ranks ------------------------------------------------------------------------

    def head(self, line: str) -> None:
        """Set the line that stands above all text; it is written with the first one, or at the end of the run.

        If that text begins with a short notice of the project, as on how batches are split, both are one line.
        """
        self._heading = line

    def write(self, stream: str, text: str) -> None:
        """Write text of the ranks; a notice that an earlier attempt has shown is left out."""
        if NOTICE in text:
            text = self._without_known_notices(text)
        if self._heading and stream == "stdout" and text.startswith(NOTICE):
            joined = f"{self._heading}; {text.removeprefix(NOTICE)}"
            if joined.find("\n") <= _LONGEST_LINE:
                text, self._heading = joined, ""
        self.write_heading()
        self._screen.write(stream, text)

    def _without_known_notices(self, text: str) -> str:
        lines = [line for line in text.splitlines(keepends=True) if line not in self._notices]
        self._notices |= {line for line in lines if line.startswith(NOTICE)}
        return "".join(lines)

    def write_heading(self) -> None:
        """Write the line that `head` has set, if it is not written yet."""
        heading, self._heading = self._heading, ""
        if heading:
            self._screen.write("stdout", f"{heading}\n")

    def publish(self, message: dict[str, Any]) -> None:
        """Show a rich message of the ranks."""
        self.write_heading()
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

    def end(
        self,
        word: str,
        seconds: float,
        error: BaseException | None = None,
        rank: int | None = None,
        sentence: str = "",
    ) -> None:
        """End the view, and show the result that stays. An error in that does not harm the run.

        Args:
            word: "done", "failed" or "stopped".
            seconds: The value of `elapsed_s` at the end.
            error: The exception of the run, which began in `rank`.
            sentence: How the run ended, which is also written as a line; empty for the usual one.
        """
        self.seconds = seconds
        self.write_heading()
        why = "" if error is None or word != "failed" else failure_in_a_line(error, rank)
        try:
            history = self.history
            ended = RunState.ended(word, seconds, history.steps, why, history.attempts, history.kept_steps)
            if sentence:
                ended = RunState(word, sentence, is_written=True)
            self.state = ended
            self._conclude(seconds, ended)
        except Exception as trouble:
            self.write("stderr", f"this run could not be drawn ({type(trouble).__name__}: {trouble})\n")

    def _conclude(self, seconds: float, state: RunState) -> None:
        """Show the result that stays."""
        if state.is_written:
            self.write("stdout", f"{state.sentence}\n")

    def _is_worth_a_word(self, seconds: float) -> bool:
        """Return whether the run leaves a result: a short one that reported no number does not."""
        return self.history.has_curves or seconds >= _SHORT_S


def failure_in_a_line(error: BaseException, rank: int | None = None) -> str:
    """Return the first line of an error, shortened.

    Args:
        rank: The rank in which the error began; None for all, or no rank.

    Example:
        >>> failure_in_a_line(ValueError("11 classes\\nin the last batch"), rank=1)
        'rank 1, ValueError: 11 classes'
        >>> failure_in_a_line(RuntimeError("no rank goes on:\\n  rank 0: line 3"))
        'RuntimeError: no rank goes on'
    """
    lines = str(error).strip().splitlines()
    name = type(error).__name__ if rank is None else f"rank {rank}, {type(error).__name__}"
    return f"{name}: {textwrap.shorten(lines[0].rstrip(' :'), _LONGEST_WHY, placeholder=' …')}" if lines else name


class PanelSink:
    """Shows each state in place of the one before, in one display.

    This class displays the states as they are; code that knows widgets can show them in an element that can be clicked.

    Example:
        >>> PanelSink().show({"text/plain": "running"})
        {'text/plain': 'running'}
    """

    @property
    def hint(self) -> str:
        """Return the panel's hint on how to end the run; empty if that is visible anyway."""
        return "Stop: interrupt the kernel"

    def get_ready(self) -> None:
        """Get ready for a state; only the first call may take a moment, which does not count as time of the panel."""

    def show(self, data: dict[str, Any]) -> dict[str, Any] | None:
        """Return the data to display of a state, by MIME type; None if it is on the screen already."""
        return data

    def close(self) -> None:
        """Release resources of the run; its last state has been displayed."""
