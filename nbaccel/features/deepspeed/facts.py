"""Facts: values of a model, an optimizer and a schedule for the "auto" of a DeepSpeed configuration. Runs in ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.base.values import frozen
from nbaccel.features.deepspeed.plugin import DummyOptim, DummyScheduler

__all__ = ["Facts"]


@frozen
class Facts:
    """Values that a program has said already.

    Args:
        is_dummy: The configuration makes the optimizer.
        optimizer: Values of its first group, by DeepSpeed's names.
        schedule: Values of the schedule that the configuration makes; None where it makes none.
        needs_schedule: The program has a placeholder for a schedule, and nothing that makes it.
        hidden_size: The width of the model, as its ``config`` says it; None where it says none.
    """

    is_dummy: bool = False
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    schedule: Mapping[str, Any] | None = None
    needs_schedule: bool = False
    hidden_size: int | None = None

    @classmethod
    def of(cls, model: Module, optimizer: Optimizer, schedule: DummyScheduler | None, moves: int = 1) -> Facts:
        """Return those of what one call of `prepare` has.

        Args:
            moves: How often a schedule of the program would move in a step, once for each rank: its `total_num_steps`
                are so many for a step. The engine moves its schedule once.
        """
        group = optimizer.param_groups[0]
        values = {name: group.get(name) for name in ("lr", "betas", "eps", "weight_decay", "momentum")}
        by_config = None
        if schedule is not None and schedule.lr_scheduler_callable is None:
            total = schedule.total_num_steps
            by_config = {
                "total_num_steps": None if total is None else math.ceil(total / max(1, moves)),
                "warmup_num_steps": schedule.warmup_num_steps,
                "warmup_min_lr": 0,
                "warmup_max_lr": group.get("lr"),
            }
        return cls(
            isinstance(optimizer, DummyOptim),
            {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()},
            by_config,
            by_config is not None,
            _hidden_size(model),
        )


def _hidden_size(model: Module) -> int | None:
    config = getattr(model, "config", None)
    for name in ("hidden_size", "d_model"):
        if isinstance(size := getattr(config, name, None), int):
            return size
    sizes = getattr(config, "hidden_sizes", None)
    return max(sizes) if sizes else None
