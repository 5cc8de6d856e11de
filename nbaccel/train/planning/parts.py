"""Parts: finds how much of one batch fits at a time, for the micro-batches of `forward_backward`. Runs in ranks.

Each rank searches for itself and waits for no other: micro-batches may differ between ranks. Errors here are left to
the step itself, which reports them to the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.train.microbatch.slicing import Samples
from nbaccel.train.planning.examples import Examples
from nbaccel.train.planning.found import Found
from nbaccel.train.planning.planner import find_batch_size
from nbaccel.train.planning.rehearsal import Rehearsal, Scene
from nbaccel.train.strategies import Strategy
from nbaccel.train.talk.collectives import Collectives

__all__ = ["find_micro_batch_size"]


@dataclass(frozen=True, slots=True)
class _Parts(Examples):
    """The first samples of a batch, as micro-batches of it."""

    samples: Samples

    def take(self, size: int) -> Any:
        return self.samples.take(0, size)


def find_micro_batch_size(
    loss_fn: Callable[[Any], Tensor],
    read: Callable[[], Samples],
    models: Sequence[Module],
    optimizers: Sequence[Optimizer],
    strategy: Strategy,
) -> int | None:
    """Return the largest part of a batch whose step fits on this rank; None where its samples cannot be separated.

    read: returns the batch.
    """
    try:
        samples = read()
    except Exception:  # the step will raise it again, on all ranks
        return None
    alone = Collectives()
    try:
        scene = Scene(loss_fn, lambda: _Parts(samples), models, optimizers, strategy, keeps_gradients=True)
        return find_batch_size(Rehearsal(scene), samples.count, alone, Found())
    except Exception:  # likewise; and if memory ran out, the step continues in smaller parts
        return samples.count
