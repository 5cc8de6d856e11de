"""Averaging: gives every rank the gradient of the whole batch in a backward of an unmodified loop. Runs in ranks.

It replaces ``torch.autograd.backward`` and ``grad`` while a loop that prepares nothing trains. Before the real
backward the ranks exchange a header; the gradients of trained leaves are weighted, summed over ranks during the
backward, and stored where the program finds them. Gradients that existed before are saved, and added.
Reasons: docs/design/one-line.md
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nbaccel.base.aborting import leave_exchange
from nbaccel.base.world import World
from nbaccel.errors import NotPrepared
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.raw_loop.agreement import (
    Agreement,
    Decision,
    Decisions,
    LossHistory,
    ShapeOfLoss,
    digest_of,
    refuse_out_of_step,
    refuse_to_go_on_with_parts,
)
from nbaccel.train.raw_loop.batch_splitter import BatchSplitter
from nbaccel.train.raw_loop.batch_values import BatchWatch
from nbaccel.train.raw_loop.deferred_calls import DeferredCalls, StepCounter, TurnWeights
from nbaccel.train.raw_loop.exchange import GradientExchange, Round
from nbaccel.train.raw_loop.gradient_weights import (
    MOST_ZEROS,
    VALUES,
    Header,
    LeastCount,
    Say,
    Told,
    as_floats,
    exchange,
    factors,
)
from nbaccel.train.raw_loop.graph import (
    forget_scaled,
    graph_of,
    is_compiled,
    is_scaled,
    runs_backwards_inside,
    users_scalars,
    without_scale,
)
from nbaccel.train.raw_loop.outside_values import OutsideValues, as_text, of_parts
from nbaccel.train.raw_loop.terms import Term, read
from nbaccel.train.raw_loop.trained_tensors import Models, sums_of

__all__ = ["AveragedTraining", "Averaging", "AveragingNotices"]

_CALL = "loss.backward()"
_NEAR = 1e-3
"""Losses of the same work may differ by this share, where a device adds up in any order."""

_LOOKS = 16
"""Number of backwards after which buffers are compared with those of other ranks."""


class AveragedTraining(Protocol):
    """The training whose gradients are averaged."""

    def collectives(self) -> Collectives:
        """Return the ranks' collectives; the ranks form the process group together where there is none."""

    def note_trained(self, loss: float | Tensor | None) -> None:
        """Note a backward that was averaged.

        Args:
            loss: That of the whole batch, if it is one number, without the factor of a scaler.
        """

    def note_alone(self, loss: Tensor | None) -> None:
        """Note a backward that each rank has run by itself, before what it reaches is known to be trained.

        Args:
            loss: See `note_trained`.
        """

    def note_models(self) -> None:
        """Note that new models are known."""

    def step_back(self) -> None:
        """Leave the loop unmodified, since the program prepares by itself."""


class AveragingNotices(Protocol):
    """Notices about averaged gradients."""

    def note_parts_shown(self) -> None:
        """Note that a loss keeps its part's value."""

    def note_compiled(self) -> None:
        """Note that parts went through a compiled model."""

    def note_buffers(self, name: str) -> None:
        """Note a buffer that a forward changes differently between ranks."""

    def note_other_leaves(self) -> None:
        """Note that a part of a batch has trained other parameters than the one before it."""

    def note_lengths(self) -> None:
        """Note that samples are padded to other lengths than in other ranks."""


class Averaging:
    """Averages the gradients of one rank's task with its peers'.

    Args:
        deferred: Keeps back what waits for the last part of a batch.
        watch: Knows what is computed of a batch.
        training: Is told of each backward.
        notices: Says what is noticed.

    Attributes:
        meetings: Number of headers that were exchanged.
    """

    def __init__(
        self,
        world: World,
        passes: BatchSplitter,
        steps: StepCounter,
        deferred: DeferredCalls,
        watch: BatchWatch,
        training: AveragedTraining,
        notices: AveragingNotices,
    ) -> None:
        self.models = Models(self._completed)
        self.meetings = 0
        self._world = world
        self._passes = passes
        self._steps = steps
        self._deferred = deferred
        self._watch = watch
        self._training = training
        self._notices = notices
        self._turns = TurnWeights(deferred.refuse, notices.note_other_leaves)
        self._collectives: Collectives | None = None
        self._exchange: GradientExchange | None = None
        self._is_inside = False
        self._round: Round | None = None
        self._factor = 0.0
        self._is_completed_later = False
        self._late: dict[int, Tensor] = {}  # leaves that a backward inside of the backward has reached
        self._begin()

    def rest(self) -> None:
        """Free the memory at the end of a task."""
        if self._exchange is not None:
            self._exchange.forget()
        if self._collectives is not None:
            self._collectives.forget_messages()

    @property
    def is_inside(self) -> bool:
        """True while a backward runs."""
        return self._is_inside

    def begin(self) -> None:
        """Begin a task: forget the models, losses and decisions of the task before."""
        self.models.forget()
        self.rest()
        self._begin()

    def _begin(self) -> None:
        self.meetings = 0
        self._turns.begin()
        self._losses = losses = LossHistory()
        self._decisions = Decisions(lambda: losses.state)
        self._noted_buffers: set[int] = set()
        self._has_extras = False
        self._outside = OutsideValues({})  # of the present loss
        self._fixed: set[str] = set()  # outside values whose shapes do not depend on the samples
        self._apart: set[str] = set()  # those that differed between ranks that had the same batch

    @property
    def losses(self) -> LossHistory:
        """Return what is known of the losses of this task."""
        return self._losses

    # -- in place of torch's functions

    def run(self, real: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a graph backwards, averaged; ``torch.autograd.backward`` and ``grad`` call this.

        Args:
            *args: Gradients of the outputs, whether the graph is kept, whether a graph of the gradients is made, the
                inputs.
        """
        with self._watch.paused():
            return self._run(real, outputs, *args, **kwargs)

    def _run(self, real: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        is_transformed = torch._C._functorch.maybe_current_level() is not None  # by torch.func, which has no leaves
        if self._is_inside or is_transformed or threading.current_thread() is not threading.main_thread():
            return real(outputs, *args, **kwargs)
        roots = [root for root in outputs if isinstance(root, Tensor)]
        if len(args) < 4 or len(roots) != len(outputs):
            return real(outputs, *args, **kwargs)
        is_graph_made, inputs, accumulates = bool(args[2]), args[3], kwargs.get("accumulate_grad", False)
        leaves, of_python, kinds = graph_of(roots) if accumulates else ([], [], [])
        if inputs:
            chosen = {id(each): each for each in inputs if isinstance(each, Tensor) and each.is_leaf}
            leaves = [leaf for leaf in leaves if id(leaf) in chosen] if accumulates else list(chosen.values())
        known, new = self._sort(leaves, accumulates) if leaves else ([], [])
        if new and self.models.are_kept_together(new):
            self._training.step_back()
            return real(outputs, *args, **kwargs)
        if not known and not new:
            if not leaves or not accumulates or self._passes.batches:
                return real(outputs, *args, **kwargs)
            self._steps.enter(roots)  # may raise RunStopped
            real(outputs, *args, **kwargs)  # the first of a loop that may step by hand
            self._training.note_alone(roots[0].detach() if len(roots) == 1 and roots[0].numel() == 1 else None)
            return None
        extras = runs_backwards_inside(of_python)
        if extras and not self._has_extras:
            self._has_extras = True
            new = list({id(leaf): leaf for leaf in (*new, *self.models.trained_by_optimizers())}.values())
        if self._passes.handed.is_part and is_compiled(of_python):
            self._notices.note_compiled()
        self._deferred.before_backward(self._passes.handed, not accumulates)
        meetings = self.meetings
        try:
            run = self._meet(roots, leaves, new, extras, is_graph_made, kinds, of_python)
            if not accumulates:
                return self._grad(run, real, outputs, args, kwargs)
            self._accumulate(run, roots, real, outputs, args, kwargs)
        except NotPrepared:  # that of all ranks
            raise
        except BaseException as error:
            if self.meetings != meetings:
                leave_exchange(_CALL, error)
            raise
        return None

    def _accumulate(self, run: Agreement, roots: Sequence[Tensor], *call: Any) -> None:
        """Run a graph backwards; leaves get averaged gradients."""
        aside = self._set_aside(run)
        self._round, self._factor, self._late = run.round, run.factor, {}
        self._is_completed_later = run.decision.has_extras  # a leaf is, once for each backward inside
        try:
            self._run_inside(run, *call)
            self._bring_all(run)
            run.round.finish()
            self._exchange_late(run)
        except BaseException:
            for number, old in aside.items():
                self._tensor(number).grad = old
            raise
        finally:
            self._round = None
            self._late = {}
        self._put_back(run, aside)
        self._end(run, roots)

    def _grad(self, run: Agreement, real: Callable[..., Any], outputs: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the requested gradients; those of trained tensors are averaged."""
        found = self._run_inside(run, real, outputs, args, kwargs)
        numbers = [self.models.number(each) if isinstance(each, Tensor) else None for each in args[3]]
        is_graph_made = args[2]  # then all ranks have computed the same, and the graph is kept
        for number, gradient in zip(numbers, found, strict=True):
            if number is not None and gradient is not None and not is_graph_made:
                run.round.bring(number, gradient, run.factor)
        run.round.finish()
        self._put_back(run, {}, only_buffers=True)
        self._end(run, outputs)
        return (
            found
            if is_graph_made
            else tuple(
                gradient if number is None or gradient is None else run.round.value[number].clone()
                for number, gradient in zip(numbers, found, strict=True)
            )
        )

    def _run_inside(self, run: Agreement, real: Callable[..., Any], outputs: Any, args: Any, kwargs: Any) -> Any:
        hooks = run.inject()
        self._is_inside = True
        try:
            return real(outputs, *args, **kwargs)
        finally:
            self._is_inside = False
            for hook in hooks:
                hook.remove()

    # -- before the real one

    def _sort(self, leaves: Sequence[Tensor], accumulates: bool) -> tuple[list[int], list[Tensor]]:
        batch, sizes = self._passes.batches, self._passes.handed.sizes
        return self.models.sort(leaves, batch, sizes, by_holders=self._deferred.is_used, accumulates=accumulates)

    def _meet(
        self,
        roots: Sequence[Tensor],
        leaves: Sequence[Tensor],
        new: list[Tensor],
        extras: bool,
        is_graph_kept: bool,
        kinds: Sequence[type],
        of_python: Sequence[Any],
    ) -> Agreement:
        """Agree with all ranks on what is summed, and on its weights.

        Raises:
            NotPrepared: The ranks do not train one model any more, or their batches cannot be combined.
        """
        self._steps.enter(roots)  # may raise RunStopped
        readings = [read(root, is_scaled) for root in roots]
        terms = [term for reading in readings for term in reading.terms]
        handed, shape_of = self._passes.handed, ShapeOfLoss()
        shapes = [shape_of.of(reading.terms) for reading in readings]
        shape = shapes[0] if len(shapes) == 1 else shape_of.of(terms)
        obstacle = self._losses.obstacle(readings, shapes, handed, is_graph_kept, kinds)
        obstacle = obstacle or self._watch.obstacle(roots)
        if self._losses.is_new_in_parts(shapes, kinds, handed, is_watched=self._watch.is_strict):
            self._passes.watch_next()
        if not obstacle and any(leaf._backward_hooks for leaf in leaves):
            obstacle = "a hook that may change the gradient of a parameter"
        named = [] if len(roots) != 1 or not handed.is_part else users_scalars(readings[0], VALUES - 1)
        shown = [root for root in roots[:1] if root.numel() == 1] + [value for value, _ in named]
        self._outside = self._watch.outside(roots)
        # What Python functions compute, as by kernels of their own, may be of the batch, too.
        apart = [] if of_python else self._watch.are_apart(roots, terms[:MOST_ZEROS])
        told, mine = self._exchange_headers(leaves, new, extras, terms, apart, shape, shown, bool(obstacle))
        causes = None if obstacle else told.decisive()
        if causes is not None:
            causes = *causes, handed.sizes, tuple(mine), tuple(term.is_of_parameters for term in terms)
        decision = self._decisions.find(causes)
        if decision is None:
            decision = self._decide(told.header(), mine, terms, obstacle)
            if not obstacle and decision.header.any("obstacle"):
                obstacle = "another rank says so"
            self._decisions.keep(None if obstacle else causes, decision)
        turn_weights = None
        if handed.turn.share != 1.0:
            turn_weights = self._turns.weigh(decision, terms, handed.turn, self._deferred.backward)
        numbers = decision.numbers
        tensors = {number: mine[number] if number in mine else self._tensor(number) for number in numbers}
        buffers = [number for number in numbers if self.models.items[number].is_buffer]  # those of any rank's forward
        round_ = self._exchanges().begin(numbers, [*tensors.values()], {*mine, *buffers})
        for number in buffers:
            share = decision.header.share_of_samples(self._world.rank, decision.givers)
            round_.bring(number, tensors[number].detach().clone(), share)  # a checkpoint may write into it meanwhile
        run = Agreement(decision, round_, tensors, told.values(), terms, self._world.rank, obstacle, named)
        run.turn_weights = turn_weights
        return run

    def _decide(self, header: Header, mine: Collection[int], terms: Sequence[Term], obstacle: str) -> Decision:
        """Decide by the numbers of all ranks.

        Raises:
            NotPrepared: The ranks do not train one model any more, or their batches cannot be combined.
        """
        self._steps.agree(int(max(each.at for each in header.says)))
        givers, handed = self._agree(header, obstacle), self._passes.handed
        self._share_noise(header)
        self._compare_outside(header)
        self._compare_work(header, givers)
        is_part = any(header.says[rank].part for rank in givers)
        if is_part and header.all_equal("terms", givers) and self._losses.has_others(header, givers):
            raise self._cannot_measure("samples that are not of the batch are joined with it, the same in each part")
        if all(header.says[rank].lengths for rank in givers) and not header.all_equal("lengths", givers):
            self._notices.note_lengths()
        pure = self._losses.without_batch(header, terms, givers, handed)
        try:
            weights = factors(header, givers, pure, self._losses.references)
        except LeastCount:
            raise self._is_of_own_batches(
                "the loss is divided by a count, which is 1 in a part of this batch: that may stand for none, as in "
                "max(count, 1), and the count of the whole batch is not known"
            ) from None
        self._watch.has_counts = self._losses.references.has_counts
        if weights is None:
            why = "its terms differ between ranks, as by a branch on samples; or one is divided by its batch twice; or"
            raise self._cannot_measure(f"{why} a single sample shows too little")
        return Decision(header, givers, weights, pure, tuple(self._union(header, mine)))

    def _exchange_headers(
        self,
        leaves: Sequence[Tensor],
        new: list[Tensor],
        extras: bool,
        terms: Sequence[Term],
        apart: Sequence[bool],
        shape: int,
        shown: Sequence[Tensor],
        has_obstacle: bool,
    ) -> tuple[Told, dict[int, Tensor]]:
        """Return the numbers of all ranks, and the leaves and buffers that this rank has values for. Collective.

        New leaves of any rank are registered in all ranks, which then exchange their numbers again.

        Args:
            apart: Of each term, whether it was seen to depend on no batch.
            shown: Losses whose values the ranks exchange.

        Raises:
            NotPrepared: Another rank's program is over.
        """
        gives, told, rates, handed = True, None, self._steps.take_rates(), self._passes.handed
        is_uneven = handed.is_part and len(handed.sizes) > 1
        lengths = self._losses.lengths(terms, handed, self.meetings)
        is_check_due = self._is_check_due()
        zeros = 0
        pairs: list[tuple[float, float]] = []
        while True:
            mine = self.models.by_number(leaves)
            if told is None and is_check_due:
                self.models.look_at_values()
            buffers = self.models.changed_buffers(mine.keys())
            if told is None:
                for at, term in enumerate(terms):
                    zeros |= term.is_zero << min(at, MOST_ZEROS)
                counted = [(-1 - term.elements if term.count is None else term.count, term.constant) for term in terms]
                numbers = as_floats([*(part for pair in counted for part in pair), *(each.detach() for each in shown)])
                pairs = list(zip(numbers[: 2 * len(terms) : 2], numbers[1 : 2 * len(terms) : 2], strict=True))
                values = numbers[2 * len(terms) :]
            say = Say(
                new=len(new),
                leaves=digest_of(tuple(mine), tuple(buffers)),
                extras=extras,
                shape=shape,
                part=handed.is_part,
                own=self._passes.gives_own,
                rows=handed.rows,
                whole=handed.whole,
                obstacle=has_obstacle,
                zeros=zeros,
                apart=sum(is_apart << at for at, is_apart in enumerate(apart)) if apart else 0,
                gives=gives,
                least=self._watch.least,
                at=self._steps.count,
                steps=self._steps.taken,
                batches=self._passes.batches if handed.is_part else 0,
                drawn=self._passes.drawn if handed.is_part else 0,
                noise=self._passes.noise if is_uneven else 0,  # otherwise they have drawn equally often
                lengths=lengths,
                rates=rates,
                outside=self._outside.digest,
                check=sum(sums_of([*mine.values()])) if is_check_due else 0.0,
            )
            told = self._tell(say, pairs, values)
            if not told.any("new"):
                mine.update((number, self._tensor(number)) for number in buffers)
                return told, mine
            if told.any("done"):
                raise NotPrepared(
                    f"{self._world.place} begins to train a model when another rank's "
                    "program is over: every rank must train the same models."
                )
            gives = self.models.register(new, self._collective()) and gives
            self._training.note_models()
            new = []

    def _tell(self, say: Say, pairs: Sequence[tuple[float, float]], values: Sequence[float]) -> Told:
        self.meetings += 1
        return exchange(self._collective(), _CALL, say, pairs, values)

    def _agree(self, header: Header, obstacle: str) -> list[int]:
        """Return the ranks whose gradients count.

        Raises:
            NotPrepared: Their programs have taken different ways.
        """
        says, world = header.says, self._world
        here = [rank for rank, say in enumerate(says) if not say.done]
        refuse_to_go_on_with_parts(header, here)
        refuse_out_of_step(header, here)
        if any(says[rank].obstacle for rank in here) and any(says[rank].part for rank in here):
            raise self._cannot_measure(obstacle or "another rank says so")
        givers = [rank for rank in here if says[rank].gives]
        return givers or [here[0] if here else world.rank]

    def _share_noise(self, header: Header) -> None:
        """Give all ranks the same states of Python's and NumPy's generators, by which programs decide.

        The states differ where the loop has drawn for its samples, of which not all ranks have equally many.
        """
        here = [rank for rank, say in enumerate(header.says) if not say.done]
        if all(header.says[rank].noise for rank in here) and not header.all_equal("noise", here):
            self._passes.share_noise(self._collective().gather_objects)

    def _compare_outside(self, header: Header) -> None:
        """Compare what the losses use beside their batches.

        Raises:
            NotPrepared: It is a state that each rank has made of its own parts of the batches.
        """
        here = [rank for rank, say in enumerate(header.says) if not say.done]
        if not all(header.says[rank].outside for rank in here) or header.all_equal("outside", here):
            return
        all_told = self._collective().gather_objects([self._outside.told()])
        told, rows = [all_told[rank] for rank in here], [header.says[rank].rows for rank in here]
        found = of_parts(told, rows, self._fixed, not header.all_equal("noise", here))
        if not any(header.says[rank].part for rank in here):
            self._apart.update(found)
        elif found := [key for key in found if key not in self._apart]:
            values = [each[found[0]] for each in told]
            said = ", ".join(f"rank {rank}: {as_text(value)}" for rank, value in zip(here, values, strict=True))
            name, line = self._outside.name(found[0])
            if len({value.shape for value in values}) > 1:
                raise self._is_of_own_batches(
                    f"the loss uses rows of a tensor, {name}, as many as the batch has samples, and it was split: each "
                    f"rank has taken the first of them ({line})"
                )
            raise self._is_of_own_batches(
                f"the loss uses {name}, which the loop makes of its batches, and these were split: each rank has made "
                f"another one ({said}; {line})"
            )

    def _compare_work(self, header: Header, givers: Sequence[int]) -> None:
        """Compare losses of the same work, which ranks do whose batch was not cut.

        Raises:
            NotPrepared: They do it on samples that each has collected from its own parts of the batches.
        """
        passes = self._passes
        is_apart = any(header.says[rank].part or header.says[rank].own for rank in givers) or passes.is_shared_out
        losses = [header.values[rank][:1] for rank in givers]
        if is_apart or not passes.has_split or not all(losses):
            return
        finite = [loss for (loss,) in losses if math.isfinite(loss)]
        if finite and max(finite) - min(finite) > _NEAR * max(map(abs, finite)):
            said = ", ".join(f"rank {rank}: {loss:.6g}" for rank, (loss,) in zip(givers, losses, strict=True))
            raise self._is_of_own_batches(
                "the loop trains on samples that it has collected of its batches, and these were split: each rank has "
                f"collected others (a batch that was not split has another loss in each: {said})"
            )

    def _is_of_own_batches(self, what: str) -> NotPrepared:
        error = NotPrepared(
            f"{what}. {self._world.place}, step {self._steps.count}; the step was not taken. %%accelerate --batches "
            "each gives each rank batches, and states, of its own; -n 1 trains as before."
        )
        error.is_of_parts = error.is_of_states = True
        return error

    def _cannot_measure(self, why: str) -> NotPrepared:
        remedy = "%%accelerate --batches each gives each rank batches of its own; -n 1 trains as before."
        if self._deferred.is_used:
            remedy = "Memory ran out with whole batches: choose a smaller batch_size."
        error = NotPrepared(
            f"{self._world.place}, step {self._steps.count}: this loss is no sum over "
            f"samples ({why}), and its batch was split over the ranks. {remedy}"
        )
        error.is_of_parts = error.is_of_states = True
        return error

    def _union(self, header: Header, mine: Collection[int]) -> list[int]:
        """Return the numbers of all that any rank has values for, in the order in which backwards come to them."""
        if not header.all_equal("leaves", range(len(header.says))) or header.any("extras"):
            marks = torch.zeros(len(self.models.items), dtype=torch.uint8, device="cpu")
            marks[sorted(mine)] = 1
            mine = set(self._collective().tell(_CALL, marks).sum(0).nonzero().flatten().tolist())
        return sorted(mine, reverse=True)

    # -- while it runs

    def _completed(self, number: int, leaf: Tensor) -> None:
        """Handle a gradient that autograd has completed."""
        if self._round is not None and leaf.grad is not None:
            if number not in self._round.value:
                self._late[number] = leaf
            elif not self._is_completed_later:
                self._round.bring(number, leaf.grad, self._factor)

    def _bring_all(self, run: Agreement) -> None:
        """Bring the final gradients of leaves, where each was completed more than once."""
        if self._is_completed_later:
            for number, tensor in run.tensors.items():
                if tensor.grad is not None and not self.models.items[number].is_buffer:
                    run.round.bring(number, tensor.grad, run.factor)

    # -- after it

    def _exchange_late(self, run: Agreement) -> None:
        """Exchange gradients of leaves that a reentrant checkpoint has reached inside of the backward."""
        if not run.decision.has_extras:
            return
        marks = torch.zeros(len(self.models.items), dtype=torch.uint8, device="cpu")
        marks[sorted(self._late)] = 1
        numbers = self._collective().tell(_CALL, marks).sum(0).nonzero().flatten().tolist()
        if not numbers:
            return
        round_ = self._exchanges().begin(tuple(numbers), [self._tensor(number) for number in numbers], set(self._late))
        for number, leaf in self._late.items():
            assert leaf.grad is not None
            round_.bring(number, leaf.grad, run.factor)
        round_.finish()
        for number in numbers:
            run.late[number] = round_.value[number]

    def _set_aside(self, run: Agreement) -> dict[int, Tensor]:
        aside = {}
        for number, tensor in self.models.alive("parameters") if run.decision.has_extras else run.tensors.items():
            if tensor.grad is not None:
                aside[number], tensor.grad = tensor.grad, None
        return aside

    def _put_back(self, run: Agreement, aside: dict[int, Tensor], only_buffers: bool = False) -> None:
        with torch.no_grad():
            values = {**run.round.value, **run.late}
            for number in [each for each in values if self.models.items[each].is_buffer]:
                tensor, value, item = self._tensor(number), values.pop(number), self.models.items[number]
                if item.norm is None and run.decision.is_of_parts and self.meetings <= _LOOKS:
                    self._note_buffer(number, tensor, value)
                item.note(tensor, value)
            self.models.reached.update(values)
            if only_buffers:
                values.clear()
            elif self._deferred.is_on:
                self._deferred.keep(values.items(), aside, functools.partial(self._versions, tuple(values)))
                for number in values:
                    self._tensor(number).grad = None
                return
            else:
                sums, before = self._deferred.take()
                for number, value in sums.items():
                    values[number] = values[number].add_(value) if number in values else value
                if (scale := self._turns.scale) != 1.0 and run.turn_weights is not None:
                    for value in values.values():
                        value.mul_(scale)
                for number, value in before.items():
                    aside.setdefault(number, value)
            for number, value in values.items():
                tensor = run.tensors[number] if number in run.tensors else self._tensor(number)
                old = aside.pop(number, None) if aside else None
                if tensor.grad is not None and tensor.grad.requires_grad:  # it has a graph, and is equal in all
                    tensor.grad = tensor.grad if old is None else old + tensor.grad
                elif self.models.items[number].is_sparse:
                    value = value.clone().to_sparse(1)
                    tensor.grad = value if old is None else old + value
                elif old is None:
                    tensor.grad = value
                else:
                    tensor.grad = old.add_(value)
            for number, old in aside.items():
                self._tensor(number).grad = old

    def _note_buffer(self, number: int, tensor: Tensor, value: Tensor) -> None:
        """Report buffers that differ from those of other ranks, in the first backwards."""
        if number not in self._noted_buffers and not torch.allclose(tensor, value, equal_nan=True):
            self._noted_buffers.add(number)
            self._notices.note_buffers(self.models.items[number].name)

    def _versions(self, numbers: Sequence[int]) -> int:
        return sum(self._tensor(number)._version for number in numbers)

    def _end(self, run: Agreement, roots: Sequence[Tensor]) -> None:
        whole = run.whole_values()
        for tensor, value in zip((*roots[:1], *(scalar for scalar, _ in run.named)), whole, strict=False):
            if value is not None:
                tensor.data.fill_(value)
        own = run.values[self._world.rank]
        value = whole[0] if whole and whole[0] is not None else own[0] if own else None
        shown = value if value is None else without_scale(roots[0], value)
        forget_scaled()
        if self.models.is_training() or self._steps.taken:
            self._passes.note_backward(run.obstacle)
        if whole and whole[0] is None:
            self._notices.note_parts_shown()
        self._training.note_trained(shown)

    # -- the end

    def answer_until_all_are_done(self) -> list[float]:
        """Take part without gradients until all ranks are done; return the optimizer steps of each rank.

        Called when this rank's program is over. Empty if the ranks never met.
        """
        while self.meetings:
            header = self._tell(Say(done=1, gives=0, steps=self._steps.taken), (), ()).header()
            if all(each.done for each in header.says):
                return [each.steps for each in header.says]
            if header.any("new"):
                raise NotPrepared(
                    f"{self._world.place} is done, and another rank begins to train a "
                    "model: every rank must train the same models."
                )
            self._accompany(header)
        return []

    def _accompany(self, header: Header) -> None:
        self._agree(header, "")
        self._share_noise(header)
        self._compare_outside(header)
        together = self._union(header, ())
        tensors = [self._tensor(number) for number in together]
        round_ = self._exchanges().begin(tuple(together), tensors, ())
        round_.finish()
        if header.any("extras"):
            marks = torch.zeros(len(self.models.items), dtype=torch.uint8, device="cpu")
            numbers = self._collective().tell(_CALL, marks).sum(0).nonzero().flatten().tolist()
            if numbers:
                self._exchanges().begin(tuple(numbers), [self._tensor(number) for number in numbers], ()).finish()

    def take_in_what_was_made_since(self) -> None:
        """Give all ranks rank 0's values of what their models hold and no backward has reached. Collective.

        A layer that a loop makes behind its last step is drawn by each rank for itself.
        """
        new = self.models.made_since()
        kinds = [(tuple(each.shape), str(each.dtype)) for each in new]
        told = self._collective().gather_objects([kinds])
        if kinds and all(theirs == kinds for theirs in told):
            self.models.register(new, self._collective())

    def what_differs(self) -> tuple[list[int], list[int]]:
        """Return the numbers of tensors that differ between ranks and exist in all: parameters, buffers. Collective."""
        numbers = self._alive_everywhere()
        if not numbers:
            return [], []
        found_sums = sums_of([self._tensor(number) for number in numbers])
        sums = torch.tensor(found_sums, dtype=torch.float64, device="cpu")
        rows = self._collective().tell(_CALL, sums).unflatten(1, (-1, 2))
        differs = (rows != rows[:1]).any(2).any(0).tolist()
        found = [number for number, it_does in zip(numbers, differs, strict=True) if it_does]
        buffers = [number for number in found if self.models.items[number].is_buffer]
        return [number for number in found if number not in buffers], buffers

    def broadcast(self, source: int, numbers: Sequence[int] | None = None) -> None:
        """Copy rank `source`'s known tensors, or those with `numbers`, to all ranks. Collective."""
        with torch.no_grad():
            for number in self._alive_everywhere() if numbers is None else numbers:
                tensor = self._tensor(number)
                tensor.data.copy_(self._collective().broadcast(tensor.detach(), source))

    def _alive_everywhere(self) -> list[int]:
        """Return the numbers of tensors that exist in all ranks, which may collect unused ones at different times."""
        marks = torch.zeros(len(self.models.items), dtype=torch.uint8, device="cpu")
        marks[[number for number, _ in self.models.alive()]] = 1
        found: list[int] = self._collective().tell(_CALL, marks).amin(0).nonzero().flatten().tolist()
        return found

    def _is_check_due(self) -> bool:
        """Return whether weights are checked: at steps 1, 2, 4, ... and every 64th."""
        steps = self._steps.count
        return steps > 0 and (steps & (steps - 1) == 0 or steps % 64 == 0)

    # -- parts

    def _tensor(self, number: int) -> Tensor:
        tensor = self.models.items[number].tensor
        if tensor is None:
            raise NotPrepared(
                f"{self._world.place} has let go of a model that another rank still "
                "trains: something that the loop decides or draws by itself differs between ranks."
            )
        return tensor

    def _collective(self) -> Collectives:
        now = self._training.collectives()
        if now is not self._collectives:  # of a group that was formed again
            self._collectives, self._exchange = now, None
        return now

    def _exchanges(self) -> GradientExchange:
        now = self._collective()
        self._exchange = self._exchange or GradientExchange(now)
        return self._exchange
