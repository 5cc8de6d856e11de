"""Time that this rank has spent in exchanges with others, summed up by what exchanges. Runs in ranks.

Two readings of a clock surround each exchange of a step, which takes a hundred times as long. torch's
DistributedDataParallel exchanges inside of a backward on the CPU: there every eighth backward is measured, and what it
does not compute is exchange and waiting. How much longer computations take on a busy machine than they compute is known
from the rest of the task, and left out.
"""

from __future__ import annotations

import time

from nbaccel.base.events import ExchangeTime

__all__ = ["ExchangeClock", "exchange_clock"]

_EVERY = 8
_SECOND = 2
"""The first backward also waits for ranks that have started later."""


class ExchangeClock:
    """The sums of one task.

    Attributes:
        seconds: Time in exchanges since the task began. What exchanges adds to it.
        backwards: Backwards in which torch exchanges gradients.

    Example:
        >>> clock = ExchangeClock()
        >>> clock.begin()
        >>> clock.seconds += 0.25
        >>> clock.read().seconds
        0.25
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a task. Called in the main thread of the process that exchanges."""
        self.seconds = 0.0
        self.backwards = self._measured = self._seen_backwards = 0
        self._wall_s = self._busy_s = 0.0
        self._seen_s = self._seen_busy_s = 0.0
        self._began_s, self._began_busy_s = time.perf_counter(), time.thread_time()

    def is_due(self) -> bool:
        """Count one backward; return whether it is measured."""
        self.backwards += 1
        return self.backwards % _EVERY == _SECOND

    def end_backward(self, began_s: float, began_busy_s: float) -> None:
        """Add a backward that was measured.

        Args:
            began_s, began_busy_s: `time.perf_counter` and `time.thread_time` before it.
        """
        self._seen_s, self._seen_busy_s = time.perf_counter(), time.thread_time()
        self._seen_backwards = self.backwards
        self._measured += 1
        self._wall_s += self._seen_s - began_s
        self._busy_s += self._seen_busy_s - began_busy_s

    def read(self) -> ExchangeTime:
        """Return the time in exchanges so far, and that since the task began. Called from any thread."""
        of_s = time.perf_counter() - self._began_s
        if not self._measured:
            return ExchangeTime(self.seconds, of_s)
        until_then = self._seen_backwards / self._measured
        elsewhere_s = self._seen_s - self._began_s - self.seconds - self._wall_s * until_then
        elsewhere_busy_s = self._seen_busy_s - self._began_busy_s - self._busy_s * until_then
        slower = max(1.0, elsewhere_s / elsewhere_busy_s) if elsewhere_busy_s > 0 else 1.0
        waited_s = max(0.0, self._wall_s - slower * self._busy_s) * self.backwards / self._measured
        return ExchangeTime(self.seconds + waited_s, of_s)


exchange_clock = ExchangeClock()
