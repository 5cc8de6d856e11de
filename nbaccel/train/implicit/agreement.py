"""Agreement: what the ranks agreed on about one backward of an unmodified loop. Runs in ranks.

It says whose gradients count, by how much each term of the loss does, and what the losses of the whole batch are.
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
"""Fewer than make the place of a pass, so that a loss that is new to these begins with whole batches, too."""


@dataclass(slots=True)
class Agreement:
    """One backward, as the ranks agreed on it.

    round: where its gradients are added up.  numbers: of all that any rank brings.
    givers: the ranks whose gradients count.  weights: by rank, by what each of its terms counts.
    obstacle: why its batches are to stay whole.  named: variables of the user's with a part of the loss.
    late: what was added up afterwards.  share: of the batch's samples, where it comes in several parts.
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
        """Whether all terms count alike."""
        return not self.is_of_parts and not any(differ(each) for each in self.weights if each)

    @property
    def is_of_parts(self) -> bool:
        """Whether ranks have parts of a batch. Then terms are weighed where their gradients begin: hooks and inputs
        see what they would of the whole batch."""
        return any(self.header.says[rank].part for rank in self.givers)

    @property
    def factor(self) -> float:
        """By what this rank's gradients count; the terms' own weights are in them already where they differ."""
        return self.weights[self.rank][0] if self.is_uniform else 1.0

    def inject(self) -> list[Any]:
        """Let terms that count differently do so, where their gradients begin."""
        if self.is_uniform:
            return []
        mine = self.weights[self.rank]
        if self.share != 1.0:
            mine = [factor * self._share_of(at) for at, factor in enumerate(mine)]
        return [term.node.register_prehook(_times(factor)) for term, factor in zip(self.terms, mine, strict=True)]

    def _share_of(self, at: int) -> float:
        """By what the term at `at` counts in its batch: a mean by its part's samples, a sum by itself."""
        total = sum(self.weights[rank][at] for rank in self.givers)
        return self.share if math.isclose(total, 1.0) else 1.0

    def whole_values(self) -> list[float | None]:
        """The losses of the whole batch, None for one that cannot be told; empty where they are those already."""
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
        """By what each rank's value of the terms at `indices` counts; None where these count differently.

        Terms of parameters are the same in all ranks, so any shares that add up to one do for them, and for what is one
        number in parts of different sizes.
        """
        own = [at for at in indices if not self.of_parameters[at] and not self._is_fixed(at)]
        columns = [[self.weights[rank][at] for rank in self.givers] for at in own]
        pure = [sum(self.weights[rank][at] for rank in self.givers) for at in indices if self.of_parameters[at]]
        if not all(math.isclose(total, 1.0) for total in pure):  # divided by something of a batch, after all
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
    """A number by the kinds of `terms` and the lines that led to this backward: two losses of a loop have two."""
    lines = [f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in users_frames(_FRAMES)]
    return digest(" ".join([*(type(term.node).__name__ for term in terms), *lines]))


def _times(factor: float) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    def scale(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        if not factor:  # and not nan where a rank has nothing but ignored targets
            return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
        return tuple(None if each is None else each * factor for each in gradients)

    return scale
