"""Excerpt: which lines of a long output a notebook keeps. Runs in the kernel; pure.

A notebook file holds every line that was shown, for good. So it is shown the first lines, then one now and then, by
which a person sees that the run goes on, and the last ones. All of them are in the log.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

__all__ = ["KEPT_BYTES", "Excerpt", "Shown"]

KEPT_BYTES = 180_000
"""Of the first lines. With those that follow, an output has about 200 kB: 2,000 lines of 100 characters."""
_LAST_BYTES = 8_192
_NOW_AND_THEN_S = 10.0
_PART_OF_TIME = 0.02
"""The pause grows with the run: a night is not to show a line every ten seconds."""


class Shown(NamedTuple):
    """A line as the screen gets it. lines: how many of the ranks' lines it stands for."""

    stream: str
    text: str
    lines: int = 1


class Excerpt:
    """Takes every line, and gives those to be shown.

    first_bytes: how much of the beginning is shown; None for everything.
    shown: how many lines of the ranks have been given.

    >>> excerpt = Excerpt(first_bytes=8)
    >>> lines = [Shown("stdout", f"line {number}\\n") for number in range(6)]
    >>> [bool(excerpt.take(line, now=0.0)) for line in lines], excerpt.shown
    ([True, True, False, False, False, False], 2)
    >>> [line.text for line in excerpt.last()], excerpt.shown
    (['line 2\\n', 'line 3\\n', 'line 4\\n', 'line 5\\n'], 6)
    """

    def __init__(self, first_bytes: int | None) -> None:
        self.shown = 0
        self._left = first_bytes
        self._tail: deque[Shown] = deque()
        self._tail_bytes = 0
        self._cut_at = self._next_at = 0.0

    @property
    def is_cut(self) -> bool:
        """Whether the first lines are over."""
        return self._left is not None and self._left <= 0

    def take(self, line: Shown, now: float) -> list[Shown]:
        """What is to be shown now that `line` has come: the line, or nothing."""
        if not self.is_cut:
            if self._left is not None:
                self._left -= len(line.text)
                self._cut_at, self._next_at = now, now + _NOW_AND_THEN_S
        elif now >= self._next_at:
            self._next_at = now + max(_NOW_AND_THEN_S, (now - self._cut_at) * _PART_OF_TIME)
            self._tail.clear()  # those after it may be the last ones
            self._tail_bytes = 0
        else:
            self._wait(line)
            return []
        self.shown += line.lines
        return [line]

    def last(self) -> list[Shown]:
        """The last lines, as far as they are not on the screen: nothing more will come."""
        lines = list(self._tail)
        self._tail.clear()
        self.shown += sum(line.lines for line in lines)
        return lines

    def _wait(self, line: Shown) -> None:
        self._tail.append(line)
        self._tail_bytes += len(line.text)
        while len(self._tail) > 1 and self._tail_bytes > _LAST_BYTES:
            self._tail_bytes -= len(self._tail.popleft().text)
