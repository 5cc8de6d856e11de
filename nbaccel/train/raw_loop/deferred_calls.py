"""Delay actions until the last part of a batch, in a loop that prepares nothing. Runs in ranks.

After a run that ran out of memory a batch comes in several parts, and the loop's body runs once for each. Until the
last one trained tensors have no gradient, so that clipping, unscaling and the optimizer's step have no effect; the sum
of all parts appears with the last. Schedulers and scalers move once for each batch. A loop that would train otherwise
than with whole batches is refused, and `TurnWeights` weighs the parts. `StepCounter` decides where one training step
ends and the next begins.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from nbaccel.base.events import StepEntered, StepsEnded, emit
from nbaccel.errors import CannotCut
from nbaccel.train.raw_loop.agreement import Decision
from nbaccel.train.raw_loop.batch_parts import GivenBatches, Turn
from nbaccel.train.raw_loop.gradient_weights import differ
from nbaccel.train.raw_loop.terms import Term
from nbaccel.train.raw_loop.trained_tensors import optimizers_of
from nbaccel.train.step.readings import LearningRates

__all__ = [
    "DeferredCalls",
    "StepCounter",
    "TurnWeights",
    "let_clipping_find_nothing",
]

_REMEDY = "Choose a smaller batch_size, or prepare the loop; --oom stop leaves batches whole."
_WHOLE = Turn()

_FEW_NUMBERS = 2
"""Numbers of a term, or single ones and unknown ones, whose equality between parts shows nothing."""


class DeferredCalls:
    """Keeps the gradients of a batch's earlier parts, and checks what the loop does with these parts.

    Every exception that it raises is a `CannotCut`, in all ranks, before a weight has changed that should not have.

    Args:
        choices: Returns a number that differs for other learning rates, or other settings of optimizers.

    Attributes:
        backward: The number of the last backward of the current part, 0-based; -1 before the first.
    """

    def __init__(self, choices: Callable[[], int]) -> None:
        self._choices = choices
        self._is_watching = False
        self.begin()

    def begin(self) -> None:
        """Begin a task: batches come whole."""
        self._turn = _WHOLE
        self._has_computed = self._has_stepped = self._has_dropped = False  # gradients, in this part
        self.backward = -1
        self._begun_with = 0  # the optimizers' settings at the step of the batch's first part
        self._versions: Callable[[], int] = int  # of the tensors that are trained
        self._left_with = 0  # their versions after the last backward
        self._waiting: set[int] = set()  # schedulers that were told to move, and have not
        self._sums: dict[int, Tensor] = {}
        self._before: dict[int, Tensor] = {}  # gradients that existed when the batch began
        self.is_used = False  # in this task

    @property
    def is_on(self) -> bool:
        """True if the current part is followed by others of its batch."""
        return not self._turn.is_last

    def next_turn(self, turn: Turn | None) -> None:
        """Note the next part of a batch; None: no other part of the current batch will come."""
        if turn is None:
            self._forget()
            return
        if not self._is_watching:
            self._is_watching = True
            _watch(self)
        self.is_used = True
        if self.is_on and self._has_computed:
            self._judge(turn)
        if turn.is_first:
            if self._waiting and self._has_computed:
                self.refuse("a scheduler is told to move in some rounds only")
            self._forget()
        self._turn = turn
        self.backward = -1
        self._has_computed = self._has_stepped = self._has_dropped = False

    def _judge(self, turn: Turn) -> None:
        """Check the loop's next round, while the current part is computed and others of its batch are to follow."""
        if turn.is_first:
            self.refuse("the loop goes on with a batch of another loader before the last part")
        if not self._has_stepped:
            self.refuse("the loop decides by itself in which of its rounds to step, and would count parts for batches")
        if self._versions() != self._left_with:
            self.refuse("the loop, or its optimizer, changes weights in every round")

    def _forget(self) -> None:
        """Forget the current batch, which is over, or was left in the middle."""
        self._turn = _WHOLE
        self._sums.clear()
        self._before.clear()
        self._waiting.clear()

    def before_backward(self, handed: GivenBatches, is_grad: bool) -> None:
        """Check a backward that is about to be averaged.

        Args:
            is_grad: Gradients are requested directly, and do not reach the leaves.
        """
        if not handed.turn.is_mixed and handed.turn.share == 1.0:
            return
        if handed.turn.is_mixed:
            self.refuse("the loop takes batches of several loaders for one backward, and these are not cut alike")
        if self._has_stepped:
            self.refuse("the loop takes several steps for each batch, and none comes before the last part")
        if self._has_dropped:
            self.refuse("the loop drops the gradients of one backward before the next")
        if handed.batches > 1:
            self.refuse("the loop takes several batches for one backward")
        if is_grad:
            self.refuse("the loop asks for gradients by torch.autograd.grad")
        self._has_computed = True
        self.backward += 1

    def keep(
        self, gradients: Iterable[tuple[int, Tensor]], before: dict[int, Tensor], versions: Callable[[], int]
    ) -> None:
        """Keep the gradients of a part that others follow.

        Args:
            before: Gradients that leaves had before, by number.
            versions: Returns how often the leaves were changed.
        """
        self._versions, self._left_with = versions, versions()
        for number, gradient in gradients:
            if number in self._sums:
                self._sums[number].add_(gradient)
            else:
                self._sums[number] = gradient
        for number, gradient in before.items():
            self._before.setdefault(number, gradient)

    def take(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return the sums of the batch's earlier parts, and the gradients before it. They are returned once."""
        found = self._sums, self._before
        self._sums, self._before = {}, {}
        return found

    def withholds_step(self, closure: Any = None) -> bool:
        """Return whether the step of an optimizer, or a call of a scaler, has to wait."""
        if self._turn.share == 1.0:
            return False
        if closure is not None:
            self.refuse("the optimizer computes its losses itself (a closure), and would for the last part only")
        if self._turn.is_first:
            self._begun_with = self._choices()
        elif self._choices() != self._begun_with:
            self.refuse("the loop, or its optimizer, changes the learning rate or a count of steps in every round")
        self._has_stepped = True
        return self.is_on

    def withholds_move(self, scheduler: Any) -> bool:
        """Return whether a scheduler's move has to wait."""
        if self.is_on:
            self._waiting.add(id(scheduler))
        else:
            self._waiting.discard(id(scheduler))
        return self.is_on

    def note_drop(self) -> None:
        """Note that gradients are set to zero."""
        self._has_dropped |= self._has_computed and not self._has_stepped

    def explain(self) -> str:
        return "Memory ran out with whole batches, so each comes in parts, and gradients appear with the last one only."

    def refuse(self, what: str) -> NoReturn:
        """Refuse what the loop does.

        Args:
            what: A clause about it.

        Raises:
            CannotCut: Always.
        """
        raise CannotCut(f"memory ran out with whole batches, so each comes in parts now, but {what}. {_REMEDY}")


class TurnWeights:
    """The weights of the parts of a batch, its turns. All ranks compute the same, from the header of each backward.

    A loss that is a mean over samples counts in each turn by its share of the batch's samples, which is known
    beforehand. Where its divisor is another number, as that of a mean over a mask, over labels that are not ignored, or
    with weights, the divisor of later turns is not known yet: gradients are weighted relative to the first divisor, and
    their sum is scaled with the last turn.

    Args:
        refuse: Raises an error about batches that come in parts, with a reason.
        on_other_leaves: Called where a turn has trained other parameters than the one before it.
    """

    def __init__(self, refuse: Callable[[str], object], on_other_leaves: Callable[[], None]) -> None:
        self._refuse = refuse
        self._on_other_leaves = on_other_leaves
        self.begin()

    def begin(self) -> None:
        """Begin a task."""
        self._first_rates: dict[Hashable, float] = {}  # by term: its divisor for each sample, where it was not zero
        self._varying: set[Hashable] = set()  # terms whose divisor was seen to follow the samples
        self._are_sums: dict[Hashable, bool] = {}  # terms, as they were taken first
        self._begin_batch()

    def _begin_batch(self) -> None:
        self._losses: list[tuple[tuple[float, ...], tuple[float, ...]]] = []  # of the first turn, in order
        self._rate, self._first_rate, self._is_scaled = 1.0, 1.0, False
        self._sum = 0.0

    @property
    def scale(self) -> float:
        """The factor of the sum of a batch's gradients, once its last turn was weighed."""
        return 1.0 / self._sum if self._is_scaled and self._sum else 1.0

    def weigh(self, decision: Decision, terms: Sequence[Term], turn: Turn, backward: int) -> list[float]:
        """Return the factor of each term of the loss of a turn, the same in all ranks.

        Args:
            terms: Of this rank's loss: of the same kinds in all ranks.
            backward: The number of the backward in its turn, 0-based.

        Raises:
            CannotCut: The sum over turns would not be the gradient of the batch.
        """
        if turn.is_first and not backward:
            self._begin_batch()
        self._compare(decision, turn, backward)
        rates = [self._rate_of(decision, at, term) for at, term in enumerate(terms)]
        known = [rate for rate in rates if rate is not None]
        rate = known[0] if known else self._rate if backward else 1.0
        if differ(known or [rate]) or (backward and differ([self._rate, rate])):
            self._refuse("its losses are means over different things, as over samples and over what a mask leaves")
        if not backward:
            self._first_rate = rate if turn.is_first else self._first_rate
            self._rate = rate
            self._is_scaled |= rate != 1.0
            self._sum += rate * turn.share
        has_sums = any(decision.is_sum(at) for at in range(len(terms)))
        if has_sums and differ([self._first_rate, rate]):
            self._refuse(
                "its loss has a sum beside a mean over what is not known beforehand, as over what a mask leaves"
            )
        return [rate if decision.is_sum(at) else rate * turn.share for at in range(len(terms))]

    def _compare(self, decision: Decision, turn: Turn, backward: int) -> None:
        """Compare a loss with that of the first turn: a loop that chooses by its rounds would choose by turns."""
        says = [decision.header.says[rank] for rank in decision.givers]
        loss = tuple(say.shape for say in says), tuple(say.leaves for say in says)
        if turn.is_first:
            self._losses.append(loss)
            return
        if backward >= len(self._losses) or loss[0] != self._losses[backward][0]:
            self._refuse(
                "the loop computes another loss of a part than of the one before, and would count parts for batches"
            )
        if loss[1] != self._losses[backward][1]:
            self._on_other_leaves()

    def _rate_of(self, decision: Decision, at: int, term: Term) -> float | None:
        """Return the divisor for each sample, relative to the first one; None for a sum, or a term without a batch."""
        says = [decision.header.says[rank] for rank in decision.givers]
        key = says[0].shape, at
        if decision.of_parameters[at]:
            if decision.is_sum(at):
                self._refuse("a term without samples is divided by their number")
            return None
        if not isinstance(term.count, Tensor):  # otherwise weights of samples, which may be alike by chance
            numbers = decision.numbers_of(at)
            if differ(numbers):
                self._varying.add(key)
            elif numbers[0] > _FEW_NUMBERS and differ([say.rows for say in says]) and key not in self._varying:
                self._refuse("a term of its loss is over as many numbers in a larger part as in a smaller one")
        is_sum = decision.is_sum(at)
        if self._are_sums.setdefault(key, is_sum) != is_sum:
            self._refuse("a divisor of its loss was taken for a number of the program's, and depends on the samples")
        if is_sum:
            return None
        rate = math.fsum(decision.divisors(at)) / math.fsum(say.rows for say in says)
        first = self._first_rates.setdefault(key, rate) if rate else 1.0
        return rate / first


def _watch(deferred: DeferredCalls) -> None:
    """Make torch's schedulers move once for each batch, and watch gradients being dropped; until the process ends."""
    let_clipping_find_nothing()
    kinds: list[Any] = [LRScheduler, ReduceLROnPlateau]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    for kind in kinds:
        if "step" in vars(kind):
            kind.step = _once_for_each_batch(kind.step, deferred)
    for owner in (Optimizer, Module):
        owner.zero_grad = _seen(owner.zero_grad, deferred)  # type: ignore[method-assign]


def let_clipping_find_nothing() -> Callable[[], None]:
    """Make ``clip_grad_value_`` accept that no parameter has a gradient, at which torch raises; return what undoes it.

    `clip_grad_norm_` accepts it. A program may have imported the function by its name, so a part of it is replaced.
    """
    group: Any = clip_grad._group_tensors_by_device_and_dtype
    if hasattr(group, "nbaccel_accepts_none"):
        return lambda: None

    @functools.wraps(group)
    def grouped(lists: Any, *args: Any, **kwargs: Any) -> Any:
        return group(lists, *args, **kwargs) if any(lists) else {}

    def undo() -> None:
        if clip_grad._group_tensors_by_device_and_dtype is grouped:
            clip_grad._group_tensors_by_device_and_dtype = group

    grouped.nbaccel_accepts_none = True  # type: ignore[attr-defined]
    clip_grad._group_tensors_by_device_and_dtype = grouped  # type: ignore[assignment]
    return undo


def _once_for_each_batch(step: Callable[..., Any], deferred: DeferredCalls) -> Callable[..., Any]:
    @functools.wraps(step)
    def paced(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        return None if deferred.withholds_move(scheduler) else step(scheduler, *args, **kwargs)

    return paced


def _seen(zero_grad: Callable[..., Any], deferred: DeferredCalls) -> Callable[..., Any]:
    @functools.wraps(zero_grad)
    def drop(owner: Any, *args: Any, **kwargs: Any) -> Any:
        deferred.note_drop()
        return zero_grad(owner, *args, **kwargs)

    return drop


class StepCounter:
    """Counts the steps of one task.

    In a loop that prepares nothing, the optimizers' steps and the batches that it takes show where a step ends. Batches
    whose gradients are accumulated by hand are one step, that of the optimizer which follows them. Only a loop without
    an optimizer, which changes weights by itself, steps with each batch.

    Args:
        batches: How many batches were handed out so far.
        optimizers: Returns the optimizers that step the leaves of these roots. Asked once in a task, and only where a
            second batch comes before any optimizer has stepped.

    Attributes:
        rates: The learning rates of the optimizers that step, which another thread may read.
    """

    def __init__(
        self, batches: Callable[[], int], optimizers: Callable[[Sequence[Tensor]], Iterable[Optimizer]] = optimizers_of
    ) -> None:
        self._batches = batches
        self._optimizers_of = optimizers
        self.rates = LearningRates()
        self.begin()

    def begin(self) -> None:
        """Begin a task."""
        self.count = self.taken = 0
        self.rates.forget()
        self._rates = 0.0
        self._entered_at: tuple[int, int] | None = None  # optimizers' steps and batches when the last step was entered
        self._is_inside = self._has_ended = False
        self._stepped: set[int] = set()  # optimizers, in this step
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._has_asked = False

    def begin_anew(self) -> None:
        """Begin another attempt of the program, whose steps continue from where the last one ended."""
        self.taken, self._rates = 0, 0.0
        self._entered_at = None
        self.end_step()
        self._has_ended = False

    @property
    def under_way(self) -> int | None:
        """The step that was entered last, 0-based; None where the task has entered none."""
        return self.count if self.count or self._entered_at is not None else None

    @property
    def done(self) -> int:
        """Steps that are complete; one in which several optimizers step is, from the first of them on."""
        return self.count + self._has_ended

    def go_on_at(self, count: int) -> None:
        """Continue with `count` steps complete, which another run has taken."""
        self.count, self._entered_at, self._is_inside, self._has_ended = count, None, False, False

    def agree(self, count: int) -> None:
        """Continue from step `count` of the peers: attempts before may have failed at different steps."""
        if count > self.count:
            self.count, self._has_ended = count, False
            emit(StepEntered(count))

    def meet(self, optimizer: Any) -> None:
        """Record that `optimizer` steps in this task."""
        self._optimizers.add(optimizer)

    def note(self, optimizer: Any) -> None:
        """Record that an optimizer is about to step; the second time for one batch it is in another step.

        Raises:
            RunStopped: The run ends before that step.
        """
        if id(optimizer) in self._stepped and self._batches():
            emit(StepEntered(self.count + 1))
            self.count += 1
            self._has_ended = False
            self._stepped.clear()
        self._stepped.add(id(optimizer))
        self.taken += 1
        self.rates.meet(optimizer)
        for group in optimizer.param_groups:
            if not isinstance(rate := group.get("lr"), (torch.Tensor, type(None))):
                self._rates += float(rate)

    def enter(self, roots: Sequence[Tensor]) -> None:
        """Enter a step, if the backward that is about to begin at `roots` starts one.

        Raises:
            RunStopped: The run ends before this step.
        """
        now = self.taken, self._batches()
        before = self._entered_at
        if before is not None and now != before and not (self._optimizers or self._has_asked):
            self._has_asked = True
            for optimizer in self._optimizers_of(roots):
                self.meet(optimizer)
        has_stepped = before is not None and (now[0] != before[0] or not self._optimizers)
        is_next = before is not None and has_stepped and (now[1] != before[1] or not now[1])
        if is_next or not self._is_inside:
            emit(StepEntered(self.count + is_next))  # first: if the run ends here, this step was not entered
            self._is_inside = True
        self.count += is_next
        if is_next or before is None:
            self._entered_at = now
            self._has_ended = False
            self._stepped.clear()

    def end_step(self) -> None:
        """End the step after an optimizer's step or at the task's end: a stop need not wait for anything then."""
        if self._is_inside:
            self._is_inside, self._has_ended = False, True
            emit(StepsEnded())

    def choices(self) -> int:
        """Return a number that differs for other settings of the optimizers: learning rates, and step counts there."""
        return hash(
            frozenset(
                (id(optimizer), at, name, value)
                for optimizer in self._optimizers
                for at, group in enumerate(optimizer.param_groups)
                for name, value in group.items()
                if isinstance(value, (int, float, tuple))
            )
        )

    def take_rates(self) -> float:
        """Return a number that differs for other learning rates, for the steps since the last call.

        It does not read the existing optimizers: one that the program has replaced is freed at different times in the
        ranks.
        """
        rates, self._rates = self._rates, 0.0
        return rates
