"""StepRecovery: the part of an Accelerator whose steps survive running out of memory. Runs in ranks.

The accumulation decides where the step ends, the `StepEngine` runs the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from nbaccel.features import feature
from nbaccel.features.micro_batches.engine import StepEngine
from nbaccel.features.micro_batches.sizes import MicroBatches
from nbaccel.features.micro_batches.task import LossFunction, MicroBatchTask
from nbaccel.train.oom.microbatch.slicing import Samples, SplitFunction
from nbaccel.train.prepare.training_context import TrainingContext

__all__ = [
    "StepRecovery",
]


class StepRecovery:
    """Runs batches in micro-batches that fit, by a `StepEngine` that it makes when needed. A part of the Accelerator.

    Attributes:
        sizes: Micro-batch sizes that fit on this rank.
    """

    def __init__(self, context: TrainingContext) -> None:
        self.sizes = MicroBatches()
        self._context = context
        self._engine: StepEngine | None = None

    def begin(
        self,
        loss_fn: LossFunction,
        batch: Any,
        weight: str | Callable[[Any], float],
        micro_batch_size: int | Literal["auto"] | None,
        split_fn: SplitFunction | None,
        samples: int | None,
    ) -> tuple[StepEngine, MicroBatchTask]:
        """Return the engine and the task to run; see `Accelerator.forward_backward`, which runs it."""
        accumulation = self._context.accumulation
        window = accumulation.window
        divided_by = accumulation.enter_backward()
        divisor = accumulation.counted.divisor if accumulation.depth else accumulation.steps
        ends_step = window.sync and not accumulation.is_held
        expected = None if window.source is None else window.held(window.source.rank_samples)
        if micro_batch_size == "auto":
            if self.sizes.ceiling is None:
                self._plan_micro_batches(loss_fn, lambda: Samples.of(batch, split_fn, samples, expected))
        elif micro_batch_size is not None:
            self.sizes.start_at(micro_batch_size)
        task = MicroBatchTask(
            loss_fn,
            batch,
            weight,
            split_fn,
            samples,
            expected,
            divisor,
            share=divisor / divided_by,
            ends_step=ends_step,
            exchanges=not accumulation.is_local,
        )
        return self._step_engine(), task

    def _plan_micro_batches(self, loss_fn: LossFunction, read: Callable[[], Samples]) -> None:
        """Find the starting size of this rank's micro-batches. Collective at the engine's first step only."""
        find_micro_batch_size = feature("Accelerator.forward_backward(micro_batch_size='auto')")
        self._step_engine().prepare()
        size = find_micro_batch_size(
            loss_fn,
            read,
            self._context.prepared.models,
            [prepared.optimizer for prepared in self._context.prepared.optimizers],
            self._context.strategy,
        )
        if size is not None:
            self.sizes.start_at(size)

    def _step_engine(self) -> StepEngine:
        """Return the engine of the models that are prepared now."""
        engine = self._engine
        if engine is None or len(engine.models) != len(self._context.prepared.models):
            if engine is not None:
                engine.release()
            engine = self._engine = self._kind(
                self._context.prepared.models,
                self._context.strategy,
                self._context.precision,
                self._context.collectives,
                self._context.accumulation.clock,
                self.sizes,
            )
        return engine

    @property
    def _kind(self) -> type[StepEngine]:
        if not self._context.strategy.forwards_are_collective:
            return StepEngine
        from nbaccel.features.micro_batches.lock_step import LockStepEngine  # with what wakes peers: not for everybody

        return LockStepEngine

    def release(self) -> None:
        """Free the memory of the engine's gradients."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.release()

    def leave(self) -> None:
        """Forget the engine without touching its memory, which another process has."""
        self._engine = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_engine": None}
