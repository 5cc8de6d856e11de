"""MicroBatchTask: the arguments of one `forward_backward`, and the forward and backward of one part. Runs in ranks.

A part runs in a frame of its own, so that after a failure nothing keeps its activations alive. The engine decides
whether it is tried again, and at which size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nbaccel.base.memory_limit import is_shortage
from nbaccel.base.values import frozen
from nbaccel.features.micro_batches.loss_weights import Weight, Weights, make_weights
from nbaccel.features.micro_batches.sizes import Shapes
from nbaccel.train.oom.microbatch.slicing import Samples, SplitFunction, sample_shapes

__all__ = [
    "LossFunction",
    "MicroBatch",
    "MicroBatchTask",
    "Shortage",
    "Work",
]

LossFunction = Callable[[Any], Tensor]
"""``loss_fn(micro_batch)``: returns the mean loss over its units, a tensor with one element."""


@dataclass(frozen=True, slots=True)
class MicroBatchTask:
    """The arguments of one call.

    Args:
        expected: Samples that the loader has handed out to this rank; None where it does not know.
        divisor: Divides the loss of this batch in an accumulation window.
        share: The fraction of the loader's batch; less than 1 where a gate hands batches out in parts.
        ends_step: The window ends here.
        exchanges: Gradients of this window are exchanged with peers.
    """

    loss_fn: LossFunction
    batch: Any
    weight: Weight = "samples"
    split: SplitFunction | None = None
    count: int | None = None
    expected: int | None = None
    divisor: float = 1
    share: float = 1.0
    ends_step: bool = True
    exchanges: bool = True

    def read(self, is_shifted: bool) -> Work:
        """Count samples and units."""
        samples = Samples.of(self.batch, self.split, self.count, self.expected)
        # Only the user's function can tell the shape of a sample that it alone can cut.
        shapes = sample_shapes(self.batch) if self.split is None else ()
        return Work(self, samples, make_weights(self.weight, samples, is_shifted), shapes)


@dataclass(frozen=True, slots=True)
class Work:
    """A task whose batch has been read.

    Args:
        shapes: The shapes that memory depends on, beside the number of samples.
    """

    task: MicroBatchTask
    samples: Samples
    weights: Weights
    shapes: Shapes

    @property
    def count(self) -> int:
        """Samples to run: 0 for a batch that was handed out before and has weight zero."""
        return self.samples.count if self.task.share else 0

    @property
    def weight(self) -> float:
        """The weight of the whole batch."""
        return self.weights.of(0, self.samples.count, self.samples.batch)

    def part(self, start: int, stop: int) -> tuple[Any, Callable[[], float]]:
        """Return the samples `start` to `stop`, and a function that returns their weight."""
        micro_batch = self.samples.take(start, stop)
        return micro_batch, partial(self.weights.of, start, stop, micro_batch)


@frozen
class Shortage:
    """A part that ran out of memory.

    Args:
        phase: "forward" or "backward".
        message: The error's first line.
    """

    phase: str
    message: str


@dataclass(slots=True)
class MicroBatch:
    """One micro-batch to run.

    Args:
        weight: Returns its weight; called once, when its forward has fitted. A part of weight zero contributes nothing:
            its mean loss, over nothing, is NaN.
        unit: The weight of a loss that is not rescaled.
        scale: The precision's scaling, for fp16.
        before_backward: Called when its forward has fitted.
        is_joint: Other ranks wait in its backward, which runs for a weight of zero too.
    """

    loss_fn: LossFunction
    micro_batch: Any
    weight: Callable[[], float]
    unit: float
    scale: Callable[[Tensor], Tensor]
    before_backward: Callable[[], None]
    is_joint: bool = False
    phase: str = "forward"

    def run(self) -> Tensor | Shortage:
        """Run forward and backward; return the loss, detached, or the shortage, with nothing of the attempt left alive.

        Any other error is raised.
        """
        try:
            return self._run()
        except Exception as error:
            if not is_shortage(error):
                raise
            return Shortage(self.phase, (str(error) or type(error).__name__).splitlines()[0])

    def _run(self) -> Tensor:
        loss = mean_loss(self.loss_fn, self.micro_batch)
        seen = loss.detach()
        weight = self.weight()
        if weight == 0:
            if not self.is_joint:
                return torch.zeros_like(seen)
            loss, seen = loss.nan_to_num() * 0, torch.zeros_like(seen)
        elif weight != self.unit:
            loss = loss * (weight / self.unit)
        loss = self.scale(loss)
        self.before_backward()
        self.phase = "backward"
        loss.backward()
        return seen


def mean_loss(loss_fn: LossFunction, micro_batch: Any) -> Tensor:
    """Return the result of `loss_fn`, if that is a loss.

    Raises:
        TypeError: The result is not one element.
    """
    loss = loss_fn(micro_batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(
            f"loss_fn must return the mean loss of the batch that it is given, a tensor with one element; it "
            f"returned {what}"
        )
    return loss
