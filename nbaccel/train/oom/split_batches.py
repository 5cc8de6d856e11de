"""Split batches: the gate that hands the batches of a training loop out in parts. Runs in ranks.

After a run that ran out of memory the launcher starts it again with `RunSettings.split`, and `SplitBatches` hands out
every batch of a training loop in that many parts. The loop's body runs once per part. What happens once per batch
waits for the last part: synchronising gradients, the optimizer's step and `zero_grad`, schedulers, the count of
`accumulate`. A backward is weighted by its part's share of the samples, so the gradients are those of the whole
batch.

What a loop does without the `Accelerator` does not wait. `SplitLoopGuard` limits schedulers that were not prepared to
one move per batch, and refuses, with a sentence that says how to write it, what would train differently than with whole
batches.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, Protocol

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.errors import CannotCut
from nbaccel.train.data.loader import PreparedLoader
from nbaccel.train.oom.microbatch.slicing import BatchPart
from nbaccel.train.oom.whole_batches import WholeBatches
from nbaccel.train.prepare.prepared import Prepared
from nbaccel.train.step.accumulation import Accumulation, GradientAccumulationPlugin, Window
from nbaccel.train.strategies import Strategy

__all__ = ["Hand", "SplitBatches", "SplitLoopGuard", "SplitWindow", "paced"]


class Hand(Protocol):
    """The current part of a batch, and the number of batches of its accumulation window before that batch."""

    part: BatchPart
    position: int


class SplitLoopGuard:
    """Follows one loop from part to part: its backwards, its steps, and other changes of the gradients.

    Every exception that it raises is a `CannotCut`, before a weight has changed that should not have.

    Args:
        is_innermost: Returns whether this loop is the one whose body is running; an outer one does not judge.
    """

    def __init__(self, prepared: Prepared, hand: Hand, is_innermost: Callable[[], bool]) -> None:
        self._prepared = prepared
        self._hand = hand
        self._is_innermost = is_innermost
        self._has_weighed = False  # a backward of ours has run for a part of the current batch
        self._is_bare = False  # such a backward has run for this part, outside of `accumulate`
        self._has_stepped = False  # a prepared optimizer was told to step, in this part
        self._left: list[tuple[Tensor, int]] = []  # gradients as the last part's backward left them

    def __enter__(self) -> SplitLoopGuard:
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        if self._has_weighed and not (self._hand.part.is_last or self._hand.position):
            self._drop_begun_batch()

    def _drop_begun_batch(self) -> None:
        """Drop the gradients of a batch that the loop left in the middle, before its `zero_grad`."""
        for prepared in self._prepared.optimizers:
            prepared.optimizer.zero_grad()

    def next_part(self, part: BatchPart) -> None:
        """Check the part before; `part` is about to be handed out."""
        if self._is_bare and not self._has_stepped:
            self._refuse(
                "the loop decides by itself in which of its rounds to step, and would count parts for batches",
                "with accelerator.accumulate(model):",
            )
        if part.is_first:
            self._has_weighed = False
            self.forget_gradients()
        self._is_bare = self._has_stepped = False

    def before_backward(self, in_accumulate: bool) -> None:
        """Check, before a backward of ours, that the gradients of the batch's earlier parts are there and unchanged."""
        if self._has_stepped:
            self._refuse(
                "the loop takes several steps for each batch, and none comes before the last part",
                "loss = accelerator.forward_backward(loss_fn, batch)",
            )
        # Where the first parts left none, a strategy keeps them in another place.
        if self._has_weighed and self._left and all(parameter.grad is None for parameter in self._parameters()):
            self._refuse(
                "the gradients of the first parts are gone: the loop drops them in every round, as model.zero_grad() "
                "does",
                "optimizer.zero_grad()",
            )
        if any(gradient._version != version for gradient, version in self._left):
            self._refuse(
                "the gradients of the first parts were changed meanwhile, as torch.nn.utils.clip_grad_norm_ does",
                "accelerator.clip_grad_norm_(model.parameters(), max_norm)",
            )
        self._has_weighed = True
        self._is_bare |= not in_accumulate
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Stop watching the gradients, since they are about to change legitimately."""
        self._left = []

    def after_backward(self) -> None:
        """Remember the gradients as a backward of ours has left them."""
        gradients = [parameter.grad for parameter in self._parameters()]
        self._left = [(gradient, gradient._version) for gradient in gradients if gradient is not None]

    def deferred_step(self, closure: Any) -> None:
        """Note that a prepared optimizer was told to step; it waits for the batch's last part."""
        if closure is not None:
            self._refuse("the optimizer computes its losses itself (a closure), and would for the last part only", None)
        self._has_stepped = True

    def refuse_raw(self) -> None:
        """Refuse the step of a prepared optimizer with gradients of the program's own backward."""
        self._refuse(
            "the loop calls loss.backward() itself, so each part weighs like a whole batch",
            "accelerator.backward(loss)",
        )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check before the step of any optimizer; torch calls this.

        A prepared one steps with a batch's last part only.
        """
        if not self._is_innermost():
            return
        part, is_prepared = self._hand.part, any(one.optimizer is optimizer for one in self._prepared.optimizers)
        if not part.is_last and self._trains_with(optimizer):
            self._refuse(
                f"this {type(optimizer).__name__} is not prepared, so it steps after every part",
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        if is_prepared and not part.is_first and not self._has_weighed:
            self.refuse_raw()
        self._has_stepped |= is_prepared

    def _trains_with(self, optimizer: Optimizer) -> bool:
        ours = {id(parameter) for model in self._prepared.models for parameter in model.parameters()}
        ours |= {id(parameter) for parameter in self._parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def _parameters(self) -> Iterator[Tensor]:
        for prepared in self._prepared.optimizers:
            for group in prepared.param_groups:
                yield from group["params"]

    def _refuse(self, what: str, line: str | None) -> NoReturn:
        part = self._hand.part
        remedy = "Choose" if line is None else f"Write\n    {line}\nor choose"
        raise CannotCut(
            "memory ran out with whole batches, so each comes in parts now (in hand are samples "
            f"{part.start} to {part.stop} of {part.rows}), but {what}. {remedy} a smaller batch_size; --oom stop "
            "leaves batches whole."
        )


@contextmanager
def paced(prepared: Prepared, hand: Hand) -> Iterator[None]:
    """Let learning rates move at most once per batch while entered: each step uses the rate of the uncut run.

    This applies to schedulers of prepared optimizers, prepared themselves or not. Their class is replaced, and no
    attribute is set: an attribute would be part of their state_dict.
    """
    kinds = [(scheduler, type(scheduler)) for scheduler in _schedulers(prepared)]
    for scheduler, kind in kinds:
        scheduler.__class__ = _paced_kind(kind, hand)
    try:
        yield
    finally:
        for scheduler, kind in kinds:
            scheduler.__class__ = kind


def _schedulers(prepared: Prepared) -> list[LRScheduler]:
    """Return the schedulers of prepared optimizers.

    Unprepared ones are not known, so the process is searched: some 10 ms per loop.
    """
    known = {id(optimizer) for one in prepared.optimizers for optimizer in (one, one.optimizer)}
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), LRScheduler) and id(getattr(thing, "optimizer", None)) in known
    ]


def _paced_kind(kind: type[LRScheduler], hand: Hand) -> type[LRScheduler]:
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if hand.part.is_last:
            kind.step(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__, "__doc__": kind.__doc__})


class SplitWindow(Window):
    """Accumulation windows over batches in parts: a batch counts when its last part is current.

    Attributes:
        part: The current part; a whole batch in loops that are not cut.
        guard: The guard of the loop, where batches are really cut.
    """

    __slots__ = ("guard", "part")

    comes_in_parts = True

    def __init__(self, source: PreparedLoader, batches_left: int | None, rules: GradientAccumulationPlugin) -> None:
        super().__init__(source, batches_left, rules)
        self.part = BatchPart(None)
        self.guard: SplitLoopGuard | None = None

    def take(self, part: BatchPart) -> None:
        """Make `part` the current one."""
        if self.guard is not None:
            self.guard.next_part(part)
        self.part = part
        self.sync = part.is_last  # for loops without `accumulate`; with it, `advance` decides

    @property
    def has_more(self) -> bool:  # type: ignore[override]
        return not self.part.is_last

    @property
    def is_repeated(self) -> bool:  # type: ignore[override]
        return self.part.is_repeated

    @property
    def unfinished(self) -> int:
        return self.position + self.has_more

    def weighed(self, divisor: float, in_accumulate: bool) -> float:
        if self.guard is not None:
            self.guard.before_backward(in_accumulate)
        share = self.part.share
        return divisor / share if share else math.inf

    def after_backward(self) -> None:
        if self.guard is not None:
            self.guard.after_backward()

    def deferred_step(self, closure: Any) -> None:
        if self.guard is not None and self.has_more:
            self.guard.deferred_step(closure)

    def refuse_raw(self) -> None:
        if self.guard is not None:
            self.guard.refuse_raw()

    def real(self, samples: int, world_size: int) -> int:
        return self.part.real(samples, world_size) if self.part.rows else samples

    def held(self, samples: int | None) -> int | None:
        return self.part.stop - self.part.start if self.part.rows else samples

    def advance(self, steps: int, has_more: bool = False) -> float:
        if self.part.is_last and self.guard is not None:
            self.guard.forget_gradients()  # a window that turns out shorter than planned multiplies them
        return super().advance(steps, self.has_more)


class SplitBatches(WholeBatches):
    """Hands out the batches of training loops in parts, and those of other loops whole."""

    def __init__(self, prepared: Prepared, strategy: Strategy, parts: int) -> None:
        super().__init__(prepared, strategy, parts)
        # One stack for all loops: parts of two zipped loaders are not taken and returned in turn.
        self._held = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_held": ExitStack()}

    def window(
        self, source: PreparedLoader, batches_left: int | None, rules: GradientAccumulationPlugin, steps: int
    ) -> Window:
        window = SplitWindow(source, batches_left, rules)
        window.loop = self._report(source, steps)
        return window

    def over(self, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        return batches if self._obstacle(loader) else self._in_parts(loader, batches)

    def _in_parts(self, loader: PreparedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        accumulation, prepared, cut = loader.accumulation, self._prepared(), self._cut(loader)
        window: SplitWindow | None = None
        with ExitStack() as entered:
            entered.callback(batches.close)  # type: ignore[attr-defined]
            entered.callback(self._held.close)
            for batch in batches:
                if window is None:
                    window = self._enter(accumulation, prepared, entered)
                for part in cut.of(batch):
                    if accumulation.block is not None or accumulation.window is not window:
                        accumulation.take(window)
                    window.take(part)
                    self._hold(() if part.is_last else prepared.models)
                    if accumulation.block is not None:
                        accumulation.block.decide()
                    yield part.batch

    def _enter(self, accumulation: Accumulation, prepared: Prepared, entered: ExitStack) -> SplitWindow:
        """Return the window of a loop that has just got its first batch, and set its guard."""
        window = accumulation.window
        assert isinstance(window, SplitWindow)
        window.guard = entered.enter_context(SplitLoopGuard(prepared, window, lambda: accumulation.window is window))
        entered.enter_context(paced(prepared, window))
        return window

    def _hold(self, models: Sequence[Module]) -> None:
        """Hold back the gradients of `models`, and of these only."""
        self._held.close()
        for model in models:
            self._held.enter_context(self._strategy.within_window(model))
