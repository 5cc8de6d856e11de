"""Time that this rank has spent in exchanges with others, summed up by what exchanges. Runs in ranks.

Two readings of a clock surround each exchange of a step, which takes a hundred times as long. torch's
DistributedDataParallel exchanges inside of a backward on the CPU: there every eighth backward is measured, and what it
does not compute is exchange and waiting. How much longer computations take on a busy machine than they compute is known
from the rest of the task, and left out.
"""

from __future__ import annotations

import time
from collections import deque

from nbaccel.base.events import ExchangeTime

__all__ = ["EVERY", "MEASURED", "ExchangeClock", "exchange_clock"]

EVERY, MEASURED = 8, 2
"""Backwards of which one is measured, and which. The first one also waits for ranks that have started later."""


class ExchangeClock:
    """The sums of one task.

    Attributes:
        seconds: Time in exchanges since the task began. What exchanges adds to it.
        backwards: Backwards in which torch exchanges gradients. What runs them counts them, and measures each that
            leaves the rest `MEASURED` when it is divided by `EVERY`: without a call in the others.
        measured: Of each that was measured, `time.perf_counter` and `time.thread_time` before and after it, and its
            number. `read` sums them up.

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
        self.measured = _readings()
        self._wall_s = self._busy_s = 0.0
        self._seen_s = self._seen_busy_s = 0.0
        self._began_s, self._began_busy_s = time.perf_counter(), time.thread_time()

    def read(self) -> ExchangeTime:
        """Return the time in exchanges so far, and that since the task began. Called from any thread."""
        of_s = time.perf_counter() - self._began_s
        measured, self.measured = self.measured, _readings()
        for began_s, began_busy_s, ended_s, ended_busy_s, backwards in measured:
            self._wall_s += ended_s - began_s
            self._busy_s += ended_busy_s - began_busy_s
            self._seen_s, self._seen_busy_s, self._seen_backwards = ended_s, ended_busy_s, backwards
        self._measured += len(measured)
        if not self._measured:
            return ExchangeTime(self.seconds, of_s)
        until_then = self._seen_backwards / self._measured
        elsewhere_s = self._seen_s - self._began_s - self.seconds - self._wall_s * until_then
        elsewhere_busy_s = self._seen_busy_s - self._began_busy_s - self._busy_s * until_then
        slower = max(1.0, elsewhere_s / elsewhere_busy_s) if elsewhere_busy_s > 0 else 1.0
        waited_s = max(0.0, self._wall_s - slower * self._busy_s) * self.backwards / self._measured
        return ExchangeTime(self.seconds + waited_s, of_s)


def _readings() -> deque[tuple[float, float, float, float, int]]:
    return deque(maxlen=1024)  # where nobody reads them, as in a script


exchange_clock = ExchangeClock()
