"""ScheduleLength: the number of moves that a learning-rate schedule was made for, and the warning when it is passed. In
ranks.

A prepared scheduler moves as often as there are ranks when its optimizer steps (Accelerate's rule): it expects that the
schedule was counted in batches of one process. One that was counted in steps comes to its end too early: a cosine rises
again, another one stays at its last rate. The length is read from the attributes of the schedule; a function of the
program's own in a LambdaLR does not tell it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import lr_scheduler

__all__ = ["ScheduleLength", "schedule_length_of"]

_TOLERANCE = 20
"""A schedule may be passed by a part of 1 / 20: the last round of an epoch is padded to a whole one on every rank."""


@dataclass(frozen=True, slots=True)
class ScheduleLength:
    """The planned number of moves of a schedule.

    Args:
        moves: Their number.
        name: The argument that sets it.
        then: A sentence on the rate after it.
    """

    moves: int
    name: str
    then: str

    def is_passed(self, moves: int, per_step: int) -> bool:
        """Return whether a schedule that made `moves` has clearly passed it; each step makes `per_step`."""
        return moves > self.moves + max(per_step, self.moves // _TOLERANCE)

    def warning(self, scheduler: str, moves: int, per_step: int) -> str:
        """Return one line on a schedule that has passed it."""
        steps, planned = moves // per_step, f"{self.name}={self.moves}"
        return (
            f"the prepared {scheduler} was made for {planned} and has passed that after {steps:,} optimizer steps: "
            f"each moves it {per_step} times on {per_step} ranks, as in Accelerate. {self.then} Give it "
            f"{self.name}={self.moves * per_step}, or make the Accelerator with step_scheduler_with_optimizer=False, "
            "where it moves by the program's own calls, or with split_batches=True, where each step moves it once."
        )


_RISES = "From here on its rate rises again."
_STAYS = "From here on its rate stays at its last value."


def schedule_length_of(scheduler: Any) -> ScheduleLength | None:
    """Return the planned length of a scheduler; None for one that has none, or that does not say.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule_length_of(lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)).moves
        50
        >>> schedule_length_of(lr_scheduler.StepLR(optimizer, 10)) is None
        True
    """
    if isinstance(scheduler, lr_scheduler.CosineAnnealingLR):
        return ScheduleLength(int(scheduler.T_max), "T_max", _RISES)
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        return ScheduleLength(int(scheduler.total_steps), "total_steps", _STAYS)
    if isinstance(scheduler, lr_scheduler.PolynomialLR):
        return ScheduleLength(int(scheduler.total_iters), "total_iters", _STAYS)
    if isinstance(scheduler, lr_scheduler.LinearLR):  # one that rises is a warm-up, and meant to be passed
        falls = scheduler.end_factor < scheduler.start_factor
        return ScheduleLength(int(scheduler.total_iters), "total_iters", _STAYS) if falls else None
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        parts: Sequence[Any] = getattr(scheduler, "_schedulers", ())
        milestones: Sequence[int] = getattr(scheduler, "_milestones", ())
        last = schedule_length_of(parts[-1]) if parts and milestones else None
        return (
            None
            if last is None
            else ScheduleLength(milestones[-1] + last.moves, f"milestones and {last.name}", last.then)
        )
    if isinstance(scheduler, lr_scheduler.LambdaLR):
        return _of_lambda(scheduler.lr_lambdas[0])
    return None


def _of_lambda(function: Any) -> ScheduleLength | None:
    """Return the planned length of a schedule of transformers, whose functions are partial ones with named
    arguments."""
    steps = function.keywords.get("num_training_steps") if isinstance(function, partial) else None
    then = _RISES if "cosine" in getattr(getattr(function, "func", None), "__name__", "") else _STAYS
    return ScheduleLength(steps, "num_training_steps", then) if isinstance(steps, int) and steps > 0 else None
