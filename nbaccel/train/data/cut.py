"""Cut: splits one collated batch into parts, each with its share of the samples. Runs in ranks; no communication.

It decides which samples are in which part. The gate (`nbaccel.train.gate`) decides when parts are handed out, and
what waits for the last of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from nbaccel.errors import CannotCut, CannotSplit
from nbaccel.train.microbatch.slicing import Samples

__all__ = ["Cut", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """Samples `start` to `stop` of a batch of `rows`.

    rows: 0 where nothing was cut.
    is_first, is_last: of its batch.  is_repeated: handed out again, to make up the number; its weight is zero.
    """

    batch: Any
    start: int = 0
    stop: int = 0
    rows: int = 0
    is_first: bool = True
    is_last: bool = True
    is_repeated: bool = False

    @property
    def share(self) -> float:
        """The fraction of the batch's samples in this part.

        >>> Part(None, 0, 2, rows=8).share
        0.25
        """
        if self.is_repeated:
            return 0.0
        return (self.stop - self.start) / self.rows if self.rows else 1.0

    def real(self, samples: int, world_size: int) -> int:
        """Return how many samples of this part, of all ranks, are among the first `samples` of all ranks' batches.

        The ranks' batches have equal sizes and follow one another, as in a loader's last round that was filled up.

        >>> [Part(None, start, start + 2, rows=4).real(5, world_size=2) for start in (0, 2)]
        [3, 2]
        """
        starts = range(self.start, self.rows * world_size, self.rows)
        return sum(min(max(samples - start, 0), self.stop - self.start) for start in starts)


@dataclass(frozen=True, slots=True)
class Cut:
    """The way in which the batches of one loader are cut.

    parts: how many a whole batch gives.  batch_size: samples in a batch of this rank; None where that differs.
    is_level: ranks hold equally many samples at the same time. A shorter batch then gives fewer parts, none larger
    than those of a whole one. Otherwise every batch gives `parts`, so that all ranks reach the collectives of a loop.
    """

    parts: int
    batch_size: int | None = None
    is_level: bool = True

    @property
    def part_size(self) -> int | None:
        """Samples in the largest part; None where that differs."""
        return None if self.batch_size is None else math.ceil(self.batch_size / self.parts)

    def of(self, batch: Any) -> list[Part]:
        """Return the parts of `batch`, as equal as possible, in its order.

        Raises:
                CannotCut: it is not clear which values belong to which sample.

        >>> [part.batch for part in Cut(2, batch_size=4).of(["a", "b", "c"])]
        [['a', 'b'], ['c']]
        """
        samples = _samples(batch)
        rows = samples.count
        number = self._number(rows)
        cuts = max(1, min(number, rows))
        spans = list(pairwise(math.ceil(rows * at / cuts) for at in range(cuts + 1)))  # the larger parts come first
        spans += [spans[-1]] * (number - cuts)
        return [
            Part(
                samples.take(start, stop),
                start,
                stop,
                rows,
                is_first=at == 0,
                is_last=at == len(spans) - 1,
                is_repeated=at >= cuts,
            )
            for at, (start, stop) in enumerate(spans)
        ]

    def _number(self, rows: int) -> int:
        if not self.is_level:
            return self.parts
        size = self.part_size
        return min(self.parts, rows if size is None else math.ceil(rows / size)) or 1


def _samples(batch: Any) -> Samples:
    try:
        return Samples.of(batch)
    except CannotSplit as error:
        if type(batch) in (list, tuple) and not any(hasattr(entry, "__array__") for entry in batch):
            return Samples(batch, len(batch), lambda whole, start, stop: whole[start:stop])  # texts or objects
        raise CannotCut(f"memory ran out with whole batches, and this one cannot be cut: {error}") from error
