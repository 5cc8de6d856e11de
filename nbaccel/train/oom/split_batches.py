"""Gates: hand the batches of prepared loaders to a training loop, whole or in parts. Run in ranks.

After a run that ran out of memory the launcher starts it again with `RunSettings.split`, and `SplitBatches` hands out
every batch of a training loop in that many parts. The loop's body runs once per part. What happens once per batch
waits for the last part: synchronising gradients, the optimizer's step and `zero_grad`, schedulers, the count of
`accumulate`. A backward is weighted by its part's share of the samples, so the gradients are those of the whole
batch.

What a loop does without the `Accelerator` does not wait; see `bypass`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from nbaccel.base.events import LoopEntered
from nbaccel.train.data.loader import PreparedLoader
from nbaccel.train.oom.microbatch.slicing import BatchCut, BatchPart
from nbaccel.train.oom.split_guard import SplitLoopGuard, paced
from nbaccel.train.prepare.prepared import Prepared
from nbaccel.train.step.accumulation import Accumulation, Gate, GradientAccumulationPlugin, Window
from nbaccel.train.strategies import Strategy

__all__ = [
    "SplitBatches",
    "SplitWindow",
    "WholeBatches",
    "make_gate",
]


class WholeBatches(Gate):
    """Hands out batches as they are, and reports of each loop what can be cut in it.

    What was prepared refers to this gate, so the gate refers to it weakly: a model is freed when the program drops it.
    """

    def __init__(self, prepared: Prepared, strategy: Strategy, parts: int = 1) -> None:
        self._prepared_of = weakref.ref(prepared)
        self._strategy = strategy
        self._parts = parts

    def window(
        self, source: PreparedLoader, batches_left: int | None, rules: GradientAccumulationPlugin, steps: int
    ) -> Window:
        window = Window(source, batches_left, rules)
        window.loop = self._report(source, steps)
        return window

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_prepared_of": self._prepared()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _prepared_of=weakref.ref(state["_prepared_of"]))

    def _prepared(self) -> Prepared:
        """Return what the Accelerator prepared; nothing if that is gone."""
        return self._prepared_of() or Prepared()

    def _report(self, loader: PreparedLoader, steps: int) -> LoopEntered:
        obstacle, cut = self._obstacle(loader), self._cut(loader)
        if not obstacle and cut.part_size == 1:
            obstacle = "its batches, or the parts of them, are single samples already"
        return LoopEntered(
            samples=loader.rank_batch_size,
            parts=cut.parts,
            batches_per_step=steps,
            obstacle=obstacle,
            batch_norms=[] if obstacle else _batch_norms(self._prepared().models),
        )

    def _obstacle(self, loader: PreparedLoader) -> str:
        """Return why batches of an iteration that begins now are handed out whole; empty if they can be cut.

        A model in evaluation mode shows that the loop does not train, even where gradients are on: many loops turn
        them off around the forward only.
        """
        prepared = self._prepared()
        if not prepared.optimizers:
            return "no optimizer is prepared, so none would wait for the last part of a batch"
        if not torch.is_grad_enabled() or not any(model.training for model in prepared.models or [torch.nn.Identity()]):
            return "the loop does not train, and an evaluation is not cut (give its loader a smaller batch_size)"
        return ""

    def _cut(self, loader: PreparedLoader) -> BatchCut:
        is_level = not (loader.world.is_distributed and loader.may_be_uneven)
        return BatchCut(self._parts, loader.rank_batch_size, is_level)


class SplitWindow(Window):
    """Accumulation windows over batches in parts: a batch counts when its last part is current.

    part: the current part; a whole batch in loops that are not cut.
    guard: the guard of the loop, where batches are really cut.
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


def make_gate(split: int | None, prepared: Prepared, strategy: Strategy) -> Gate:
    """Return the gate of a run. split: parts of each batch of a training loop; None and 1 for whole ones."""
    if split is None or split == 1:
        return WholeBatches(prepared, strategy)
    return SplitBatches(prepared, strategy, split)


def _batch_norms(models: Iterable[Module]) -> list[str]:
    """Return the names of layers in training mode that compute with the statistics of a batch."""
    return [
        name.removeprefix("module.")
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    ]
