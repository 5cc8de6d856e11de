"""Measure the time of a GPU for parts of a program that does not wait for it. Runs in ranks.

A call on CUDA returns before the device has done its work, so the host's clock alone tells how long the program took to
ask for it. `device_seconds` waits for the device, and is read at the borders of rounds. A `DeviceMark` does not wait:
the device notes when it comes to it, and `DeviceSpans` reads those times later. Between two marks lies the work that
was given in between, and the time in which the device had nothing to do: the spans of a pass add up to its time.

None of them starts CUDA, raises the error of a device that has failed (the program's next call does), or touches a
graph that is being captured. `wait_for_device` comes at the end of a program, which no call follows, and raises it.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["DeviceMark", "DeviceSpans", "device_seconds", "wait_for_device"]

_MOST_SPANS = 2000
"""Spans that are kept until they are read together, which waits for the device."""


def device_seconds(clock: Callable[[], float] | None = None) -> float:
    """Return the time at which the device has done all work that it was given; without CUDA that is now."""
    cuda = _cuda()
    if cuda is not None:
        with suppress(RuntimeError):
            cuda.synchronize()
    return time.perf_counter() if clock is None else clock()


def wait_for_device() -> None:
    """Return when the device has done all work that it was given.

    Raises:
        RuntimeError: It has failed; that a program's last lines are the cause is seen only now.
    """
    cuda = _cuda()
    if cuda is not None:
        cuda.synchronize()


class DeviceMark:
    """A moment in the program.

    Attributes:
        host_s: By the host's clock.
        event: By the device's; None without CUDA.
    """

    __slots__ = ("event", "host_s")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.event: Any = None
        cuda = _cuda()
        if cuda is not None:
            with suppress(RuntimeError):
                event = cuda.Event(enable_timing=True)
                event.record()
                self.event = event
        self.host_s = clock()


class DeviceSpans:
    """Seconds by name, each between two marks."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._waiting: list[tuple[str, DeviceMark, DeviceMark]] = []

    def add(self, name: str, since: DeviceMark, until: DeviceMark) -> None:
        """Count the time between two marks as `name`."""
        if since.event is None or until.event is None:
            self._seconds[name] += until.host_s - since.host_s
            return
        self._seconds[name] += 0.0  # names keep the order in which they came
        self._waiting.append((name, since, until))
        if len(self._waiting) >= _MOST_SPANS:
            self._read()

    def seconds(self) -> dict[str, float]:
        """Return the seconds so far; waits for the device where it has not come to the last mark."""
        self._read()
        return dict(self._seconds)

    def _read(self) -> None:
        if self._waiting:
            with suppress(RuntimeError):
                self._waiting[-1][2].event.synchronize()
        for name, since, until in self._waiting:
            seconds = until.host_s - since.host_s
            with suppress(RuntimeError):  # marks on two devices, or a device that has failed
                seconds = since.event.elapsed_time(until.event) / 1000
            self._seconds[name] += seconds
        self._waiting.clear()


def _cuda() -> Any:
    """Return `torch.cuda` if this process uses it, and work that it is given now is not recorded as a graph."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    with suppress(RuntimeError):
        return None if torch.cuda.is_current_stream_capturing() else torch.cuda
    return None
