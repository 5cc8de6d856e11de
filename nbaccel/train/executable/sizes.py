"""Sizes: choose the first batch size to try, and the next one after a failure. Pure; runs in ranks and scripts.

The first attempt that fits is the training itself, so there is no trial after it: sizes only decrease, and every step
of it costs a started training. The rule by default, against Accelerate's x 0.9 (up to 45 attempts from 4096 to 37):

- Memory ran out in a forward, or outside of a step: half, at most. The error does not show how much more the rest of
  the step would have needed. From `start` to the largest size that fits, m, these are at most log2(start / m) + 1
  attempts, and the size that fits is more than m / 2.
- It ran out in a backward or in the optimizer: the forward, which holds most of a step's memory, did fit. So m is near:
  x 0.9 twice, x 0.75, then half (under activation checkpointing a backward can need many times the forward).
- The allocator's numbers, which CUDA, ROCm and XPU put into the error, bound m from above: memory is a + b n with
  a >= 0, so with `demand` times the memory needed at n, m is at most n / demand. A single request of seven times the
  device costs one attempt and not three.
- The search does not go below a size that did fit in an earlier call without trying that one.
- When the same bytes were refused at the same line twice, and the line through the memory in use shows that one
  sample would not fit either, there is no further attempt.

Later calls start from the size that fitted. They start higher where the allocator's peak of that run shows that more
fits; see `grown`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbaccel.train.executable.attempt import Place, Shortage

__all__ = ["ByRule", "ByUser", "Sizes", "grown"]

_NEAR = (0.9, 0.9, 0.75)
_HALF = 0.5
_FILLED = 0.97
"""Share of the limit that a predicted size may fill; the rest is for fragments of the allocator."""
_WORTH = 1.1
"""Growth below that is not worth a training that may fail."""


class ByRule:
    """The default way down, described above; for one search."""

    def __init__(self, known_to_fit: int = 0) -> None:
        self._known_to_fit = known_to_fit
        self._near_misses = 0
        self._earlier: list[tuple[int, Shortage]] = []

    def after(self, batch_size: int, shortage: Shortage | None) -> int:
        """Return the size to try when `batch_size` did not fit; 0 when there is none.

        shortage: what was missing here; None where another rank ran out of memory, and its shortage decides.

        >>> rule = ByRule()
        >>> rule.after(128, Shortage("CUDA out of memory")), rule.after(64, Shortage("", Place.BACKWARD))
        (64, 57)
        """
        if shortage is None:
            return batch_size
        is_hopeless = any(shortage.is_hopeless(batch_size, larger, size) for size, larger in self._earlier)
        if is_hopeless and not self._known_to_fit:
            return 0
        self._earlier.append((batch_size, shortage))
        factor = _HALF
        if shortage.place is not Place.ELSEWHERE:
            factor = (*_NEAR, _HALF)[min(self._near_misses, len(_NEAR))]
            self._near_misses += 1
        size = min(int(batch_size * factor), int(batch_size / shortage.demand), batch_size - 1)
        return max(size, self._known_to_fit if self._known_to_fit < batch_size else 0)


class ByUser:
    """The user's ``reduce_batch_size_fn``: called once for each size that did not fit, on every rank."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def after(self, batch_size: int, shortage: Shortage | None) -> int:
        """Return the next size, as `ByRule.after` does.

        Raises:
            ValueError: the function does not reduce, so that the search would never end.
        """
        size = int(self._function())
        if size >= batch_size:
            raise ValueError(
                f"reduce_batch_size_fn must return a smaller batch size each time: it returned {size} after "
                f"{batch_size} did not fit in memory"
            )
        return max(size, 0)


class Sizes:
    """Sizes that one decorated function has learned, from call to call.

    starting: where the first search begins.  reduce: the user's rule, None for the default one.
    """

    def __init__(self, starting: int, reduce: Callable[[], Any] | None = None) -> None:
        self._starting = starting
        self._reduce = reduce
        self._next = starting
        self._known_to_fit = 0

    @property
    def first(self) -> int:
        """The size that a call begins with."""
        return self._next

    def way_down(self) -> ByRule | ByUser:
        """Return the rule for one search."""
        return ByRule(self._known_to_fit) if self._reduce is None else ByUser(self._reduce)

    def fitted(self, batch_size: int, used: float | None = None) -> None:
        """Note that a call succeeded.  used: the largest share of the memory that it took; None where unknown."""
        self._known_to_fit = batch_size
        self._next = batch_size if self._reduce is not None or not used else grown(batch_size, used)

    def nothing_fits(self) -> None:
        """Note that a call has tried everything. The next one starts from the beginning: memory may be free by then."""
        self._next = self._starting
        self._known_to_fit = 0


def grown(batch_size: int, used: float) -> int:
    """Return the largest size that surely fits where `batch_size` took the share `used` of the memory.

    Memory is a + b n with a >= 0, hence at most proportional to n. A growth below a tenth is not worth an attempt.

    >>> grown(64, used=0.5), grown(64, used=0.9), grown(64, used=1.0)
    (124, 64, 64)
    """
    size = int(batch_size * _FILLED / used)
    return size if size >= _WORTH * batch_size else batch_size
