"""Run one step in micro-batches, on every rank, whatever runs out of memory. Runs in ranks.

The invariant: every rank issues the same collectives in every attempt of every step, whatever happens locally; see
`StepEngine`. After the exchange of a step all ranks read the same sums, so that all of them come to the same outcome
(`judge`). A loss function must not wait for peers, since one rank alone may repeat it (`forbid_collectives`). The
engine holds no optimizer, counts no windows, and knows no Accelerator.

Reasons: docs/design/out-of-memory.md
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from nbaccel.base.events import OutOfMemory, emit
from nbaccel.base.quantised import base_of
from nbaccel.base.world import World
from nbaccel.errors import CannotSplit, PeerFailed
from nbaccel.features.micro_batches.lent_gradients import Gradients, StepReport
from nbaccel.features.micro_batches.loss_weights import shifts_labels
from nbaccel.features.micro_batches.sizes import MicroBatches
from nbaccel.features.micro_batches.snapshot import ForwardSnapshot
from nbaccel.features.micro_batches.task import MicroBatch, MicroBatchTask, Shortage, Work
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.oom.memory.release import release_unused
from nbaccel.train.step.accumulation import StepClock
from nbaccel.train.step.precision import Precision
from nbaccel.train.strategies import Strategy

__all__ = [
    "OpenWindow",
    "StepEngine",
    "forbid_collectives",
    "judge",
    "mean_of_parts",
]


class _Attempt(NamedTuple):
    """Result of running a batch once on this rank.

    Args:
        loss: The batch's mean loss.
        weight: The weight of the samples that took part.
        needs_repeat: Gradients that were sent are wrong, so all ranks repeat the batch.
        is_unfit: Not even the smallest micro-batch fits.
    """

    loss: Tensor
    weight: float
    needs_repeat: bool = False
    is_unfit: bool = False


def _unfit() -> _Attempt:
    """Return the result of a batch that has no loss."""
    return _Attempt(torch.full((), math.nan, device="cpu"), 0.0, is_unfit=True)


@dataclass(slots=True)
class OpenWindow:
    """Contents of the open accumulation window on this rank: calls, batches (parts count as fractions), weight.

    Args:
        is_unfit: A batch of it did not fit. Peers are told at its end, where they exchange, so all raise in the same
            call.
    """

    calls: int = 0
    batches: float = 0.0
    weight: float = 0.0
    is_unfit: bool = False

    def with_weight(self, weight: float) -> float:
        """Return the average weight of a batch, once a batch of `weight` has been added."""
        return (self.weight + weight) / self.batches if self.batches else 0.0


# Ranks that repeat alone leave the others in a sum: https://github.com/mosaicml/composer/pull/1319.
class StepEngine:
    """Runs batches of `models` in micro-batches that fit, and exchanges gradients at the end of each window.

    Every rank issues the same collectives in every attempt of every step, whatever happens locally.

    - Out of memory before gradients were sent concerns this rank alone: it continues in smaller micro-batches, and its
      peers wait in the sums in which they would wait anyway.
    - After gradients were sent, the rank finishes the sequence and reports it there; all ranks repeat the batch, and no
      rank has stepped.
    - A rank whose smallest micro-batch does not fit, or whose program raised, finishes the sequence too: all ranks
      raise in the same step.

    Args:
        sizes: Micro-batch sizes that fit on this rank; a planner may set where they start.
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
        self._window = OpenWindow()
        self._unit = 0.0  # weight by which losses are scaled; equal on all ranks
        self._has_warned = False
        self._has_listened = not strategy.has_peers  # the first forward was watched for collectives

    def run(self, task: MicroBatchTask) -> Tensor:
        """Run one batch forward and backward; return the mean loss of this rank's samples, detached.

        Collective where the task ends a step. After it, gradients are those of all ranks' samples.

        Raises:
            torch.OutOfMemoryError: The smallest micro-batch does not fit, on this rank or another one.
            PeerFailed: Another rank raised in this step.
        """
        gradients = self._take_gradients()
        try:
            return self._run(task, gradients)
        except BaseException:
            self._window = OpenWindow()
            gradients.discard()
            raise

    def prepare(self) -> None:
        """Take over the gradients, as the first `run` would. Collective then."""
        self._take_gradients()

    def release(self) -> None:
        """Return the gradients to their owner; the next `run` takes them again. Sizes that fit are remembered."""
        gradients, self._gradients = self._gradients, None
        if gradients is not None and not gradients.is_released:
            gradients.discard()
            gradients.release()

    # -- one batch

    def _run(self, task: MicroBatchTask, gradients: Gradients) -> Tensor:
        if (self._window.weight or self._window.is_unfit) and gradients.were_zeroed:
            self._window = OpenWindow()
        window = self._window
        with self._telling_peers(task, gradients):
            work = self._read(task, gradients)
            kept = gradients.keep() if window.calls else None
            self._at_start.take()
        window.calls += 1
        window.batches += task.share
        overlaps = self._overlaps and task.ends_step and task.exchanges
        while True:
            gradients.begin()
            with self._telling_peers(task, gradients):
                attempt = _unfit() if window.is_unfit else self._attempt(work, gradients, kept, overlaps)
            window.is_unfit = attempt.is_unfit and task.exchanges and gradients.has_peers
            if window.is_unfit and not task.ends_step:
                return attempt.loss
            weight = window.with_weight(attempt.weight)
            if not (task.ends_step or attempt.is_unfit):
                break
            said = self._exchange(task, gradients, self._report(attempt, weight))
            weight = said.weight
            if not said.poisoned:
                break
            overlaps = False
            self._at_start.restore()
            gradients.restore(kept)
        window.weight += attempt.weight
        self.sizes.fitted(work.count, work.shapes)
        if task.ends_step:
            gradients.close(self._unit / weight if weight else 1.0)
            self._window = OpenWindow()
            if task.exchanges and weight:
                self._unit = weight
        return attempt.loss

    def _read(self, task: MicroBatchTask, gradients: Gradients) -> Work:
        """Return the task's samples and weights; its first batch opens a window, even if it cannot be read."""
        expected = 0.0
        try:
            work = task.read(self._is_shifted)
            if self._needs_unit():
                expected = work.weight
        finally:
            if not self._window.calls:
                self._open_window(gradients, expected)
        return work

    def _attempt(self, work: Work, gradients: Gradients, kept: object, overlaps: bool) -> _Attempt:
        """Run the whole batch, in the largest parts that fit; alone, without communication."""
        losses: list[tuple[Tensor, float]] = []
        done = 0
        is_last_try = False
        while done < work.count:
            size = self.sizes.next_part(work.count - done, work.shapes, self._least)
            if done:
                self._at_part.take()
            outcome, weight = self._run_part(work, gradients, done, done + size, overlaps)
            if isinstance(outcome, Tensor):
                self.sizes.prove(size, work.shapes)
                losses.append((outcome, weight))
                done += size
                continue
            next_size = self.sizes.failed(size, work.shapes, self._least)
            gives_up = is_last_try and not next_size
            is_last_try = not next_size  # once more, after a thorough collection
            following = 0 if gives_up else next_size or size
            emit(OutOfMemory(self._clock.step, outcome.phase, size, following, work.count, outcome.message))
            release_unused(only_young=not is_last_try)
            if gives_up:
                return _unfit()
            if gradients.has_launched:
                return _Attempt(torch.zeros((), device="cpu"), 0.0, needs_repeat=True)
            if outcome.phase == "forward":  # gradients of the parts before are complete
                (self._at_part if done else self._at_start).restore()
                continue
            self._at_start.restore()
            gradients.restore(kept)
            losses.clear()
            done = 0
        if gradients.is_torn:
            self._overlaps = False  # permanently: this model completes gradients twice
        return _Attempt(*mean_of_parts(losses, self._strategy.device), needs_repeat=gradients.is_torn)

    def _run_part(
        self, work: Work, gradients: Gradients, start: int, stop: int, overlaps: bool
    ) -> tuple[Tensor | Shortage, float]:
        """Run the samples `start` to `stop` forward and backward; return their mean loss and their weight."""
        task = work.task
        if stop - start < work.count:
            self._warn_of_batch_norm(stop - start, work.count)
        micro_batch, weight = work.part(start, stop)
        if work.weights.is_known and weight() == 0:  # no forward is needed
            return torch.zeros((), device=self._strategy.device), 0.0
        sends_early = overlaps and stop == work.count and self.sizes.is_proven(stop - start, work.shapes)
        part = MicroBatch(
            task.loss_fn if self._has_listened else forbid_collectives(task.loss_fn),
            micro_batch,
            weight,
            self._unit * task.divisor,
            self._precision.scale,
            gradients.overlap if sends_early else _nothing,
        )
        self._has_listened = True
        gradients.is_busy = True
        try:
            return part.run(), weight()
        finally:
            gradients.is_busy = False

    # -- reports between the ranks

    def _report(self, attempt: _Attempt, weight: float) -> StepReport:
        return StepReport(
            weight=weight,
            poisoned=attempt.needs_repeat,
            unfit=attempt.is_unfit,
            unfit_ranks=self._strategy.world.rank * attempt.is_unfit,
        )

    def _exchange(self, task: MicroBatchTask, gradients: Gradients, report: StepReport) -> StepReport:
        """Return what all ranks report, or raise their error. Collective where the window's gradients are exchanged."""
        said = gradients.exchange(report) if task.exchanges else report
        judge(said, self._strategy.world, self._clock.step, self._least)
        return said

    @contextmanager
    def _telling_peers(self, task: MicroBatchTask, gradients: Gradients) -> Iterator[None]:
        """Run a block without communication. If it raises, tell the peers, in the exchange in which they wait."""
        try:
            yield
        except Exception:
            if task.exchanges and gradients.has_peers:
                self._report_failure(gradients)
            raise

    def _report_failure(self, gradients: Gradients) -> None:
        world = self._strategy.world
        if not gradients.has_launched:
            gradients.begin()
        try:
            gradients.exchange(StepReport(failed=1, failed_ranks=world.rank))
        except Exception as error:  # the peers have left: raise this rank's own error
            warnings.warn(f"the other ranks could not be told of an error in {world.place}: {error}", stacklevel=2)

    # -- gradients

    def _take_gradients(self) -> Gradients:
        gradients = self._gradients
        if gradients is not None and not (gradients.is_released or gradients.are_outgrown):
            return gradients
        if gradients is not None:
            self.release()
        gradients = self._gradients = self._strategy.lend_gradients(self.models, self._collectives)
        models = [self._strategy.unwrap(model) for model in self.models]
        bases = map(base_of, models)
        buffers = [
            buffer
            for model, base in zip(models, bases, strict=True)
            for name, buffer in model.named_buffers()
            if name not in base
        ]
        self._at_start = ForwardSnapshot(buffers, self._strategy.device)
        self._at_part = ForwardSnapshot(buffers, self._strategy.device)
        self._strategy.recovers = True
        self._norms = [
            module for model in gradients.models for module in model.modules() if isinstance(module, _BatchNorm)
        ]
        self._is_shifted = shifts_labels(gradients.models)
        return gradients

    def _needs_unit(self) -> bool:
        """Return whether the weight of the next batch becomes the unit."""
        return not self._window.calls and not (self._unit and self._strategy.has_peers)

    def _open_window(self, gradients: Gradients, expected: float) -> None:
        """Begin a window whose first batch has the weight `expected`. Collective for the very first window.

        Losses are scaled by the weight of all ranks' batches, as it was one step ago, so that gradients have about
        their true size: sums over tokens would overflow in fp16.
        """
        if self._needs_unit():
            self._unit = (
                float(self._collectives.reduce(torch.tensor(expected, dtype=torch.float64, device="cpu"))) or 1.0
            )
        gradients.open()

    @property
    def is_unfit(self) -> bool:
        """True if a batch of the open window did not fit: its loss is NaN, and the window will end with an error."""
        return self._window.is_unfit

    @property
    def _least(self) -> int:
        """The smallest micro-batch: BatchNorm refuses to normalise a single value in training."""
        return 2 if any(norm.training for norm in self._norms) else 1

    def _warn_of_batch_norm(self, size: int, count: int) -> None:
        if self._least == 1 or self._has_warned:
            return
        self._has_warned = True
        where = self._strategy.world.place
        warnings.warn(
            f"batches of {count} run in micro-batches of {size} on {where}, and this model has BatchNorm layers: each "
            "micro-batch is normalised by its own statistics, so the numbers are not quite those of whole batches. "
            "GroupNorm and LayerNorm have no such difference.",
            stacklevel=7,  # the line that calls forward_backward
        )


def _nothing() -> None:
    """Do nothing: the backward of this part sends no gradients."""


def mean_of_parts(losses: Sequence[tuple[Tensor, float]], device: torch.device) -> tuple[Tensor, float]:
    """Return the weighted mean of some losses and their weight; of one loss, the loss itself."""
    total = sum(weight for _, weight in losses)
    if len(losses) == 1:
        return losses[0]
    if not total:
        return torch.zeros((), device=device), 0.0
    values = torch.stack([loss.reshape(()) for loss, _ in losses])
    shares = [weight / total for _, weight in losses]
    sent = torch.tensor(shares, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)  # else the copy waits
    return (values * sent.to(values.device, non_blocking=True)).sum(), total


def judge(said: StepReport, world: World, step: int, least: int) -> None:
    """Raise the error that follows from the reports of all ranks, if any.

    Every rank reads the same sums, so all of them come to the same outcome; no rank has stepped by then.

    Args:
        least: Samples of the smallest micro-batch.

    Raises:
        PeerFailed: A rank's program raised, or it could not read its batch.
        torch.OutOfMemoryError: The smallest micro-batch does not fit on a rank; the same message on all ranks.
    """
    if said.failed:
        raise PeerFailed(
            f"{_who(said.failed, said.failed_ranks, world)} failed in step {step}, with an error of its own; "
            f"{world.place} had no part in it. The weights are as before this step."
        )
    if said.unfit:
        raise torch.OutOfMemoryError(
            f"out of memory in step {step}: {_who(said.unfit, said.unfit_ranks, world)} cannot run forward and "
            f"backward on {_samples_of(least)}, the smallest micro-batch. The weights are as before this step.\n"
            "  Free memory (accelerator.free_memory()), recompute activations "
            "(accelerator.gradient_checkpointing(model)), or take a smaller model or shorter samples; "
            "accelerator.estimate(model, optimizer) says what takes how much, and whether strategy='fsdp' would fit."
        )


def _samples_of(count: int) -> str:
    return f"{count} sample{'s' if count != 1 else ''}"


def _who(count: float, ranks: float, world: World) -> str:
    """Return the rank that a sum of rank numbers identifies, or for several ranks their count."""
    return f"rank {int(ranks)} of {world.world_size}" if count == 1 else f"{int(count)} of {world.world_size} ranks"


def _cannot_split(name: str) -> CannotSplit:
    return CannotSplit(
        f"forward_backward cannot lead a loss function that waits for other ranks, and this one calls {name}: "
        "a rank that ran out of memory would repeat it alone. Exchange values after forward_backward, with "
        "accelerator.gather or reduce; if the loss itself needs them, use accelerator.backward, and "
        "find_executable_batch_size or %%accelerate --oom shrink where that does not fit."
    )


def forbid_collectives(
    function: Callable[..., Any], refusal: Callable[[str], Exception] = _cannot_split
) -> Callable[..., Any]:
    """Return `function`, in which a collective raises an error.

    One rank alone may call it, so its collectives are refused before any rank waits: all that go through torch's
    dispatcher, ours and the program's own. Watching costs some microseconds per operation, so it is done in the first
    call only.

    Args:
        refusal: The error, by the name of the collective; `CannotSplit` for a loss function of `forward_backward`.
    """

    def run(*args: Any) -> Any:
        with _Silence(refusal):
            return function(*args)

    return run


class _Silence(TorchDispatchMode):
    def __init__(self, refusal: Callable[[str], Exception]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refusal = refusal

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # compiled models are compiled as they would be without this mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise self._refusal(func._schema.name.partition("::")[2].strip("_"))
        return func(*args, **(kwargs or {}))
