"""Excerpt: chooses the lines of a long output that a notebook keeps. Runs in the kernel; pure.

A notebook file keeps every line that was shown for good. So the notebook shows the first lines, then a line from time
to time, which proves that the run goes on, and the last ones. The log has all lines.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

__all__ = ["KEPT_BYTES", "Excerpt", "Shown"]

KEPT_BYTES = 180_000
"""Bytes of the first lines. With the later ones, an output has about 200 kB: 2,000 lines of 100 characters."""
_LAST_BYTES = 12_288
"""Bytes of the last lines, in equal shares for the ranks: one rank may have been silent for long."""
_LAST_BYTES_OF_RANK = 4_096
_NOW_AND_THEN_S = 10.0
_PART_OF_TIME = 0.02
"""Fraction of the run's time by which the pause grows: a night is not to show a line every ten seconds."""


class Shown(NamedTuple):
    """A line for the screen.  rank: that of the line, None for all.  lines: number of ranks' lines it stands for."""

    stream: str
    text: str
    rank: int | None = None
    lines: int = 1


class Excerpt:
    """Takes every line, and returns those to show.

    first_bytes: bytes of the beginning to show; None for everything.
    shown: number of lines of the ranks that were returned.

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
        self._tails: defaultdict[int | None, _Tail] = defaultdict(_Tail)
        self._order = 0
        self._cut_at = self._next_at = 0.0

    @property
    def is_cut(self) -> bool:
        """Return whether the first lines are over."""
        return self._left is not None and self._left <= 0

    def take(self, line: Shown, now: float) -> list[Shown]:
        """Return the lines to show after `line` has come: the line, or nothing."""
        if not self.is_cut:
            if self._left is not None:
                self._left -= len(line.text)
                self._cut_at, self._next_at = now, now + _NOW_AND_THEN_S
        elif now >= self._next_at:
            self._next_at = now + max(_NOW_AND_THEN_S, (now - self._cut_at) * _PART_OF_TIME)
            self._tails.pop(line.rank, None)  # those after it may be the rank's last ones
        else:
            self._order += 1
            self._tails[line.rank].add(self._order, line)
            return []
        self.shown += line.lines
        return [line]

    def last(self) -> list[Shown]:
        """Return the last lines that are not on the screen; called when no more lines come."""
        tails = self._tails.values()
        for tail in tails:
            tail.trim(_LAST_BYTES // len(tails))
        lines = [line for _, line in sorted(numbered for tail in tails for numbered in tail.lines)]
        self._tails.clear()
        self.shown += sum(line.lines for line in lines)
        return lines


class _Tail:
    """The last lines of one rank, each with its position among those of all ranks."""

    def __init__(self) -> None:
        self.lines: deque[tuple[int, Shown]] = deque()
        self._nbytes = 0

    def add(self, order: int, line: Shown) -> None:
        self.lines.append((order, line))
        self._nbytes += len(line.text)
        self.trim(_LAST_BYTES_OF_RANK)

    def trim(self, nbytes: int) -> None:
        while len(self.lines) > 1 and self._nbytes > nbytes:
            _, line = self.lines.popleft()
            self._nbytes -= len(line.text)
