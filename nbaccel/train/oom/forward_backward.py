"""Recovering: the user's step that survives running out of memory, on an `Accelerator`. Runs in ranks.

A few lines over the parts: the accumulation decides where the step ends, the `StepEngine` runs the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor

from nbaccel.events import reports
from nbaccel.train.faces.stepping import Stepping
from nbaccel.train.implicit import step_back
from nbaccel.train.oom.microbatch.engine import StepEngine
from nbaccel.train.oom.microbatch.sizes import MicroBatches
from nbaccel.train.oom.microbatch.slicing import Samples, SplitFunction
from nbaccel.train.oom.microbatch.task import LossFunction, MicroBatchTask
from nbaccel.train.oom.planning.planner import find_micro_batch_size

__all__ = [
    "Recovering",
]


class Recovering(Stepping):
    """The method `forward_backward`, and its state."""

    _engine: StepEngine | None
    _micro_batches: MicroBatches

    def forward_backward(
        self,
        loss_fn: LossFunction,
        batch: Any,
        weight: str | Callable[[Any], float] = "samples",
        *,
        micro_batch_size: int | Literal["auto"] | None = None,
        split_fn: SplitFunction | None = None,
        samples: int | None = None,
    ) -> Tensor:
        """Run forward and backward of `batch`, in micro-batches that fit into memory; the effective batch is the same.

        It replaces the forward and `backward`; clipping, accumulation, the optimizer and the scheduler
        do not change. A rank that runs out of memory continues in smaller micro-batches; its peers wait in the
        exchange of gradients, as they would in any case. Sizes grow back after 200 batches that fitted. Each rank
        has its own.

        loss_fn: ``loss_fn(micro_batch)`` runs the prepared model and returns the mean loss, one element. It is called
        once per micro-batch, again for those that did not fit; it changes nothing but random generators and buffers
        of the model, which are restored before a repetition. It may not wait for other ranks.
        weight: the units of that mean: "samples"; "tokens", the entries of ``batch["labels"]`` that are not -100
        (without the first of each sequence, where the model is a causal language model of transformers); or a function
        of a batch that counts its units. With it gradients are exact for any sizes: those of one step on all samples
        of all ranks at once, sum(w * grad) / sum(w).
        micro_batch_size: no micro-batch is larger. "auto": the first batch is used for a few trial steps, each rank
            for itself, which find the largest micro-batch that fits and are undone, as in `find_batch_size`.
        split_fn, samples: ``split_fn(batch, start, stop)`` and the number of samples, for batches other than tensors
        and arrays, all with the samples in the first dimension, in any nesting of tuples, lists, dicts, mappings and
        dataclasses. Numbers, strings and 0-d tensors are copied into every micro-batch.

        Returns the mean loss of this rank's batch, detached, as one forward of the whole batch would give it.
        Parameters that no rank used keep ``grad`` None. BatchNorm normalises each micro-batch by itself and counts each
        sample once; all ranks get rank 0's running statistics, as under DDP. The first call frees DDP's buckets and
        makes its own; a forward with gradients outside of `forward_backward` goes back to DDP. Collective where the
        batch ends a step.

        Raises:
            torch.OutOfMemoryError: the smallest micro-batch does not fit. On all ranks, if on one: where there are
            several, in the call that ends the accumulation window; until then that rank's calls return NaN.
            PeerFailed: `loss_fn` raised on another rank in this step. There: its own error, in that call.
                CannotSplit: the batch, or the model (SyncBatchNorm, FSDP), cannot be split.

        In none of these cases has a weight changed, and the next step works, begun on all ranks with the same batch.

        >>> import torch
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator()
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> batch = {"x": torch.ones(4, 2), "y": torch.zeros(4, 1)}
        >>> with accelerator.accumulate(model):
        ...     loss = accelerator.forward_backward(
        ...         lambda b: torch.nn.functional.mse_loss(model(b["x"]), b["y"]), batch
        ...     )
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        """
        step_back()
        if not self._is_ready:
            self._make_ready("forward_backward")
        accumulation = self._equipment.accumulation
        window = accumulation.window
        divided_by = accumulation.enter_backward()
        divisor = accumulation.counted.divisor if accumulation.depth else accumulation.steps
        ends_step = window.sync and not accumulation.is_held
        if micro_batch_size == "auto":
            if self._micro_batches.ceiling is None:
                self._plan_micro_batches(loss_fn, batch, split_fn, samples)
        elif micro_batch_size is not None:
            self._micro_batches.start_at(micro_batch_size)
        task = MicroBatchTask(
            loss_fn,
            batch,
            weight,
            split_fn,
            samples,
            divisor,
            share=divisor / divided_by,
            ends_step=ends_step,
            exchanges=not accumulation.is_local,
        )
        engine = self._step_engine()
        loss = engine.run(task)
        if not engine.is_unfit:
            reports.record_loss(self._equipment.watch.see(loss), accumulation.clock.step)
        if ends_step:
            accumulation.clock.train()
        return loss

    def _plan_micro_batches(
        self, loss_fn: LossFunction, batch: Any, split_fn: SplitFunction | None, samples: int | None
    ) -> None:
        """Find the starting size of this rank's micro-batches. Collective at the engine's first step only."""
        self._step_engine().prepare()
        size = find_micro_batch_size(
            loss_fn,
            lambda: Samples.of(batch, split_fn, samples),
            self._equipment.prepared.models,
            [prepared.optimizer for prepared in self._equipment.prepared.optimizers],
            self._equipment.strategy,
        )
        if size is not None:
            self._micro_batches.start_at(size)

    def _step_engine(self) -> StepEngine:
        """Return the engine of the models that are prepared now."""
        engine = self._engine
        if engine is None or len(engine.models) != len(self._equipment.prepared.models):
            if engine is not None:
                engine.release()
            engine = self._engine = StepEngine(
                self._equipment.prepared.models,
                self._equipment.strategy,
                self._equipment.precision,
                self.collectives,
                self._equipment.accumulation.clock,
                self._micro_batches,
            )
        return engine

    def _release_engine(self) -> None:
        """Free the memory of the engine's gradients."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.release()
