"""Names of training and validation numbers: which metric of which part of the data a name means. Pure.

People write the part of the data into a name in many ways: "loss" and "val_loss", "train/loss" and "eval/loss",
"Loss/train" and "Loss/test". The rule: a name is cut at "/", "_", "-", ".", ":" and spaces. A first or last word that
names training or held-out data is the part, capitals do not matter; the other words are the metric. A name without such
a word belongs to training. A last word "step" or "epoch", as Lightning adds it, is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = [
    "is_accuracy",
    "is_held_out",
    "meant_by",
    "metric_and_part",
]

_TRAINING = frozenset({"train", "training", "tr", "fit"})
_HELD_OUT = frozenset({"val", "valid", "validation", "validate", "eval", "evaluation", "dev", "test", "heldout"})
_AVERAGED = frozenset({"step", "epoch"})
_ACCURACIES = ("acc", "accuracy")


def metric_and_part(name: str) -> tuple[str, bool]:
    """Return the metric in a name, and whether it is of held-out data.

    Example:
        >>> metric_and_part("val_loss"), metric_and_part("Loss/train"), metric_and_part("train_loss_step")
        (('loss', True), ('loss', False), ('loss', False))
    """
    words = [word for word in re.split(r"[/_\-.:\s]+", name.lower()) if word]
    if len(words) > 1 and words[-1] in _AVERAGED:
        words.pop()
    for at in (0, -1):
        if len(words) > 1 and words[at] in _TRAINING | _HELD_OUT:
            part = words.pop(at)
            return " ".join(words), part in _HELD_OUT
    return " ".join(words), False


def is_held_out(name: str) -> bool:
    """Return whether a name is that of a number on held-out data.

    Example:
        >>> is_held_out("eval/loss"), is_held_out("loss"), is_held_out("test")
        (True, False, False)
    """
    return metric_and_part(name)[1]


def is_accuracy(name: str) -> bool:
    """Return whether a name is that of an accuracy.

    Example:
        >>> is_accuracy("train/acc"), is_accuracy("val_accuracy"), is_accuracy("accumulated")
        (True, True, False)
    """
    return metric_and_part(name)[0].rpartition(" ")[2] in _ACCURACIES


def meant_by(word: str, names: Sequence[str]) -> list[str]:
    """Return those of `names` that a person means by `word`: the name itself, else that metric, training first.

    Example:
        >>> meant_by("acc", ["loss", "val/acc", "train/acc"]), meant_by("acc", ["val_accuracy"])
        (['train/acc', 'val/acc'], ['val_accuracy'])
    """
    if word in names:
        return [word]
    metric = metric_and_part(word)[0]
    same = [name for name in names if metric_and_part(name)[0] == metric]
    alike = same or [name for name in names if metric in _ACCURACIES and is_accuracy(name)]
    return sorted(alike, key=is_held_out)
