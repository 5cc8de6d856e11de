"""How often the parts of a library's training run in the whole of it. Pure arithmetic of the kernel.

A dry run shortens such trainings, see `nbaccel.features.check.dry_run.short_trainings`. Their records say what was
planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["EVALUATION", "SAVE", "TRAINING", "TrainerCounts"]

TRAINING, EVALUATION, SAVE = -2, -3, -4
"""Numbers of the parts of a training. Those of rewritten loops are not negative, and that of a pass is -1."""


@dataclass(frozen=True, slots=True)
class TrainerCounts:
    """Numbers of one whole training.

    Args:
        batches: The batches of one rank; None unknown.
        evaluations, saves: None if nobody says.
    """

    batches: float | None
    epochs: float
    evaluations: float | None
    saves: float | None

    @classmethod
    def mean(cls, counts: Sequence[TrainerCounts]) -> TrainerCounts:
        """Return the mean of several trainings; a number is None if one of them does not have it."""
        columns = zip(*((each.batches, each.epochs, each.evaluations, each.saves) for each in counts), strict=True)
        batches, epochs, *others = (None if None in each else sum(each) / len(each) for each in columns)
        return cls(batches, epochs or 1.0, *others)

    @classmethod
    def of(cls, facts: Mapping[str, Any], batches: float | None) -> TrainerCounts:
        """Return the numbers of a training.

        Args:
            facts: The facts of its record.
            batches: The batches of an epoch; None unknown.

        Example:
            >>> facts = {"steps": 100, "epochs": 4, "batches_per_step": 2}
            >>> facts |= {"evaluates": ["epoch", 0], "saves": ["steps", 30]}
            >>> TrainerCounts.of(facts, 50)
            TrainerCounts(batches=200, epochs=4.0, evaluations=4, saves=4.0)
        """
        batches = facts.get("batches") or batches
        ends = []
        if facts.get("steps"):
            ends.append(facts["steps"] * facts.get("batches_per_step", 1))
        if facts.get("epochs") and batches:
            ends.append(
                math.ceil(batches / facts.get("batches_per_step", 1))
                * facts.get("batches_per_step", 1)
                * facts["epochs"]
            )
        whole = min(ends, default=None)
        epochs = float(facts.get("epochs") or 1) if whole is None or not batches else whole / batches
        epochs = min(epochs, float(facts.get("epochs") or epochs))
        steps = None if whole is None else whole / facts.get("batches_per_step", 1)
        return cls(whole, epochs, *(_times(facts.get(key), steps, epochs, batches) for key in ("evaluates", "saves")))


def _times(plan: Sequence[Any] | None, steps: float | None, epochs: float, batches: float | None) -> float | None:
    """Return how often something happens.

    Args:
        plan: "no", "epoch", "steps" or "batches", then a number of these.
    """
    if plan is None or steps is None:
        return None
    unit, every = str(plan[0]), plan[1] or 0
    if unit == "no":
        return 0
    if unit == "epoch":
        return math.ceil(epochs)
    if unit == "steps" and every:
        return float(math.ceil(steps / every if every >= 1 else 1 / every))
    if unit == "batches" and every and batches:
        every_epochs = plan[2] if len(plan) > 2 else None
        if every_epochs is None:  # it counts the batches of the whole training
            return float(epochs * batches // every)
        return float(batches // every * (math.ceil(epochs) // every_epochs))
    return None
