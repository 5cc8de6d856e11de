"""Watches for losses and gradients that are not finite, and reacts as `on_nan` says. Runs in ranks.

`LossWatch` itself is ``on_nan="warn"``: it reads every loss where that is free (on the CPU), otherwise once a second,
and warns once. The other two must know before every optimizer step, so they wait for the device there.
"""

from __future__ import annotations

import time
import warnings
from math import isfinite

from torch import Tensor
from torch.optim import Optimizer

from nbaccel.train.step.accumulation import StepClock
from nbaccel.train.step.precision import Precision
from nbaccel.train.strategies import Strategy

__all__ = [
    "ON_NAN",
    "LossWatch",
    "make_watch",
]

_DEVICE_EVERY_S = 1.0
"""Interval of reading a loss on a device: a read drains the device's queue, some 50 us, negligible once a second."""

_ADVICE = (
    "Look at this batch's data, lower the learning rate or clip gradients; torch.autograd.set_detect_anomaly(True) "
    "names the operation."
)


class LossWatch:
    """Warns once, with step and rank, about a loss that is not finite; training continues."""

    judges_steps = False
    """True if `lets_step` may return False, so that it is called before every step."""

    def __init__(self, clock: StepClock, precision: Precision, strategy: Strategy) -> None:
        self._clock = clock
        self._precision = precision
        self._strategy = strategy
        self._every_s = 0.0 if strategy.device.type == "cpu" else _DEVICE_EVERY_S
        self._due_s = 0.0
        self._has_warned = False

    def see(self, loss: Tensor) -> float | Tensor:
        """Look at the loss that `backward` was given, before it is divided or scaled.

        Return the loss for the record: as a number if it was read anyway, else detached, to be read later.
        """
        if self._every_s:
            now_s = time.monotonic()
            if now_s < self._due_s:
                return loss.detach()
            self._due_s = now_s + self._every_s
        try:
            value = loss.item()
        except RuntimeError:  # several elements; checking their number first takes as long as reading it
            value = loss.detach().sum().item()
        if not isfinite(value):
            self._found(value)
        return value

    def lets_step(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` may step now, with its present gradients. The same on all ranks."""
        return True

    def _found(self, value: float) -> None:
        fate = "the gradient scaler skips it" if self._precision.skips_infinite else "weights that take it become NaN"
        self._warn_once(
            f"the loss is {value} in step {self._where()}: {fate}. Training goes on; Accelerator(on_nan='skip') leaves "
            f"such steps out, on_nan='stop' raises. {_ADVICE}",
            depth=4,
        )

    def _warn_once(self, message: str, depth: int) -> None:
        """Warn once.

        Args:
            depth: Calls between here and the user's line.
        """
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, stacklevel=depth + 1)

    def _where(self) -> str:
        world = self._strategy.world
        return f"{self._clock.step} on {world.place}"


class _Skip(LossWatch):
    """Leaves out steps whose gradients are not finite: on every rank alike, since gradients are synchronised."""

    judges_steps = True

    def see(self, loss: Tensor) -> float | Tensor:
        """Return `loss` detached, without reading it; the gradients will show it."""
        return loss.detach()

    def lets_step(self, optimizer: Optimizer) -> bool:
        if self._strategy.has_finite_gradients(optimizer):
            return True
        self._warn_once(
            f"gradients are not finite in step {self._where()}: the step is skipped, and so will be others like it "
            f"(optimizer_step_was_skipped tells). {_ADVICE}",
            depth=3,
        )
        return False


class _Stop(LossWatch):
    """Raises before a step that is not finite changes the weights: with synchronised gradients on every rank."""

    judges_steps = True

    def __init__(self, clock: StepClock, precision: Precision, strategy: Strategy) -> None:
        super().__init__(clock, precision, strategy)
        self._every_s = 0.0
        self._bad: float | None = None

    def _found(self, value: float) -> None:
        self._bad = value

    def lets_step(self, optimizer: Optimizer) -> bool:
        if self._bad is not None:
            bad, self._bad = self._bad, None
            raise FloatingPointError(f"the loss is {bad} in step {self._where()}. The weights are as before. {_ADVICE}")
        # Scaled fp16 gradients overflow now and then in sound trainings; the scaler handles that.
        if not self._precision.skips_infinite and not self._strategy.has_finite_gradients(optimizer):
            raise FloatingPointError(
                f"gradients are not finite in step {self._where()}, although the loss there is: another rank's loss "
                f"or the backward is not. The weights are as before. {_ADVICE}"
            )
        return True


ON_NAN: dict[str, type[LossWatch]] = {"warn": LossWatch, "skip": _Skip, "stop": _Stop}


def make_watch(on_nan: str, clock: StepClock, precision: Precision, strategy: Strategy) -> LossWatch:
    """Return the watch called `on_nan`; under fp16 "skip" is done by the gradient scaler itself."""
    kind = LossWatch if on_nan == "skip" and precision.skips_infinite else ON_NAN[on_nan]
    return kind(clock, precision, strategy)
