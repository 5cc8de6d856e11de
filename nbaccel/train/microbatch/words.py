"""Words: the few numbers that ranks sum beside their gradients, between the host and the device. Runs in ranks.

The host writes them before a sum and reads them after it. On the CPU they are accessed in place. On CUDA they are
copied through pinned memory, in the stream of the computation: writing waits for nothing, and one event says that
they can be read. Memory for that is allocated once, since a rank without free memory has to write its words too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Words", "make_words"]


class Words:
    """A report of `count` numbers, followed by one mark per parameter, in `place`: the end of the summed tensor.

    This class is for a place that the host can write and read.
    """

    def __init__(self, place: Tensor, count: int) -> None:
        self._place = place
        self._written = self._lay_out()
        self._received = self._written
        self._count = count

    def _lay_out(self) -> Tensor:
        return self._place

    def write(self, report: Sequence[float], used: Sequence[bool]) -> None:
        """Write this rank's words.  used: the parameters that took part."""
        numbers, marks = self._written[: self._count], self._written[self._count :]
        numbers.copy_(torch.tensor(report, dtype=torch.float64, device="cpu"))
        if all(used):
            marks.fill_(1.0)
        else:
            marks.copy_(torch.tensor(used, dtype=torch.float32, device="cpu"))

    def arrival(self, last_sum: Any) -> Any:
        """Return the work to wait for instead of `last_sum`, the work that sums the words."""
        return last_sum

    def read(self) -> list[float]:
        """Return the report of all ranks; called after the sums are over."""
        said: list[float] = self._received[: self._count].tolist()
        return said

    def unused(self) -> list[bool]:
        """Return which parameters took part on no rank, as of the last `read`."""
        return [mark == 0 for mark in self._received[self._count :].tolist()]


def make_words(place: Tensor, count: int, sums_on: torch.device) -> Words:
    """Return the words in `place`.  sums_on: the device on which the process group sums."""
    if place.is_cpu:
        return Words(place, count)
    return _Pinned(place, count, sums_on) if place.device.type == "cuda" else _Copied(place, count)


class _Copied(Words):
    """Words on a device for which no copy without waiting is known."""

    def _lay_out(self) -> Tensor:
        return torch.zeros(self._place.shape, dtype=self._place.dtype, device="cpu")

    def write(self, report: Sequence[float], used: Sequence[bool]) -> None:
        super().write(report, used)
        self._place.copy_(self._written)

    def read(self) -> list[float]:
        self._received.copy_(self._place)
        return super().read()


class _Pinned(Words):
    """Words on CUDA."""

    def __init__(self, place: Tensor, count: int, sums_on: torch.device) -> None:
        super().__init__(place, count)
        self._received = self._lay_out()
        self._left, self._arrived = torch.cuda.Event(), torch.cuda.Event()
        self._follows_sums = sums_on.type == "cuda"

    def _lay_out(self) -> Tensor:
        return torch.zeros(self._place.shape, dtype=self._place.dtype, device="cpu", pin_memory=True)

    def write(self, report: Sequence[float], used: Sequence[bool]) -> None:
        self._left.synchronize()  # of the step before; not done only if that one was aborted
        super().write(report, used)
        self._place.copy_(self._written, non_blocking=True)
        self._left.record(torch.cuda.current_stream(self._place.device))

    def arrival(self, last_sum: Any) -> Any:
        return _Arrival(last_sum, self) if self._follows_sums else last_sum

    def fetch(self) -> torch.cuda.Event:
        """Begin to copy the words to the host; return the event that marks the end of the copy."""
        self._received.copy_(self._place, non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(self._place.device))
        return self._arrived

    def read(self) -> list[float]:
        if not self._follows_sums:
            self.fetch()
        self._arrived.synchronize()
        return super().read()


class _Arrival:
    """A sum on the device and the copy of its words to the host, as one work to wait for.

    The device waits for the sum, and copies; so the host, which polls, wakes up once and not twice.
    """

    def __init__(self, work: Any, words: _Pinned) -> None:
        self._work = work
        self._words = words
        self._event: torch.cuda.Event | None = None

    def is_completed(self) -> bool:
        if self._event is None:
            self._work.wait()  # lets the stream wait, not the host
            self._event = self._words.fetch()
        # The event is behind the sum in the stream, and the work itself must not be asked during an abort.
        return bool(self._event.query())

    def wait(self) -> None:
        self._work.wait()
