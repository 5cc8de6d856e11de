"""Guard: an optimizer's step that is taken, or not begun, or reported as torn. Runs in ranks.

When the optimizer runs out of memory the activations are freed already, so smaller batches would not help. The
versions of tensors show how far the step came. This module handles neither gradients nor other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from nbaccel.base.events import OutOfMemory, emit
from nbaccel.base.memory_limit import is_shortage
from nbaccel.base.values import frozen
from nbaccel.errors import StepCorrupted
from nbaccel.train.oom.memory.release import release_unused

__all__ = [
    "guarded_step",
]

_T = TypeVar("_T")


def guarded_step(optimizer: Optimizer, take: Callable[[], _T], place: str, step: int) -> _T:
    """Call `take`, which steps `optimizer`; again, in smaller pieces, if memory ran out before any update.

    State that was only half made is dropped, so that a later step makes it again.

    Args:
        place: Which rank this is, for messages.
        step: The number of the step.

    Raises:
        torch.OutOfMemoryError: The step did not fit the second time either. Nothing was updated.
        StepCorrupted: Some parameters, or their state, were updated and others not.
    """
    before = _Versions.of(optimizer)
    failure = _try(take)
    if not isinstance(failure, _Failed):
        return failure
    before.bring_back(optimizer, place, step, failure.message)
    emit(OutOfMemory(step, "optimizer", message=failure.message))
    release_unused()
    with _one_by_one(optimizer):
        try:
            return take()
        except Exception as error:
            if is_shortage(error):
                before.bring_back(optimizer, place, step, _first_line(error))
            raise


@frozen
class _Failed:
    message: str


def _try(take: Callable[[], _T]) -> _T | _Failed:
    try:
        return take()
    except Exception as error:
        if not is_shortage(error):
            raise
        return _Failed(_first_line(error))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class _Versions(NamedTuple):
    """Numbers of in-place changes of each parameter, and of each entry of its state; None where it had no state."""

    parameters: list[tuple[Tensor, int, dict[str, Any] | None]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Versions:
        state: Mapping[Tensor, Mapping[str, Any]] = optimizer.state
        return cls([
            (parameter, parameter._version, _marks(state[parameter]) if parameter in state else None)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ])  # fmt: skip

    def bring_back(self, optimizer: Optimizer, place: str, step: int, message: str) -> None:
        """Drop new entries of the optimizer's state.

        Raises:
            StepCorrupted: A parameter, or a state that existed before, has changed.
        """
        changed = sum(self._has_changed(optimizer, *known) for known in self.parameters)
        if changed:
            raise StepCorrupted(
                f"{type(optimizer).__name__} ran out of memory in step {step} on {place}, when {changed} of "
                f"{len(self.parameters)} parameters, or their state, were updated already ({message}). Neither the "
                "weights before the step nor those after it are there any more: load the last checkpoint. Smaller "
                "updates need less memory at once: foreach=False, or fused=True, in the optimizer."
            )
        for parameter, _, marks in self.parameters:
            if parameter in optimizer.state and marks is None:
                del optimizer.state[parameter]

    @staticmethod
    def _has_changed(optimizer: Optimizer, parameter: Tensor, version: int, marks: dict[str, Any] | None) -> bool:
        if parameter._version != version:
            return True
        return marks is not None and _marks(optimizer.state[parameter]) != marks


def _marks(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value._version if isinstance(value, Tensor) else value for name, value in state.items()}


@contextmanager
def _one_by_one(optimizer: Optimizer) -> Iterator[None]:
    """Let `optimizer` update one tensor after the other, where it can: that needs less memory at once."""
    groups = [group for group in optimizer.param_groups if "foreach" in group and not group.get("fused")]
    chosen = [group["foreach"] for group in groups]
    for group in groups:
        group["foreach"] = False
    try:
        yield
    finally:
        for group, foreach in zip(groups, chosen, strict=True):
            group["foreach"] = foreach
