"""Cutting: decides where a batch is cut, into a part for each rank and into turns. Runs in ranks.

All ranks find the same borders without communication. A part may be longer than another: the first batches of a loop
are cut unevenly on purpose.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

from nbaccel.train.implicit.batch_parts import Label, Turn

__all__ = ["Cutter"]

_UNEVEN = 2
"""Number of batches of each loop that are cut unevenly where they could be cut evenly: a divisor of the loss that
depends on the samples then differs between the ranks. Later ones are even: a program may take batches of two
loaders together, and their parts must be equally long where one of them begins again. No part of one sample results
from it, which batch norm could not use, and where a batch comes in several parts none that is longer than the later
ones, for which memory may not suffice."""


class Cutter:
    """Finds the borders of this rank's parts of a task's batches.

    turns: the number of parts that a rank is given of each batch, one after the other, where there are enough samples.
    """

    def __init__(self, rank: int, world_size: int, turns: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._turns = turns
        self._cuts: Counter[Hashable] = Counter()  # batches that were cut, by key

    def parts(self, key: Hashable, count: int) -> list[tuple[int, int, Label]]:
        """Return this rank's parts of a batch of `count` samples, each with its begin and end.

        key: of the pass that the batch comes from.
        """
        size = self._world_size
        turns = max(1, min(self._turns, count // size))
        self._cuts[key] += 1
        is_early = self._cuts[key] <= _UNEVEN
        is_uneven = is_early and turns == 1 and not count % size and count >= 3 * size
        borders = [0, *(rank * count // size + is_uneven for rank in range(1, size)), count]
        if is_early and turns > 1 and count >= 4 * size * turns:
            edges = _uneven_turns(borders, turns)
        else:
            edges = [_evenly(begin, end, turns) for begin, end in itertools.pairwise(borders)]
        mine = edges[self._rank]
        turns = len(mine) - 1
        parts = []
        for at, (start, stop) in enumerate(itertools.pairwise(mine)):
            sizes = [each[at + 1] - each[at] for each in edges]
            turn = Turn(sum(sizes) / count, not at, at == turns - 1)
            parts.append((start, stop, Label(True, stop - start, count, turn, frozenset(sizes))))
        return parts


def _evenly(begin: int, end: int, parts: int) -> list[int]:
    """Return the borders of `parts` parts of a range, as equal as possible."""
    return [begin + (end - begin) * at // parts for at in range(parts + 1)]


def _uneven_turns(borders: Sequence[int], turns: int) -> list[list[int]]:
    """Return for each rank the borders of its parts: the first is longer in rank 0, none longer than an even one.

    borders: of the ranks' samples.
    """
    ranks = list(itertools.pairwise(borders))
    longest = max(math.ceil((end - begin) / turns) for begin, end in ranks)
    firsts = [begin + longest - bool(rank) for rank, (begin, _) in enumerate(ranks)]
    rest = max(math.ceil((end - first) / longest) for first, (_, end) in zip(firsts, ranks, strict=True))
    return [[begin, *_evenly(first, end, rest)] for first, (begin, end) in zip(firsts, ranks, strict=True)]
