"""Measure how long the worker processes of a `DataLoader` take to make a batch. Runs in ranks, and in their workers.

Workers make the first batches before the loop asks for them, so the time that the loop waits for them says nothing of a
whole epoch. Each worker writes its seconds into memory that it shares with its rank. Workers that are not forked have
no such memory.
"""

from __future__ import annotations

import functools
import mmap
import struct
import time
from collections.abc import Callable
from typing import Any

__all__ = ["BatchesMade", "WorkerTimes"]

_ROW = struct.Struct("dd")
"""Of each worker: the seconds of its batches together, and their number."""


class BatchesMade:
    """Seconds in which the workers of one iterator make batches, in memory that they inherit."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._memory = mmap.mmap(-1, _ROW.size * workers)

    def note(self, worker: int, seconds: float) -> None:
        """Add a batch. Runs in a worker, which alone writes its row.

        A worker of a loader that is not cut, such as one of another thread, has inherited the times of another loader.
        """
        if worker >= self._workers:
            return
        total_s, count = self._row(worker)
        _ROW.pack_into(self._memory, worker * _ROW.size, total_s + seconds, count + 1)

    @property
    def mean_s(self) -> float | None:
        """Seconds in which one worker has made a batch, in the mean of all so far; None before the first."""
        rows = [self._row(worker) for worker in range(self._workers)]
        count = sum(count for _, count in rows)
        return sum(total_s for total_s, _ in rows) / count if count else None

    def _row(self, worker: int) -> tuple[float, float]:
        total_s, count = _ROW.unpack_from(self._memory, worker * _ROW.size)
        return total_s, count


class WorkerTimes:
    """Hooks in what torch's workers call for a batch, between `begin` and `end`."""

    def __init__(self) -> None:
        self._inherited: BatchesMade | None = None
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        from torch.utils.data._utils import fetch

        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            real = kind.fetch
            setattr(kind, "fetch", self._measured(real))  # noqa: B010  # mypy lets no method be assigned
            self._undo.append(functools.partial(setattr, kind, "fetch", real))

    def end(self) -> None:
        while self._undo:
            self._undo.pop()()

    def share(self, workers: int) -> BatchesMade:
        """Return the times of workers that start next; those that run keep theirs."""
        self._inherited = BatchesMade(workers)
        return self._inherited

    def _measured(self, real: Callable[..., Any]) -> Callable[..., Any]:
        from torch.utils.data import get_worker_info

        @functools.wraps(real)
        def fetch(fetcher: Any, index: Any) -> Any:
            worker, began = get_worker_info(), time.perf_counter()
            batch = real(fetcher, index)
            if worker is not None and self._inherited is not None:
                self._inherited.note(worker.id, time.perf_counter() - began)
            return batch

        return fetch
