"""Excerpt: which lines of a long output a notebook keeps. Runs in the kernel; pure.

A notebook file holds every line that was shown, for good. So it is shown the first lines, then one now and then, by
which a person sees that the run goes on, and the last ones. All of them are in the log.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

__all__ = ["KEPT_BYTES", "Excerpt", "Shown"]

KEPT_BYTES = 180_000
"""Of the first lines. With those that follow, an output has about 200 kB: 2,000 lines of 100 characters."""
_LAST_BYTES = 12_288
"""Of the last lines, in equal shares for the ranks: one may have been silent for long."""
_LAST_BYTES_OF_RANK = 4_096
_NOW_AND_THEN_S = 10.0
_PART_OF_TIME = 0.02
"""The pause grows with the run: a night is not to show a line every ten seconds."""


class Shown(NamedTuple):
    """A line as the screen gets it.  rank: whose, None for all.  lines: how many of the ranks' lines it stands for."""

    stream: str
    text: str
    rank: int | None = None
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
        self._tails: defaultdict[int | None, _Tail] = defaultdict(_Tail)
        self._order = 0
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
            self._tails.pop(line.rank, None)  # those after it may be the rank's last ones
        else:
            self._order += 1
            self._tails[line.rank].add(self._order, line)
            return []
        self.shown += line.lines
        return [line]

    def last(self) -> list[Shown]:
        """The last lines, as far as they are not on the screen: nothing more will come."""
        tails = self._tails.values()
        for tail in tails:
            tail.trim(_LAST_BYTES // len(tails))
        lines = [line for _, line in sorted(numbered for tail in tails for numbered in tail.lines)]
        self._tails.clear()
        self.shown += sum(line.lines for line in lines)
        return lines


class _Tail:
    """The last lines of one rank, each with its place among those of all."""

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
