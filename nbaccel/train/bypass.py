"""Bypass: what a training loop does past the `Accelerator` while its batches come in parts. Runs in ranks.

Schedulers that were not prepared are slowed down to one move per batch. What would train something else than the whole
batch does is refused, in one sentence that says how to write it. Used by the gate, around one loop.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.errors import CannotCut
from nbaccel.train.data.cut import Part
from nbaccel.train.prepared import Prepared

__all__ = ["Guard", "Hand", "paced"]


class Hand(Protocol):
    """What the loop has in hand.

    has_weighed: a backward of the Accelerator's has run for a part of the batch in hand.
    """

    part: Part
    has_weighed: bool


class Guard:
    """Looks at what the loop does with optimizers and gradients past the Accelerator, while entered."""

    def __init__(self, prepared: Prepared, hand: Hand) -> None:
        self._prepared = prepared
        self._hand = hand

    def __enter__(self) -> Guard:
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def before_backward(self) -> None:
        """The gradients of the batch's earlier parts must still be there.

        Raises:
            CannotCut: somebody has set them to None.
        """
        if self._hand.has_weighed and all(parameter.grad is None for parameter in self._parameters()):
            raise CannotCut(
                f"{self._because()} but the gradients of the first parts are gone: the loop drops them in every "
                f"round, as model.zero_grad() does. {_remedy('optimizer.zero_grad()')}"
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """torch asks before the step of any optimizer. One that is prepared gets here with a batch's last part only."""
        part = self._hand.part
        if not part.is_last and self._trains_with(optimizer):
            line = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)"
            raise CannotCut(
                f"{self._because()} but this {type(optimizer).__name__} is not prepared, so it steps after every "
                f"part. {_remedy(line)}"
            )
        if not part.is_first and not self._hand.has_weighed and self._is_prepared(optimizer):
            raise CannotCut(
                f"{self._because()} but the loop calls loss.backward() itself, so each part weighs like a whole "
                f"batch. {_remedy('accelerator.backward(loss)')}"
            )

    def _is_prepared(self, optimizer: Optimizer) -> bool:
        return any(prepared.optimizer is optimizer for prepared in self._prepared.optimizers)

    def _trains_with(self, optimizer: Optimizer) -> bool:
        ours = {id(parameter) for model in self._prepared.models for parameter in model.parameters()}
        ours |= {id(parameter) for parameter in self._parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def _parameters(self) -> Iterator[Tensor]:
        for prepared in self._prepared.optimizers:
            for group in prepared.param_groups:
                yield from group["params"]

    def _because(self) -> str:
        part = self._hand.part
        return (
            "memory ran out with whole batches, so each comes in parts now (in hand are samples "
            f"{part.start} to {part.stop} of {part.rows}),"
        )


def _remedy(line: str) -> str:
    return f"Write\n    {line}\nor choose a smaller batch_size; --oom stop leaves batches whole."


@contextmanager
def paced(prepared: Prepared, hand: Hand) -> Iterator[None]:
    """While entered, learning rates move at most once per batch: an optimizer's step gets that of the uncut run.

    This is about schedulers of prepared optimizers, prepared themselves or not. Their class is exchanged, and no
    attribute set: that would be part of their state_dict.
    """
    kinds = [(scheduler, type(scheduler)) for scheduler in _schedulers(prepared)]
    for scheduler, kind in kinds:
        scheduler.__class__ = _paced_kind(kind, hand)
    try:
        yield
    finally:
        for scheduler, kind in kinds:
            scheduler.__class__ = kind


def _schedulers(prepared: Prepared) -> list[LRScheduler]:
    """An unprepared one is known to the program alone, so the process is searched: some 10 ms per loop."""
    known = {id(optimizer) for one in prepared.optimizers for optimizer in (one, one.optimizer)}
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), LRScheduler) and id(getattr(thing, "optimizer", None)) in known
    ]


def _paced_kind(kind: type[LRScheduler], hand: Hand) -> type[LRScheduler]:
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if hand.part.is_last:
            kind.step(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__, "__doc__": kind.__doc__})
