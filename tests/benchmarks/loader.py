"""What a prepared loader costs beside the raw one, in CPU time per batch: ``python tests/benchmarks/loader.py``.

Alone, the same loader twice tells how far two equal things lie apart. In two ranks the rows are this rank's batches: of
a dataset with indices, of a stream that rank 0 reads and sends, and of one that both read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration

_BATCH_SIZE = 8
_SAMPLES = 16_000
_TURNS = 9


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(_SAMPLES):
            yield torch.zeros(16)


def _indexed() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(_SAMPLES, 16), torch.zeros(_SAMPLES)), _BATCH_SIZE, shuffle=True)


def _streamed() -> DataLoader[Any]:
    return DataLoader(_Stream(), _BATCH_SIZE)


def _prepared(loader: DataLoader[Any], dispatch: bool | None = None) -> DataLoader[Any]:
    configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
    prepared: DataLoader[Any] = Accelerator(cpu=True, dataloader_config=configuration).prepare(loader)
    return prepared


def measure() -> dict[str, float]:
    """Median CPU microseconds per batch of this rank, in interleaved turns."""
    rows = {
        "raw": _indexed(),
        "raw again": _indexed(),
        "prepared": _prepared(_indexed()),
        "raw stream": _streamed(),
        "stream, rank 0 reads": _prepared(_streamed()),
        "stream, all read": _prepared(_streamed(), dispatch=False),
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(_TURNS):
        for name, loader in rows.items():
            began, batches = time.process_time(), 0
            for _ in loader:
                batches += 1
            times[name].append((time.process_time() - began) / batches * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def show(title: str, row: dict[str, float]) -> None:
    print(title)
    for name, microseconds in row.items():
        raw = row["raw stream" if "stream" in name else "raw"]
        print(f"  {name:22} {microseconds:8.1f} us a batch, {microseconds / raw:5.2f} of raw")


if __name__ == "__main__":
    torch.set_num_threads(1)
    show("one process", measure())
    for rank, row in enumerate(run_ranks(2, measure)):
        show(f"rank {rank} of 2", row)
