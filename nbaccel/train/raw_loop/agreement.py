"""Agreement: how the ranks sum the gradients of one backward, as their headers decide it. Runs in ranks.

A `Decision` has what follows from the headers alone: those whose gradients count, the weight of each term of the loss,
and the tensors that are summed. Most backwards of a loop are decided like the one before, so `Decisions` remembers it.
An `Agreement` is one backward: its decision, its losses, and the round in which its gradients are summed. What else a
decision depends on, the losses of the task so far, is in a `LossHistory`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nbaccel.errors import NotPrepared
from nbaccel.train.distributed.callers import program_frames
from nbaccel.train.raw_loop.batch_parts import GivenBatches
from nbaccel.train.raw_loop.exchange import Round
from nbaccel.train.raw_loop.gradient_weights import Header, References, differ, digest
from nbaccel.train.raw_loop.sample_independence import lengths_below, obstacle_below, shapes_below
from nbaccel.train.raw_loop.terms import LossTerms, Term
from nbaccel.train.raw_loop.trained_tensors import WITHOUT_A_SEED

__all__ = [
    "Agreement",
    "Decision",
    "Decisions",
    "LossHistory",
    "ShapeOfLoss",
    "digest_of",
    "refuse_out_of_step",
    "refuse_to_go_on_with_parts",
]

_FRAMES = 2
"""Fewer frames than identify a pass, so that a loss that is new to these begins with whole batches, too."""

_MOST = 64
"""Decisions that are remembered: of a loop's few kinds of batches and losses."""


class Decision:
    """Result of the ranks' headers.

    Args:
        header: Its losses are those of the first backward that was decided so; an `Agreement` has its own.
        givers: The ranks whose gradients count.
        weights: By rank, the weight of each of its terms.
        of_parameters: By term, whether it needs no batch.
        numbers: The numbers of all tensors for which any rank has a value.

    Attributes:
        has_extras: A backward runs others inside of it, in some rank.
        is_of_parts: Ranks have parts of a batch. Terms are then weighted where their gradients begin: hooks and inputs
            see the same as with the whole batch.
        is_uniform: All terms have the same weight.
    """

    def __init__(
        self,
        header: Header,
        givers: Sequence[int],
        weights: list[list[float]],
        of_parameters: Sequence[bool],
        numbers: tuple[int, ...],
    ) -> None:
        self.header = header
        self.givers = givers
        self.weights = weights
        self.of_parameters = of_parameters
        self.numbers = numbers
        self.has_extras = header.any("extras")
        self.is_of_parts = any(header.says[rank].part for rank in givers)
        self.is_uniform = not self.is_of_parts and not any(differ(each) for each in weights if each)
        self._has_parts = self.is_of_parts or any(header.says[rank].own for rank in givers)
        self._are_alike = header.all_equal("terms", givers) and header.all_equal("shape", givers)
        self._shares: dict[tuple[int, ...], list[tuple[int, float]] | None] = {}

    def is_sum(self, at: int) -> bool:
        """Return whether the term at `at` is a sum over samples, whose parts are added: of a mean, weights add to 1."""
        return not math.isclose(sum(self.weights[rank][at] for rank in self.givers), 1.0)

    def divisors(self, at: int) -> list[float]:
        """Return by rank what the term at `at`, a mean, is divided by."""
        counts = [self.header.counts[rank][at] for rank in self.givers]
        return counts if counts[0] >= 0 else [self.header.constants[rank][at] for rank in self.givers]

    def numbers_of(self, at: int) -> list[float]:
        """Return by rank how many numbers the term at `at` is over; for a loss with weights, their sum."""
        return [abs(self.header.counts[rank][at]) for rank in self.givers]

    def whole_values(self, values: Sequence[Sequence[float]], terms: Sequence[tuple[int, ...]]) -> list[float | None]:
        """Return the losses of the whole batch, None for an unknown one; empty where they are those already.

        Args:
            values: By rank, its losses.
            terms: Of each loss, the terms that it consists of.
        """
        if not self._has_parts:
            return []
        if not self._are_alike:
            return [None]
        found: list[float | None] = []
        for at in range(min(len(values[rank]) for rank in self.givers)):
            if terms[at] not in self._shares:
                self._shares[terms[at]] = self._shares_of(terms[at])
            shares = self._shares[terms[at]]
            if shares is None:
                found.append(None)
            else:
                found.append(sum((share * values[rank][at] for rank, share in shares if share), 0.0))
        return found

    def _shares_of(self, indices: Sequence[int]) -> list[tuple[int, float]] | None:
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


class Decisions:
    """Decisions of one task, by all that has led to them.

    Args:
        state: Returns what else a decision depends on. Deciding may itself change that: then nothing was decided for
            good.
    """

    def __init__(self, state: Callable[[], Hashable]) -> None:
        self._state = state
        self._before: Hashable = None
        self._known: dict[Hashable, Decision] = {}

    def find(self, causes: Hashable | None) -> Decision | None:
        """Return the decision that `causes` lead to, if it is known.

        Args:
            causes: None if they do not repeat.
        """
        state = self._state()
        if state != self._before:
            self._before = state
            self._known.clear()
        return None if causes is None else self._known.get(causes)

    def keep(self, causes: Hashable | None, decision: Decision) -> None:
        """Remember a decision that was made since `find` has not found it."""
        if causes is not None and self._state() == self._before:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[causes] = decision


@dataclass(slots=True)
class Agreement:
    """One backward, as the ranks agreed on it.

    Args:
        round: Where its gradients are summed.
        tensors: By number, those for which any rank has a value.
        values: By rank, the losses before it.
        terms: Of this rank's loss.
        obstacle: Why its batches must stay whole.
        named: Variables of the user's with a part of the loss.
        late: Values that were summed afterwards.
        turn_weights: Further factors of its terms, where the batch comes in several parts.
    """

    decision: Decision
    round: Round
    tensors: dict[int, Tensor]
    values: Sequence[Sequence[float]]
    terms: Sequence[Term]
    rank: int
    obstacle: str
    named: Sequence[tuple[Tensor, tuple[int, ...]]]
    late: dict[int, Tensor] = field(default_factory=dict)
    turn_weights: Sequence[float] | None = None

    @property
    def factor(self) -> float:
        """The weight of this rank's gradients; 1 where terms differ, since their weights are applied already."""
        return self.decision.weights[self.rank][0] if self.decision.is_uniform else 1.0

    def inject(self) -> list[Any]:
        """Apply the weights of terms that differ, where their gradients begin; return the hooks."""
        if self.decision.is_uniform:
            return []
        mine = self.decision.weights[self.rank]
        if self.turn_weights is not None:
            mine = [factor * weight for factor, weight in zip(mine, self.turn_weights, strict=True)]
        return [term.node.register_prehook(_times(factor)) for term, factor in zip(self.terms, mine, strict=True)]

    def whole_values(self) -> list[float | None]:
        """Return the losses of the whole batch, None for an unknown one; empty where they are those already."""
        terms = [tuple(range(len(self.terms))), *(indices for _, indices in self.named)]
        return self.decision.whole_values(self.values, terms)


def refuse_out_of_step(header: Header, ranks: Sequence[int]) -> None:
    """Refuse programs that have taken different ways.

    Args:
        ranks: Those whose program is not over.

    Raises:
        NotPrepared: In all of them.
    """
    says = header.says
    reach_alike = header.all_equal("leaves", ranks)  # otherwise they have checked different weights
    for name, what in (
        ("steps", "have taken different numbers of optimizer steps"),
        ("rates", "step with different learning rates"),
        ("batches", "are at different batches, of which one was left out in some of them"),
        ("drawn", "have drawn different samples"),
        ("check", "have different weights"),
    ):
        is_given = name not in ("check", "drawn") or all(getattr(says[rank], name) for rank in ranks)
        is_given = is_given and (reach_alike or name != "check")
        if is_given and not header.all_equal(name, ranks):
            said = ", ".join(f"rank {rank}: {getattr(says[rank], name):g}" for rank in ranks)
            error = NotPrepared(
                f"the ranks train one model, and {what} ({said}), so they do not train one any more: something "
                "that the loop decides or draws by itself differs between ranks. Decide by the loss after "
                f"loss.backward(), which is the same in all ranks. {WITHOUT_A_SEED}"
            )
            raise _perhaps_of_parts(error)


def refuse_to_go_on_with_parts(header: Header, ranks: Sequence[int]) -> None:
    """Refuse batches of which ranks whose program is over would have had a part: nobody would train on it.

    Args:
        ranks: Those whose program is not over.

    Raises:
        NotPrepared: In all of them, and in those that are done.
    """
    done = [rank for rank in range(len(header.says)) if rank not in ranks]
    if not done or not any(header.says[rank].part for rank in ranks):
        return
    after, on = (", ".join(f"rank {rank}: {header.says[rank].steps:g}" for rank in some) for some in (done, ranks))
    error = NotPrepared(
        f"the program of some ranks is over after so many steps ({after}), and that of others is not ({on}), which "
        "have only their parts of the batches that follow: something that the loop decides by itself differs between "
        "ranks, such as an accuracy, which each counts of its part, or the time. Decide by the loss after "
        "loss.backward(), which is the same in all ranks; --batches each gives ranks batches of their own, -n 1 trains "
        "as before."
    )
    raise _perhaps_of_parts(error)


def _perhaps_of_parts(error: NotPrepared) -> NotPrepared:
    """Return an error of ranks out of step, as one that whole batches may not have.

    Ranks decide apart where each has its part of a batch: by an accuracy of the part, by a loss that is NaN in one of
    them, by as many backwards as `x.split(4)` has chunks. They draw apart, too, until the next batch comes: noise on
    gradients or weights differs between ranks. With whole batches all ranks decide and draw as one process does.
    """
    error.is_of_parts = error.is_of_states = True
    return error


@functools.lru_cache(maxsize=_MOST)
def digest_of(leaves: tuple[int, ...], buffers: tuple[int, ...]) -> int:
    """Return a number for the tensors that a rank has values for; most backwards of a loop have the same."""
    return digest(repr((sorted(leaves), [*buffers])))


class ShapeOfLoss:
    """Numbers for losses that a backward begins with: they differ between two losses of a loop.

    One is of the kinds of a loss's terms, and of the lines that have led to the backward.
    """

    def __init__(self) -> None:
        self._lines = " ".join(f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in program_frames(_FRAMES))

    def of(self, terms: Sequence[Term]) -> int:
        return digest(" ".join([*(type(term.node).__name__ for term in terms), self._lines]))


def _elements(count: float) -> float:
    """Return how many numbers a term is over, by the header's count."""
    return count if count >= 0 else -1.0 - count


@functools.lru_cache(maxsize=_MOST)
def _names_of(kinds: frozenset[type]) -> frozenset[str]:
    return frozenset(kind.__name__ for kind in kinds)


def _times(factor: float) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    def scale(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        if not factor:  # and not nan where a rank has nothing but ignored targets
            return tuple(None if each is None else torch.zeros_like(each) for each in gradients)
        return tuple(None if each is None else each * factor for each in gradients)

    return scale


# --- Losses of a task so far: whether their batches can be cut, and which of their terms need no batch ---
# A loss is known by its shape, a number for its terms and for the lines that computed it. Whole batches decide; parts
# of batches count only for a loss of which no whole batch was seen.

_SINGLE = (-1, -2, 0, 1)
"""Counts of a term that is of one number, or of an unknown number: these are no fixed points."""

_FEWEST_ROWS = 2
_TOP = 24
"""Nodes below the root of a graph by which losses of one shape are told apart."""

_LENGTHS = 64
"""Number of first backwards that are all searched for lengths, by a walk through the graph; later ones now and then.
Parts of many samples most often contain one that is as long as any."""


class LossHistory:
    """Remembers the losses of one task, by their shapes.

    Attributes:
        references: The divisors of their terms.
    """

    def __init__(self) -> None:
        self.references = References()
        # By the shape of a loss, as seen in a whole batch: its samples, and of each term its count, whether it is of
        # parameters, and a digest of the shapes below it.
        self._of_whole: dict[float, tuple[int, list[float], list[bool], list[int]]] = {}
        self._fixed: set[tuple[float, int]] = set()  # terms that have the same shapes in parts as with a whole batch
        self._varying: set[tuple[float, int]] = set()  # terms that were seen to have more, or fewer, numbers than that
        self._apart: set[tuple[float, int]] = set()  # terms that were seen to depend on no batch
        self._obstacles: dict[tuple[float, bool], str] = {}  # of losses that were examined, by their shape
        self._kinds: dict[float, frozenset[str]] = {}  # of the operations below these losses, that were examined
        self._watched: set[tuple[float, int]] = set()  # losses that were watched, or are about to be, by their tops

    def known(self) -> dict[str, Any]:
        """Return what is known of losses, for a process that goes on with them."""
        return {name: type(table)(table) for name, table in self._tables()}

    def learn(self, known: dict[str, Any]) -> None:
        """Add what another process has known; what is known already stays as it is."""
        for name, table in self._tables():
            found = known.get(name, type(table)()) | table
            table.clear()
            table.update(found)

    def _tables(self) -> Iterator[tuple[str, Any]]:
        for owner in (self, self.references):
            for name, value in vars(owner).items():
                if isinstance(value, dict | set):
                    yield f"{type(owner).__name__}.{name}", value

    @property
    def state(self) -> tuple[int, ...]:
        """Numbers that differ once a term may be taken for another kind, see `References.state`."""
        return (*map(len, (self._of_whole, self._fixed, self._varying, self._apart)), *self.references.state)

    def obstacle(
        self,
        readings: Sequence[LossTerms],
        shapes: Sequence[int],
        handed: GivenBatches,
        is_graph_kept: bool,
        kinds: Sequence[type],
    ) -> str:
        """Return why this loss must be computed of whole batches; "" where parts are possible.

        Args:
            shapes: The shapes of the readings.
            kinds: Of all nodes of its graph.
        """
        names, known = _names_of(frozenset(kinds)), self._kinds.get(shapes[0])
        new: frozenset[str] = frozenset() if known is None or names <= known else names - known
        if known is None or new:
            self._kinds[shapes[0]] = names | (known or names)
        if is_graph_kept:
            return "gradients of gradients of what is trained"
        is_part = handed.is_part
        for reading, shape in zip(readings, shapes, strict=True):
            if reading.obstacle:
                return reading.obstacle
            if handed.rows < _FEWEST_ROWS:
                continue  # one sample shows nothing
            key = shape, is_part
            if is_part and self._obstacles.get((shape, False)) == "":
                # The whole batch has shown none, and a part may equal another length by chance.
                if not new:
                    continue
                self._obstacles[key] = obstacle_below(reading, handed.rows, new)
            elif new or self._obstacles.get(key, " "):
                self._obstacles[key] = obstacle_below(reading, handed.rows)
            if self._obstacles[key]:
                return self._obstacles[key]
        return ""

    def is_new_in_parts(
        self, shapes: Sequence[int], kinds: Sequence[type], handed: GivenBatches, is_watched: bool
    ) -> bool:
        """Return whether a part has a loss that was not watched so far, so that the next one has to be.

        Args:
            kinds: Of the nodes of its graph, of which the first ones tell losses apart.
            is_watched: This one is, see `BatchWatch`.
        """
        top = hash(tuple(kinds[:_TOP]))
        losses = {*zip(shapes, itertools.repeat(top))}
        is_new = not losses <= self._watched and len(self._watched) < _MOST
        if is_new:
            self._watched |= losses
        return is_new and handed.is_part and not is_watched

    def lengths(self, terms: Sequence[Term], handed: GivenBatches, backwards: int) -> int:
        """Return a digest of the lengths below `terms`; 0 where they are not looked for.

        Args:
            backwards: How many the task has had.
        """
        if not handed.sizes or (backwards >= _LENGTHS and backwards & (backwards - 1)):
            return 0
        return digest(repr(lengths_below((term.node for term in terms), handed.sizes)))

    def has_others(self, header: Header, givers: Sequence[int]) -> bool:
        """Return whether a term is over equally many further numbers in each part, as of samples from a memory.

        Each rank would count these. Parts of different sizes show it beside the whole batch.
        """
        rows, whole, *_ = self._of_whole.get(header.says[givers[0]].shape, (0, [], [], []))
        parts = [header.says[rank].rows for rank in givers]
        if not rows or rows in parts or len({*parts}) < _FEWEST_ROWS:
            return False
        for at, count in enumerate(whole):
            numbers, of_whole = [_elements(header.counts[rank][at]) for rank in givers], _elements(count)
            rates = {(of_whole - number) / (rows - part) for number, part in zip(numbers, parts, strict=True)}
            rate = rates.pop()
            if not rates and rate >= 1 and rate == int(rate) and of_whole > rate * rows:
                return True
        return False

    def without_batch(
        self, header: Header, terms: Sequence[Term], givers: Sequence[int], handed: GivenBatches
    ) -> list[bool]:
        """Return for each term whether it is the same in all ranks.

        It is the same if it is of parameters alone, or made of tensors of the same shapes as with a whole batch, such
        as a sum over fixed points. So is one of as many numbers that was seen to depend on no batch.
        """
        shape, counts = header.says[givers[0]].shape, header.counts
        here = [term.is_of_parameters for term in terms]
        if header.all_equal("terms", givers) and header.all_equal("shape", givers):
            bits = [int(header.says[rank].apart) for rank in givers]
            self._apart.update((shape, at) for at in range(len(terms)) if all(each >> at & 1 for each in bits))
        if not handed.is_part:
            if shape not in self._of_whole:
                below = [shapes_below(term.node) if term.elements else 0 for term in terms]
                self._of_whole[shape] = handed.rows, counts[givers[0]], here, below
            return here
        rows, whole, pure, shapes = self._of_whole.get(shape, (0, [], here, []))
        if any(len(counts[rank]) != len(pure) for rank in givers):
            return pure
        if not rows or rows in handed.sizes:
            self._varying.update(
                (shape, at) for at in range(len(pure)) if len({counts[rank][at] for rank in givers}) > 1
            )
            return [pure[at] or (shape, at) in self._apart - self._varying for at in range(len(pure))]
        for at, term in enumerate(terms):
            is_same = all(counts[rank][at] == whole[at] for rank in givers) and whole[at] not in _SINGLE
            if (shape, at) not in self._varying | self._fixed:
                is_apart = not term.elements or (shape, at) in self._apart
                is_fixed = is_same and (is_apart or shapes_below(term.node) == shapes[at])
                (self._fixed if is_fixed else self._varying).add((shape, at))
            elif not is_same:
                self._varying.add((shape, at))
        return [pure[at] or (shape, at) not in self._varying for at in range(len(whole))]
