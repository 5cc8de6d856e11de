"""Batches of inputs of about equal lengths, so that little of a batch is padding. Pure; runs anywhere.

For inference over texts, sounds or graphs of very different sizes: each batch is padded to its longest input, and in
the original order of inputs padding is most of the work. This module handles indices only; `split_between_processes`
decides which rank runs which batch. It is not for training, which needs its samples in a random order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = [
    "LengthBatches",
    "batches_by_length",
]

_T = TypeVar("_T")


class LengthBatches(list[list[int]]):
    """Indices of inputs by batch; `restore` returns results to the order of the inputs.

    Args:
        lengths: The lengths of all inputs, in their own order.
    """

    def __init__(self, batches: Iterable[list[int]], lengths: list[int]) -> None:
        super().__init__(batches)
        self.lengths = lengths

    @property
    def padding(self) -> float:
        """Share of the padded batches that is padding.

        Example:
            >>> batches_by_length([3, 4], batch_size=2).padding
            0.125
        """
        padded = sum(_padded(batch, self.lengths) for batch in self)
        return 1 - sum(self.lengths) / padded if padded else 0.0

    def restore(self, results: Iterable[Iterable[_T]]) -> list[_T]:
        """Return the results of the inputs in the order of the inputs.

        Args:
            results: For every batch, in the order of the batches, one result for each of its inputs: a list, or a
                tensor with the inputs in its first dimension.

        Raises:
            ValueError: Results are missing, or there are too many, as with ``apply_padding=True``.

        Example:
            >>> batches_by_length([5, 9], batch_size=1).restore([["long"], ["short"]])
            ['short', 'long']
        """
        given = [list(result) for result in results]
        if len(given) != len(self):
            raise ValueError(
                f"restore() needs one result for each of the {len(self)} batches, in their order, and got {len(given)}"
                "; those of several ranks are gathered first: gather_object(results)"
            )
        by_input: dict[int, _T] = {}
        for number, (batch, result) in enumerate(zip(self, given, strict=True)):
            if len(result) != len(batch):
                raise ValueError(f"batch {number} has {len(batch)} inputs, and its result {len(result)} entries")
            by_input.update(zip(batch, result, strict=True))
        return [by_input[index] for index in range(len(self.lengths))]


def batches_by_length(lengths: Iterable[int], batch_size: int, max_tokens: int | None = None) -> LengthBatches:
    """Return batches of indices, each of inputs of about equal length. Any rank may call this alone; no communication.

    The longest batch is the first, so that one which does not fit into memory fails at once. After it long and short
    batches alternate, so that each rank's share of `split_between_processes` takes about as long.

    Args:
        lengths: The lengths of the inputs, in any unit, such as tokens.
        batch_size: The largest number of inputs in a batch.
        max_tokens: The largest total length of a batch with its padding. Short inputs then come in larger batches than
            long ones; a longer input is a batch by itself.

    Raises:
        ValueError: `batch_size` or `max_tokens` is below 1.

    Example:
        >>> from nbaccel import PartialState
        >>> from nbaccel.utils import gather_object
        >>> texts = ["to be", "or", "not to be that is", "the", "question"]
        >>> batches = batches_by_length(map(len, texts), batch_size=2)
        >>> batches
        [[2], [1, 3], [0, 4]]
        >>> with PartialState().split_between_processes(batches) as mine:
        ...     results = [[texts[index].upper() for index in batch] for batch in mine]  # the model is called here
        >>> batches.restore(gather_object(results))
        ['TO BE', 'OR', 'NOT TO BE THAT IS', 'THE', 'QUESTION']
    """
    if batch_size < 1 or (max_tokens is not None and max_tokens < 1):
        raise ValueError(f"batch_size and max_tokens must be at least 1, got {batch_size} and {max_tokens}")
    known = [int(length) for length in lengths]  # of a tensor or an array, too
    batches: list[list[int]] = []
    # From the shortest on: a batch that is not full then has the longest inputs, where padding would cost most.
    for index in sorted(range(len(known)), key=known.__getitem__):
        most = batch_size if max_tokens is None else min(batch_size, max_tokens // max(1, known[index]))
        if not batches or len(batches[-1]) >= most:
            batches.append([])
        batches[-1].append(index)
    batches.reverse()
    return LengthBatches((batches[place] for place in _spread(len(batches))), known)


def _padded(batch: list[int], lengths: list[int]) -> int:
    return len(batch) * max(lengths[index] for index in batch)


def _spread(count: int) -> list[int]:
    """Return ``range(count)`` in an order of which every stretch has small and large numbers: their bits are reversed.

    (Van der Corput's sequence.) The halves are the even and the odd numbers, the quarters every fourth one, and so on.

    Example:
        >>> _spread(6)
        [0, 4, 2, 1, 5, 3]
    """
    bits = max(count - 1, 0).bit_length()
    turned = (int(f"{place:0{bits}b}"[::-1], 2) if bits else 0 for place in range(1 << bits))
    return [place for place in turned if place < count]
