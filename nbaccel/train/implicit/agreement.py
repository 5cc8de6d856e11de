"""Agreement: the ranks' agreement on one backward of an unmodified loop. Runs in ranks.

It holds the ranks whose gradients count, the weight of each term of the loss, and the losses of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nbaccel.train.implicit.exchange import Round
from nbaccel.train.implicit.header import Header, digest
from nbaccel.train.implicit.terms import Term
from nbaccel.train.implicit.users_code import users_frames
from nbaccel.train.implicit.weights import differ

__all__ = ["Agreement", "shape_of"]

_FRAMES = 2
"""Fewer frames than identify a pass, so that a loss that is new to these begins with whole batches, too."""


@dataclass(slots=True)
class Agreement:
    """One backward, as the ranks agreed on it.

    round: where its gradients are summed.  numbers: of all tensors for which any rank has a value.
    givers: the ranks whose gradients count.  weights: by rank, the weight of each of its terms.
    obstacle: why its batches must stay whole.  named: variables of the user's with a part of the loss.
    late: values that were summed afterwards.  share: of the batch's samples, where it comes in several parts.
    """

    round: Round
    numbers: Sequence[int]
    header: Header
    givers: Sequence[int]
    weights: list[list[float]]
    terms: Sequence[Term]
    of_parameters: Sequence[bool]
    rank: int
    obstacle: str
    named: Sequence[tuple[Tensor, Any]]
    late: dict[int, Tensor] = field(default_factory=dict)
    share: float = 1.0

    @property
    def is_uniform(self) -> bool:
        """True if all terms have the same weight."""
        return not self.is_of_parts and not any(differ(each) for each in self.weights if each)

    @property
    def is_of_parts(self) -> bool:
        """True if ranks have parts of a batch. Terms are then weighted where their gradients begin: hooks and inputs
        see the same as with the whole batch."""
        return any(self.header.says[rank].part for rank in self.givers)

    @property
    def factor(self) -> float:
        """The weight of this rank's gradients; 1 where terms differ, since their weights are applied already."""
        return self.weights[self.rank][0] if self.is_uniform else 1.0

    def inject(self) -> list[Any]:
        """Apply the weights of terms that differ, where their gradients begin; return the hooks."""
        if self.is_uniform:
            return []
        mine = self.weights[self.rank]
        if self.share != 1.0:
            mine = [factor * self._share_of(at) for at, factor in enumerate(mine)]
        return [term.node.register_prehook(_times(factor)) for term, factor in zip(self.terms, mine, strict=True)]

    def _share_of(self, at: int) -> float:
        """Return the share of the term at `at` in its batch: for a mean that of its part's samples, for a sum 1."""
        total = sum(self.weights[rank][at] for rank in self.givers)
        return self.share if math.isclose(total, 1.0) else 1.0

    def whole_values(self) -> list[float | None]:
        """Return the losses of the whole batch, None for an unknown one; empty where they are those already."""
        says = self.header.says
        if not any(says[rank].part or says[rank].own for rank in self.givers):
            return []
        if not (self.header.all_equal("terms", self.givers) and self.header.all_equal("shape", self.givers)):
            return [None]
        terms = [tuple(range(len(self.terms))), *(indices for _, indices in self.named)]
        found: list[float | None] = []
        for at in range(min(len(self.header.values[rank]) for rank in self.givers)):
            shares = self._shares(terms[at])
            if shares is None:
                found.append(None)
            else:
                found.append(sum((share * self.header.values[rank][at] for rank, share in shares if share), 0.0))
        return found

    def _shares(self, indices: Sequence[int]) -> list[tuple[int, float]] | None:
        """Return the weight of each rank's value of the terms at `indices`; None where their weights differ.

        Terms of parameters are the same in all ranks, so any shares that sum to one are right for them, and for a
        single number in parts of different sizes.
        """
        own = [at for at in indices if not self.of_parameters[at] and not self._is_fixed(at)]
        columns = [[self.weights[rank][at] for rank in self.givers] for at in own]
        pure = [sum(self.weights[rank][at] for rank in self.givers) for at in indices if self.of_parameters[at]]
        if not all(math.isclose(total, 1.0) for total in pure):  # divided by a quantity of the batch, after all
            return None
        if not columns:
            columns = [[1.0 / len(self.givers)] * len(self.givers)]
        if any(differ(pair) for column in columns for pair in zip(column, columns[0], strict=True)):
            return None
        if len(own) < len(indices) and not math.isclose(sum(columns[0]), 1.0):
            return None
        return list(zip(self.givers, columns[0], strict=True))

    def _is_fixed(self, at: int) -> bool:
        counts = [self.header.counts[rank][at] for rank in self.givers]
        return set(counts) == {1.0} and differ([self.header.says[rank].rows for rank in self.givers])


def shape_of(terms: Sequence[Term]) -> int:
    """Return a number for the kinds of `terms` and the lines that led here: it differs between two losses of a loop."""
    lines = [f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in users_frames(_FRAMES)]
    return digest(" ".join([*(type(term.node).__name__ for term in terms), *lines]))


def _times(factor: float) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    def scale(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        if not factor:  # and not nan where a rank has nothing but ignored targets
            return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
        return tuple(None if each is None else each * factor for each in gradients)

    return scale
