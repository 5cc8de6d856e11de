"""Let a loader tell how many samples each of its batches has. Runs in ranks and in their loaders' worker processes.

Only what calls the collate_fn knows that number: the last batch of a stream, or of each worker process, may be short.
So the collate_fn is wrapped, and gives `CountedBatch`es. In its first batch it also looks for lists of which lengths do
not tell whether their entries are samples or columns. Where there is one, the collate_fn is called once more, with
copies of the samples and one sample more: a list of samples gets longer, columns do not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader, default_collate

from nbaccel.train.data.order import PrivateRandomness
from nbaccel.train.data.pieces import iterates_as_torch
from nbaccel.train.distributed.counted_batch import (
    CountedBatch,
    ListLayout,
    doubtful_lists,
    lengths_of_lists,
    possible_counts,
)

__all__ = ["as_counted", "counting"]


def counting(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return `loader` with batches that are `CountedBatch`es, where torch's own code collates its samples.

    The loader itself is not changed; persistent worker processes are those of the one returned.
    """
    if not iterates_as_torch(loader) or hasattr(loader, "state_dict"):  # it would not be that one which is iterated
        return loader
    if loader.batch_size is None and loader.batch_sampler is None:  # the data set itself gives batches
        return loader
    again = copy.copy(loader)
    again._iterator = None
    again.collate_fn = _Counting(loader.collate_fn)
    return again


def as_counted(batch: Any, batch_size: int | None) -> CountedBatch | None:
    """Return a batch of any loader with its number of samples; None where that is not known.

    A loader of another class hands out what it likes. There it is the number of rows that all arrays have, unless a
    list of `batch_size` entries contradicts them.
    """
    if isinstance(batch, CountedBatch):
        return batch
    rows, lengths = possible_counts(batch)
    if rows is None:
        count = batch_size if batch_size in lengths else lengths.pop() if len(lengths) == 1 else None
    else:
        count = None if batch_size in lengths else rows
    return None if count is None else CountedBatch(batch, count)


class _Counting:
    """A collate_fn that gives `CountedBatch`es."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._layout = ListLayout(are_columns=True) if collate is default_collate else None

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        if not isinstance(samples, Sized) or isinstance(samples, Mapping):  # all of them at once, from __getitems__
            return batch
        count = len(samples)
        if self._layout is None:
            entries = dict(doubtful_lists(batch, count))
            if None in entries.values():
                batch = copy.deepcopy(batch)  # the collate_fn may fill the same memory again
                entries |= self._tried(samples, count)
            self._layout = ListLayout({path: known for path, known in entries.items() if known is not None})
        return CountedBatch(batch, count, self._layout)

    def _tried(self, samples: Any, count: int) -> dict[str, bool]:
        """Return which lists of a batch get longer with one sample more; nothing where the collate_fn refuses it."""
        try:
            with PrivateRandomness():
                collate = copy.deepcopy(self._collate)
                longer = collate([*copy.deepcopy(samples), copy.deepcopy(samples[0])])
        except Exception:  # of the program's own code, which does not expect this call
            return {}
        return {path: length == count + 1 for path, length in lengths_of_lists(longer)}
