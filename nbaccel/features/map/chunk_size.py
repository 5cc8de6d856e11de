"""Chunk sizes: how many items a rank claims at a time, and passes to one call of the function. Runs in ranks; pure."""

from __future__ import annotations

__all__ = ["ChunkSize"]

_TARGET_S = 0.5
"""Seconds of work in one claim: a claim costs a third of a millisecond, and ranks end within a claim of each other."""

_GROWTH = 2
_MOST = 8192
_SHARE_OF_REST = 2
"""A rank claims at most this part of its share of what is left, so that all ranks end at nearly the same time
(guided self-scheduling: Polychronopoulos and Kuck 1987)."""


class ChunkSize:
    """The number of items in the next claim, by the time and the memory that earlier ones took.

    Args:
        batch_size: Most items of one call, as the program chose; None: a claim is one call.
        ranks: That share what is left.

    Example:
        >>> size = ChunkSize(None, ranks=2)
        >>> size.took(1, seconds=0.01, shortest=400)
        >>> size.next(remaining=1000), size.next(remaining=4)
        (2, 1)
        >>> size.does_not_fit(64, longest=400)
        >>> size.in_one_call
        32
    """

    def __init__(self, batch_size: int | None, ranks: int) -> None:
        self._batch_size = batch_size
        self._ranks = ranks
        self._size = batch_size or 1
        self._most_units: float | None = None
        self._length = 1

    @property
    def in_one_call(self) -> int:
        """Most items of one call."""
        size = _MOST if self._batch_size is None else self._batch_size
        if self._most_units is not None:
            size = min(size, int(self._most_units // self._length))
        return max(1, size)

    def next(self, remaining: int | None) -> int:
        """Return how many items to claim.

        Args:
            remaining: Those that all ranks have left; None if that is unknown.
        """
        size = self._size if self._batch_size else min(self._size, self.in_one_call)
        return size if remaining is None else max(1, min(size, remaining // (_SHARE_OF_REST * self._ranks)))

    def took(self, count: int, seconds: float, shortest: int) -> None:
        """Learn from a claim of `count` items.

        Args:
            shortest: Length of the shortest, which the next ones do not exceed.
        """
        self._length = max(1, shortest)
        fitting = _MOST if seconds <= 0 else int(count * _TARGET_S / seconds)
        least = self._batch_size or 1
        self._size = max(least, min(fitting, self._size * _GROWTH, _MOST))
        if self._batch_size:
            self._size -= self._size % self._batch_size

    def does_not_fit(self, count: int, longest: int) -> None:
        """Learn that a call with `count` items ran out of memory, the longest of which had this length."""
        self._length = max(1, longest)
        self._most_units = count * self._length / 2
