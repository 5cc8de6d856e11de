"""LockStepEngine: runs a batch in micro-batches where every forward waits for all ranks (FSDP). Runs in ranks.

No rank can repeat a micro-batch alone here: it would gather parameters that its peers do not send. So all ranks run the
same number of micro-batches, and when one of them runs out of memory, all repeat the batch in more of them. The peers,
which wait in a gather, are woken outside of their process group (`GroupRecovery`), which is formed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from nbaccel.base.events import OutOfMemory, emit
from nbaccel.features.micro_batches.engine import OpenWindow, StepEngine, judge, mean_of_parts
from nbaccel.features.micro_batches.lent_gradients import Gradients, StepReport
from nbaccel.features.micro_batches.task import MicroBatch, MicroBatchTask, Shortage, Work
from nbaccel.features.retry.group_recovery import GroupRecovery
from nbaccel.train.distributed.process_group import process_group
from nbaccel.train.oom.memory.release import release_unused

__all__ = ["LockStepEngine"]

_CALL = "forward_backward"


class LockStepEngine(StepEngine):
    """Runs batches of sharded models in micro-batches that fit on all ranks, and repeats them on all ranks.

    Before each batch the ranks tell each other how many micro-batches they need; the most that one needs is what all
    of them run. After it they tell each other that they are done, so that no rank steps while another one repeats.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._said = StepReport()  # of all ranks, at the end of the batch before
        self._recovery: GroupRecovery | None = None
        self._has_listened = True  # a loss function may exchange values: all ranks repeat it together

    def _run(self, task: MicroBatchTask, gradients: Gradients) -> Tensor:
        if self._recovery is None:
            self._recovery = GroupRecovery(_CALL, self._strategy.device)
        if self._window.weight and gradients.were_zeroed:
            self._window = OpenWindow()
        recovery = self._recovery
        with recovery.watching(), ExitStack() as stack:
            for model in self.models:
                stack.enter_context(self._strategy.sync_in_backward(model))  # rows can be kept, whole gradients not
            try:
                return self._run_watched(task, gradients, recovery)
            except Exception as error:
                if not isinstance(error, _Judged):
                    recovery.fail(error)
                    raise
                judged = error.__cause__
        assert judged is not None, "an outcome has a reason"
        raise judged

    def _run_watched(self, task: MicroBatchTask, gradients: Gradients, recovery: GroupRecovery) -> Tensor:
        batch = _Batch(self, task, gradients)
        while True:
            try:
                shortage = batch.run()
            except Exception as error:
                if not recovery.is_consequence(error):
                    raise
                shortage = None
            else:
                if shortage is None:
                    return self._close(task, gradients, batch)
            # Every rank is in this batch: none has read that all are done, since this one is not.
            recovery.wake()
            batch.forget(shortage)
            recovery.regroup()
            self._collectives = process_group.talk or self._collectives
            self._strategy.abandon(self.models)
            self._strategy.rejoin(self.models)
            batch.restore()

    def _close(self, task: MicroBatchTask, gradients: Gradients, batch: _Batch) -> Tensor:
        """End the batch, and the window if it ends with it."""
        loss, weight = mean_of_parts(batch.losses, self._strategy.device)
        self._window.calls += 1
        self._window.batches += task.share
        self._window.weight += weight
        self.sizes.fitted(batch.work.count, batch.work.shapes)
        if task.ends_step:
            of_all = self._said.weight
            # A strategy that shards averages over the ranks, and this is a sum.
            factor = self._unit * self._strategy.world.world_size / of_all if of_all else 1.0
            gradients.close(factor)
            self._window = OpenWindow()
            if of_all:
                self._unit = of_all
        return loss

    def tell(self, when: str, numbers: list[float]) -> Tensor:
        """Return what each rank says, a row each. Collective.

        Args:
            when: In words.
        """
        said = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return self._collectives.tell(f"{_CALL}, {when} of step {self._clock.step}", said)


class _Judged(Exception):
    """An error that all ranks raise together, in a process group that is sound; its cause is what they raise."""


class _Batch:
    """One batch of this rank, which may have to be repeated."""

    work: Work

    def __init__(self, engine: LockStepEngine, task: MicroBatchTask, gradients: Gradients) -> None:
        self.losses: list[tuple[Tensor, float]] = []
        self._engine = engine
        self._task = task
        self._gradients = gradients
        self._error: Exception | None = None  # before anything was exchanged
        self._failed_size = 0
        self._is_last_try = self._is_unfit = False
        self._kept: Any = None
        try:
            self.work = task.read(engine._is_shifted)
            self._kept = gradients.keep() if engine._window.calls else None
            engine._at_start.take()
        except Exception as error:
            self._error = error

    def run(self) -> Shortage | None:
        """Run the batch once, on all ranks, in the same number of micro-batches. Return what was missing here."""
        engine, window = self._engine, self._engine._window
        parts = self._agree()
        if not window.calls:
            self._gradients.open()
        assert engine._recovery is not None
        engine._recovery.begin()
        for start, stop in self._slices(parts):
            self._failed_size = stop - start
            outcome, weight = self._run_part(start, stop)
            if isinstance(outcome, Shortage):
                return outcome
            self.losses.append((outcome, weight))
        weight = sum(weight for _, weight in self.losses)
        batches = window.batches + self._task.share
        mean = (window.weight + weight) / batches if batches else 0.0
        said = engine.tell("the end of a batch", list(StepReport(weight=mean).numbers))
        engine._said = StepReport(*said.sum(0).tolist())
        return None

    def _agree(self) -> int:
        """Return how many micro-batches all ranks run. Collective.

        Raises:
            _Judged: A rank cannot read its batch, or cannot run its smallest micro-batch.
        """
        engine = self._engine
        rank, is_broken = engine._strategy.world.rank, self._error is not None
        report = StepReport(
            weight=0.0 if is_broken or not engine._needs_unit() else self.work.weight,
            unfit=self._is_unfit,
            unfit_ranks=rank * self._is_unfit,
            failed=is_broken,
            failed_ranks=rank * is_broken,
        )
        said = engine.tell("the beginning of a batch", [*report.numbers, 1 if is_broken else self._wanted])
        of_all = StepReport(*said[:, :-1].sum(0).tolist())
        try:
            if self._error is not None:
                raise self._error
            judge(of_all, engine._strategy.world, engine._clock.step, engine._least)
        except Exception as error:
            raise _Judged from error
        if engine._needs_unit():
            engine._unit = of_all.weight or 1.0
        return int(said[:, -1].max())

    @property
    def _wanted(self) -> int:
        """Micro-batches that this rank needs."""
        work, sizes, least = self.work, self._engine.sizes, self._engine._least
        return -(-work.count // sizes.next_part(work.count, work.shapes, least)) if work.count else 1

    def _slices(self, parts: int) -> Iterator[tuple[int, int]]:
        """Yield the first and last sample of each micro-batch; empty ones at the end, for peers that have more."""
        count = self.work.count
        own = min(parts, max(1, count // self._engine._least)) if count else 0
        edges = [count * number // own for number in range(own + 1)] if own else [0]
        yield from itertools.pairwise(edges)
        yield from [(count, count)] * (parts - own)

    def _run_part(self, start: int, stop: int) -> tuple[Tensor | Shortage, float]:
        """Run the samples `start` to `stop`. Without any, run some again that do not count: the peers wait here."""
        engine, work = self._engine, self.work
        is_empty = start == stop
        micro_batch, weight = work.part(*((0, min(engine._least, work.samples.count)) if is_empty else (start, stop)))
        if is_empty:
            engine._at_part.take()
            weight = _no_weight
        elif stop - start < work.count:
            engine._warn_of_batch_norm(stop - start, work.count)
        part = MicroBatch(
            self._task.loss_fn,
            micro_batch,
            weight,
            engine._unit * self._task.divisor,
            engine._precision.scale,
            lambda: None,
            is_joint=True,
        )
        outcome = part.run()
        if is_empty:
            engine._at_part.restore()
        return outcome, weight()

    def forget(self, shortage: Shortage | None) -> None:
        """Drop what the batch has so far.

        Args:
            shortage: The shortage of this rank; None where it was woken.
        """
        engine, work = self._engine, self.work
        if shortage is None:
            release_unused()
            return
        size = self._failed_size
        next_size = engine.sizes.failed(size, work.shapes, engine._least)
        self._is_unfit = self._is_last_try and not next_size
        self._is_last_try = not next_size  # once more, after a thorough collection
        following = 0 if self._is_unfit else next_size or size
        emit(OutOfMemory(engine._clock.step, shortage.phase, size, following, work.count, shortage.message))
        release_unused(only_young=not self._is_last_try)

    def restore(self) -> None:
        """Bring back what the batch has found: gradients of the window, buffers, random generators."""
        self.losses.clear()
        self._engine._at_start.restore()
        self._gradients.restore(self._kept)


def _no_weight() -> float:
    """Return the weight of samples that run for the peers' sake only."""
    return 0.0
