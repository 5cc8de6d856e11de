"""TrialRun: runs two whole training steps with a batch of a given size, and undoes them. Runs in ranks.

The second step is needed because optimizers make their state in the first. No collective is called, so a rank that runs
out of memory here leaves no other waiting; except with a strategy whose forwards are collectives, where all ranks run
the trial together, and a failure is an error. The result is the `TrialResult`; the plan decides whether to try another
size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.base.failures import asked_bytes, can_retry
from nbaccel.base.memory_limit import is_shortage
from nbaccel.base.values import frozen
from nbaccel.features.batch_size.examples import Examples
from nbaccel.features.batch_size.size_cache import signature
from nbaccel.features.memory.meters import GivenMeter, Meter, PeakGauge, make_meter
from nbaccel.features.micro_batches.snapshot import TrainingSnapshot
from nbaccel.features.micro_batches.task import mean_loss
from nbaccel.train.data.placement import to_device
from nbaccel.train.oom.memory.release import release_unused
from nbaccel.train.strategies import Strategy

__all__ = [
    "TrialResult",
    "TrialRun",
    "TrialSetup",
]


@frozen
class TrialResult:
    """Result of two steps, on one rank.

    Args:
        fits: They ran, within the limit.
        used: The peak of forward and backward, the part that grows with the batch, as a share of the limit; None where
            it could not be measured.
        held: What was in use before the forward of the second step, likewise.
        needed_bytes: The peak of the whole steps, and what was asked for when that failed.
        limit_bytes: What was allowed, source: by what. None as above.
        complaint: The device's error text when they did not fit.
    """

    fits: bool
    used: float | None = None
    held: float | None = None
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    source: str = ""
    complaint: str = ""


@frozen
class TrialSetup:
    """The training to try, as it is.

    Args:
        loss_fn: From a batch on the device to a loss.
        read: Makes the examples; called when the trial begins.
        keeps_gradients: They stay allocated from one batch to the next (accumulation, `forward_backward`).
    """

    loss_fn: Callable[[Any], Tensor]
    read: Callable[[], Examples]
    models: Sequence[Module]
    optimizers: Sequence[Optimizer]
    strategy: Strategy
    keeps_gradients: bool = False


class TrialRun:
    """Trial steps of one training, between ``with`` and its end.

    Args:
        gauge: Measures memory; by default the meter of the device.

    Attributes:
        is_collective: All ranks run a trial together.
        is_running: From the beginning of a trial's steps to their end.
    """

    def __init__(self, scene: TrialSetup, gauge: PeakGauge | None = None) -> None:
        self._scene = scene
        self._gauge = gauge
        self.is_collective = scene.strategy.forwards_are_collective
        self.is_running = False

    def __enter__(self) -> TrialRun:
        scene = self._scene
        with ExitStack() as stack:
            device = scene.strategy.device
            scene.strategy.free_gathered(scene.models)
            # First of all: reading samples may draw random numbers.
            self._snapshot = stack.enter_context(TrainingSnapshot(scene.models, scene.optimizers, device))
            self._examples = scene.read()
            release_unused()
            things = [*scene.models, *scene.optimizers]
            self._meter = (
                make_meter(device, things, scene.strategy.world) if self._gauge is None else GivenMeter(self._gauge)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        release_unused()  # cached memory of the last trial

    @property
    def signature(self) -> str:
        """A name that distinguishes this trial from others, see `found`."""
        scene = self._scene
        device, shapes = scene.strategy.device, self._examples.shapes()
        return signature(scene.models, scene.optimizers, shapes, device, [scene.keeps_gradients])

    def run(self, size: int) -> TrialResult:
        """Run steps with `size` samples; afterwards the training is as before, and unused memory is released.

        Raises:
            Exception: The program's own errors, unless memory ran out; that too where all ranks run it together.
        """
        self.is_running = True
        try:
            outcome = self._outcome(size)
            if not outcome.fits:  # outside of `except`, where the error's frames would hold what the steps had made
                release_unused()
        finally:
            self._scene.strategy.free_gathered(self._scene.models)
            self._snapshot.restore()
        self.is_running = False  # after an error it stays True: the peers may be in the middle of the trial
        return outcome

    def _outcome(self, size: int) -> TrialResult:
        scene, meter = self._scene, self._meter
        peaks = _Peaks(meter)
        try:
            with ExitStack() as stack:
                for model in scene.models:
                    stack.enter_context(scene.strategy.alone(model))
                stack.enter_context(meter.watch())
                self._steps(size, peaks)
        except Exception as error:
            peaks.note()
            if self.is_collective or not (can_retry(error, peaks.share) or is_shortage(error)):
                raise
            complaint = str(error)
        else:
            fits = peaks.share is None or peaks.share <= 1
            return TrialResult(
                fits, peaks.growing_share, peaks.held_share, peaks.highest, meter.limit_bytes, meter.source
            )
        needed_bytes = None if peaks.highest is None else peaks.highest + asked_bytes(complaint)
        return TrialResult(False, None, None, needed_bytes, meter.limit_bytes, meter.source, complaint)

    def _steps(self, size: int, peaks: _Peaks) -> None:
        scene, meter = self._scene, self._meter
        device = scene.strategy.device
        ahead = None
        if device.type == "cuda":
            torch.cuda.empty_cache()  # memory that earlier trials have left reserved would count as this one's
            ahead = self._batch(size)  # a prepared loader copies one batch ahead; it is there during the step
        for _ in range(2):
            meter.reset_peak()
            peaks.note_held()
            batch = self._batch(size)
            loss = mean_loss(scene.loss_fn, batch)
            loss.backward()
            peaks.note(grows=True)
            meter.reset_peak()
            for optimizer in scene.optimizers:
                optimizer.step()
            peaks.note()
            if not scene.keeps_gradients:
                for optimizer in scene.optimizers:
                    optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises errors of the steps before the outcome says that they fit
        del ahead

    def _batch(self, size: int) -> Any:
        return to_device(self._examples.take(size), self._scene.strategy.device)


class _Peaks:
    """Highest readings of a meter: of the whole steps, and of the part that grows with the batch."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.highest: int | None = None
        self._growing: int | None = None
        self._held: int | None = None

    def note_held(self) -> None:
        """Note what is in use now, directly after the meter was reset."""
        self._held = self._meter.peak_bytes

    def note(self, grows: bool = False) -> None:
        peak = self._meter.peak_bytes
        if peak is None:
            return
        self.highest = max(self.highest or 0, peak)
        if grows:
            self._growing = max(self._growing or 0, peak)

    @property
    def share(self) -> float | None:
        return self._of_limit(self.highest)

    @property
    def growing_share(self) -> float | None:
        return self._of_limit(self._growing)

    @property
    def held_share(self) -> float | None:
        return self._of_limit(self._held)

    def _of_limit(self, peak: int | None) -> float | None:
        limit = self._meter.limit_bytes
        return None if peak is None or not limit else peak / limit
