"""Losses of a task so far: whether their batches can be cut, and which of their terms need no batch. Runs in ranks.

A loss is known by its shape, a number for its terms and for the lines that computed it. What whole batches have shown
decides; parts of batches count only for a loss of which no whole batch was seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from nbaccel.train.implicit.batch_parts import Handed
from nbaccel.train.implicit.exchange import shape_of
from nbaccel.train.implicit.gradient_weights import References, digest
from nbaccel.train.implicit.sample_independence import lengths_below, obstacle_below, shapes_below
from nbaccel.train.implicit.terms import LossTerms, Term

__all__ = ["LossHistory"]

_SINGLE = (-1, -2, 0, 1)
"""Counts of a term that is of one number, or of an unknown number: these are no fixed points."""

_FEWEST_ROWS = 2
_LENGTHS = 64
"""Number of first backwards that are all searched for lengths, by a walk through the graph; later ones now and then.
Parts of many samples most often contain one that is as long as any."""


class LossHistory:
    """Remembers the losses of one task, by their shapes.

    references: the divisors of their terms.
    """

    def __init__(self) -> None:
        self.references = References()
        # By the shape of a loss, as seen in a whole batch: its samples, and of each term its count, whether it is of
        # parameters, and a digest of the shapes below it.
        self._of_whole: dict[float, tuple[int, list[float], list[bool], list[int]]] = {}
        self._fixed: set[tuple[float, int]] = set()  # terms that have the same shapes in parts as with a whole batch
        self._varying: set[tuple[float, int]] = set()  # terms that were seen to have more, or fewer, numbers than that
        self._obstacles: dict[tuple[float, bool], str] = {}  # of losses that were examined, by their shape
        self._watched: set[float] = set()  # shapes of losses that were watched, or are about to be

    def obstacle(self, readings: Sequence[LossTerms], handed: Handed, is_graph_kept: bool) -> str:
        """Return why this loss must be computed of whole batches; "" where parts are possible."""
        if is_graph_kept:
            return "gradients of gradients of what is trained"
        for reading in readings:
            if reading.obstacle:
                return reading.obstacle
            shape, is_part = shape_of(reading.terms), handed.is_part
            if handed.rows < _FEWEST_ROWS:
                continue  # one sample shows nothing
            if is_part and self._obstacles.get((shape, False)) == "":
                continue  # the whole batch has shown none; a part may equal another length by chance
            key = shape, is_part
            if key not in self._obstacles or self._obstacles[key]:
                self._obstacles[key] = obstacle_below(reading, handed.rows)
            if self._obstacles[key]:
                return self._obstacles[key]
        return ""

    def is_new_in_parts(self, readings: Sequence[LossTerms], handed: Handed, is_watched: bool) -> bool:
        """Return whether a part has a loss that was not watched so far, so that the next one has to be.

        is_watched: this one is, see `BatchWatch`.
        """
        shapes = {shape_of(reading.terms) for reading in readings}
        is_new = handed.is_part and not is_watched and not shapes <= self._watched
        self._watched |= shapes
        return is_new

    def lengths(self, terms: Sequence[Term], handed: Handed, backwards: int) -> int:
        """Return a digest of the lengths below `terms`; 0 where they are not looked for.

        backwards: how many the task has had.
        """
        if not handed.sizes or (backwards >= _LENGTHS and backwards & (backwards - 1)):
            return 0
        return digest(repr(lengths_below((term.node for term in terms), handed.sizes)))

    def without_batch(
        self, shape: float, terms: Sequence[Term], counts: list[list[float]], givers: Sequence[int], handed: Handed
    ) -> list[bool]:
        """Return for each term whether it is the same in all ranks.

        It is the same if it is of parameters alone, or made of tensors of the same shapes as with a whole batch, such
        as a sum over fixed points.
        """
        here = [term.is_of_parameters for term in terms]
        if not handed.is_part:
            if shape not in self._of_whole:
                below = [shapes_below(term.node) if term.elements else 0 for term in terms]
                self._of_whole[shape] = handed.rows, counts[givers[0]], here, below
            return here
        rows, whole, pure, shapes = self._of_whole.get(shape, (0, [], here, []))
        if not rows or rows in handed.sizes or any(len(counts[rank]) != len(whole) for rank in givers):
            return pure
        for at, term in enumerate(terms):
            is_same = all(counts[rank][at] == whole[at] for rank in givers) and whole[at] not in _SINGLE
            if (shape, at) not in self._varying | self._fixed:
                is_fixed = is_same and (not term.elements or shapes_below(term.node) == shapes[at])
                (self._fixed if is_fixed else self._varying).add((shape, at))
            elif not is_same:
                self._varying.add((shape, at))
        return [pure[at] or (shape, at) not in self._varying for at in range(len(whole))]
