"""StepEngine: leads one step through its micro-batches, on every rank, whatever runs out of memory. Runs in ranks.

The invariant: every rank issues the same collectives in every attempt of every step, whatever happens locally.
  - Out of memory before gradients were sent is this rank's own affair: it goes on in smaller micro-batches, and its
    peers wait in the sums that they would wait in anyway.
  - After gradients were sent, the rank finishes the sequence and says so in it; all ranks repeat the batch, and
    nobody has stepped.
  - A rank whose smallest micro-batch does not fit, or whose program raised, finishes the sequence too: all ranks
    raise in the same step.
The engine holds no optimizer, counts no windows, and knows no Accelerator.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from nbaccel.errors import PeerFailed
from nbaccel.events import OutOfMemory, emit
from nbaccel.train.accumulation import StepClock
from nbaccel.train.memory import release_unused
from nbaccel.train.microbatch.gradients import Gradients, Report
from nbaccel.train.microbatch.sizes import MicroBatches, Shapes
from nbaccel.train.microbatch.slicing import Samples, sample_shapes
from nbaccel.train.microbatch.snapshot import Snapshot
from nbaccel.train.microbatch.task import Part, Shortage, Task
from nbaccel.train.microbatch.weights import Weights, shifts_labels
from nbaccel.train.precision import Precision
from nbaccel.train.strategies import Strategy
from nbaccel.train.talk.collectives import Collectives

__all__ = ["StepEngine"]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What came of running a batch once on this rank.

    loss: the batch's mean loss.  weight: of the samples that took part.
    needs_repeat: gradients that were sent are wrong, so all ranks repeat the batch.
    too_large: why not even the smallest micro-batch fits; empty where all is well.
    """

    loss: Tensor
    weight: float
    needs_repeat: bool = False
    too_large: str = ""


@dataclass(slots=True)
class _Window:
    """What the open accumulation window holds of this rank: calls, batches (parts of batches count as such), weight."""

    calls: int = 0
    batches: float = 0.0
    weight: float = 0.0

    def with_weight(self, weight: float) -> float:
        """The weight of one batch, on average, once a batch of `weight` has been added."""
        return (self.weight + weight) / self.batches if self.batches else 0.0


class StepEngine:
    """Runs batches of `models` in micro-batches that fit, and exchanges gradients at the end of each window.

    sizes: which micro-batches fit on this rank; a planner may set where they start.
    """

    def __init__(
        self,
        models: Sequence[Module],
        strategy: Strategy,
        precision: Precision,
        collectives: Collectives,
        clock: StepClock,
        sizes: MicroBatches | None = None,
    ) -> None:
        self.models = list(models)
        self.sizes = sizes or MicroBatches()
        self._strategy = strategy
        self._precision = precision
        self._collectives = collectives
        self._clock = clock
        self._gradients: Gradients | None = None
        self._overlaps = True
        self._window = _Window()
        self._unit = 0.0  # weight by which losses are scaled; alike on all ranks
        self._has_warned = False

    def run(self, task: Task) -> Tensor:
        """One batch forward and backward; the mean loss of this rank's samples, detached.

        Collective where the task ends a step. After it, gradients are those of all ranks' samples.

        Raises:
            torch.OutOfMemoryError: the smallest micro-batch does not fit, on this rank or another one.
            PeerFailed: another rank raised in this step.
        """
        gradients = self._take_gradients()
        try:
            return self._run(task, gradients)
        except BaseException:
            self._window = _Window()
            gradients.discard()
            raise

    def prepare(self) -> None:
        """Take the gradients over, as the first `run` would. Collective then."""
        self._take_gradients()

    def release(self) -> None:
        """Give the gradients back; the next `run` takes them again. What fits is remembered."""
        gradients, self._gradients = self._gradients, None
        if gradients is not None and not gradients.is_released:
            gradients.discard()
            gradients.release()

    # -- one batch

    def _run(self, task: Task, gradients: Gradients) -> Tensor:
        window = self._window
        with self._telling_peers(task, gradients):
            samples, weights = self._read(task, gradients)
            kept = gradients.keep() if window.calls else None
            self._at_start.take()
        window.calls += 1
        window.batches += task.share
        overlaps = self._overlaps and task.ends_step and task.exchanges
        while True:
            gradients.begin()
            with self._telling_peers(task, gradients):
                attempt = self._attempt(task, samples, weights, gradients, kept, overlaps)
            weight = window.with_weight(attempt.weight)
            if not (task.ends_step or attempt.too_large):
                break
            said = self._exchange(task, gradients, self._report(attempt, weight))
            weight = said.weight
            if not said.poisoned:
                break
            overlaps = False
            self._at_start.restore()
            gradients.restore(kept)
        window.weight += attempt.weight
        self.sizes.fitted(samples.count, _shapes(samples))
        if task.ends_step:
            gradients.close(self._unit / weight if weight else 1.0)
            self._window = _Window()
            if task.exchanges and weight:
                self._unit = weight
        return attempt.loss

    def _read(self, task: Task, gradients: Gradients) -> tuple[Samples, Weights]:
        """The task's samples and weights; a window is opened by its first batch, also where that cannot be read."""
        expected = 0.0
        try:
            samples, weights = task.read(self._is_shifted)
            if self._needs_unit():
                expected = weights.of(0, samples.count, samples.batch)
        finally:
            if not self._window.calls:
                self._open_window(gradients, expected)
        return samples, weights

    @contextmanager
    def _telling_peers(self, task: Task, gradients: Gradients) -> Iterator[None]:
        """What this rank does alone. Should it raise, the peers are told, in the exchange in which they wait for it."""
        try:
            yield
        except Exception:
            if task.exchanges and gradients.has_peers:
                self._report_failure(gradients)
            raise

    def _attempt(
        self, task: Task, samples: Samples, weights: Weights, gradients: Gradients, kept: object, overlaps: bool
    ) -> _Attempt:
        """Run the whole batch, in parts as large as fit; alone, without a word to other ranks."""
        shapes = _shapes(samples)
        losses: list[tuple[Tensor, float]] = []
        done = 0
        is_last_try = False
        while done < samples.count and task.share:
            size = self.sizes.next_part(samples.count - done, shapes, self._least)
            if done:
                self._at_part.take()
            if size < samples.count:
                self._warn_of_batch_norm(size, samples.count)
            outcome, weight = self._run_part(task, samples, weights, gradients, done, size, overlaps, shapes)
            if isinstance(outcome, Tensor):
                self.sizes.prove(size, shapes)
                losses.append((outcome, weight))
                done += size
                if gradients.is_torn:
                    self._overlaps = False  # for good: this model completes gradients twice
                    return _Attempt(outcome, weight, needs_repeat=True)
                continue
            next_size = self.sizes.failed(size, shapes, self._least)
            emit(OutOfMemory(self._clock.step, outcome.phase, size, next_size, samples.count, outcome.message))
            is_last_try, gives_up = not next_size, is_last_try and not next_size
            release_unused(only_young=not is_last_try)
            if gives_up or gradients.has_launched:
                too_large = f"{_samples(size)} of {samples.count}: {outcome.message}" if gives_up else ""
                return _Attempt(torch.zeros(()), 0.0, needs_repeat=not gives_up, too_large=too_large)
            if outcome.phase == "forward":  # gradients of the parts before are complete
                (self._at_part if done else self._at_start).restore()
                continue
            self._at_start.restore()
            gradients.restore(kept)
            losses.clear()
            done = 0
        return _Attempt(*_mean(losses, self._strategy.device))

    def _run_part(
        self,
        task: Task,
        samples: Samples,
        weights: Weights,
        gradients: Gradients,
        start: int,
        size: int,
        overlaps: bool,
        shapes: Shapes,
    ) -> tuple[Tensor | Shortage, float]:
        """Samples from `start` on: their mean loss and their weight."""
        micro_batch = samples.take(start, start + size)
        weight = weights.of(start, start + size, micro_batch)
        if weight == 0:  # a mean over nothing, which is NaN, has no say
            return torch.zeros((), device=self._strategy.device), 0.0
        is_last = start + size == samples.count
        sends_early = overlaps and is_last and self.sizes.is_proven(size, shapes)
        part = Part(
            task.loss_fn,
            micro_batch,
            weight / (self._unit * task.divisor),
            self._precision.scale,
            gradients.overlap if sends_early else _nothing,
        )
        gradients.is_busy = True
        try:
            return part.run(), weight
        finally:
            gradients.is_busy = False

    # -- what the ranks tell each other

    def _report(self, attempt: _Attempt, weight: float) -> Report:
        rank = self._strategy.world.rank
        is_unfit = bool(attempt.too_large)
        return Report(
            weight=weight,
            poisoned=float(attempt.needs_repeat),
            unfit=float(is_unfit),
            unfit_ranks=float(rank * is_unfit),
        )

    def _exchange(self, task: Task, gradients: Gradients, report: Report) -> Report:
        said = gradients.exchange(report) if task.exchanges else report
        if said.failed:
            raise PeerFailed(
                f"{self._who(said.failed, said.failed_ranks)} failed in step {self._clock.step}, with an error of its "
                f"own; {self._here()} had no part in it. The weights are as before this step."
            )
        if said.unfit:
            raise torch.OutOfMemoryError(
                f"out of memory in step {self._clock.step}: {self._who(said.unfit, said.unfit_ranks)} cannot run "
                f"forward and backward on {_samples(self._least)}, the smallest micro-batch. The weights are as before "
                "this step.\n  Free memory (accelerator.free_memory()), recompute activations "
                "(accelerator.gradient_checkpointing(model)), or take a smaller model or shorter samples."
            )
        return said

    def _report_failure(self, gradients: Gradients) -> None:
        report = Report(failed=1.0, failed_ranks=float(self._strategy.world.rank))
        if not gradients.has_launched:
            gradients.begin()
        try:
            gradients.exchange(report)
        except Exception as error:  # the peers are gone: this rank's own error is the one to raise
            warnings.warn(f"the other ranks could not be told of an error in {self._here()}: {error}", stacklevel=2)

    def _who(self, count: float, ranks: float) -> str:
        world_size = self._strategy.world.world_size
        return f"rank {int(ranks)} of {world_size}" if count == 1 else f"{int(count)} of {world_size} ranks"

    def _here(self) -> str:
        world = self._strategy.world
        return f"rank {world.rank} of {world.world_size}"

    # -- gradients

    def _take_gradients(self) -> Gradients:
        gradients = self._gradients
        if gradients is not None and not (gradients.is_released or gradients.are_outgrown):
            return gradients
        if gradients is not None:
            self.release()
        gradients = self._gradients = self._strategy.lend_gradients(self.models, self._collectives)
        models = [self._strategy.unwrap(model) for model in self.models]
        buffers = [buffer for model in models for buffer in model.buffers()]
        self._at_start = Snapshot(buffers, self._strategy.device)
        self._at_part = Snapshot(buffers, self._strategy.device)
        self._strategy.recovers = True
        self._norms = [
            module for model in gradients.models for module in model.modules() if isinstance(module, _BatchNorm)
        ]
        self._is_shifted = shifts_labels(gradients.models)
        return gradients

    def _needs_unit(self) -> bool:
        """Whether the weight of the next batch becomes the unit."""
        return not self._window.calls and not (self._unit and self._strategy.has_peers)

    def _open_window(self, gradients: Gradients, expected: float) -> None:
        """Begin a window whose first batch has the weight `expected`. Collective at the very first one.

        Losses are scaled by the weight of all ranks' batches, as it was one step ago, so that gradients have about
        their true size: sums over tokens would overflow in fp16.
        """
        if self._needs_unit():
            self._unit = float(self._collectives.reduce(torch.tensor(expected, dtype=torch.float64))) or 1.0
        gradients.open()

    @property
    def _least(self) -> int:
        """The smallest micro-batch: BatchNorm refuses to normalise a single value while it trains."""
        return 2 if any(norm.training for norm in self._norms) else 1

    def _warn_of_batch_norm(self, size: int, count: int) -> None:
        if self._least == 1 or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"batches of {count} run in micro-batches of {size} on {self._here()}, and this model has BatchNorm "
            "layers: each micro-batch is normalised by its own statistics, so the numbers are not quite those of whole "
            "batches. GroupNorm and LayerNorm have no such difference.",
            stacklevel=6,
        )


def _nothing() -> None:
    """The backward of a part that sends nothing."""


def _shapes(samples: Samples) -> Shapes:
    """What memory depends on, beside the number of samples; nothing, where only the user knows what a sample is."""
    return sample_shapes(samples.batch) if samples.split is None else ()


def _samples(count: int) -> str:
    return f"{count} sample{'s' if count != 1 else ''}"


def _mean(losses: Sequence[tuple[Tensor, float]], device: torch.device) -> tuple[Tensor, float]:
    """The weighted mean of some losses and their weight; of one loss, the loss itself."""
    total = sum(weight for _, weight in losses)
    if len(losses) == 1:
        return losses[0]
    if not total:
        return torch.zeros((), device=device), 0.0
    values = torch.stack([loss.reshape(()) for loss, _ in losses])
    shares = torch.tensor([weight / total for _, weight in losses], dtype=values.dtype, device=values.device)
    return (values * shares).sum(), total
