"""Weights: how much each part of a batch counts in its mean loss. Runs in ranks.

A loss function returns the mean over its units. With w units in a part, the gradient of the whole batch is
sum(w * grad(part)) / sum(w) over all parts of all ranks, whatever their sizes: the step that one process would take
on everything at once. This module only counts. A count on CUDA is started when a batch comes and read once,
after the first forward: by then the device has work while this rank waits for the number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from nbaccel.train.oom.microbatch.slicing import Samples
from nbaccel.train.step.readings import Reading

__all__ = [
    "Weight",
    "Weights",
    "make_weights",
    "shifts_labels",
]

Weight = str | Callable[[Any], float]
"""``"samples"``, ``"tokens"``, or a function of a (micro-)batch."""

_IGNORED_LABEL = -100
"""Label that `torch.nn.functional.cross_entropy` leaves out of its mean, and with which transformers pads labels."""


class Weights(ABC):
    """The weights of one batch's parts."""

    is_known = True
    """True if `of` answers without waiting for what is computed before."""

    @abstractmethod
    def of(self, start: int, stop: int, part: Any) -> float:
        """Return the weight of the samples `start` to `stop`, which are `part`."""


def make_weights(weight: Weight, samples: Samples, is_shifted: bool) -> Weights:
    """Return the weights of `samples` by the rule that the user named.

    Args:
        is_shifted: Tokens are predicted from the ones before them, so the first of each sequence is no unit.

    Raises:
        ValueError: There is no such rule, or there are no labels to count.
    """
    if weight == "samples":
        return _Samples()
    if weight == "tokens":
        return _Tokens(_labels(samples.batch), is_shifted)
    if callable(weight):
        return _Called(weight)
    raise ValueError(
        f"weight must be 'samples', 'tokens' or a function of a batch that returns a number, got {weight!r}"
    )


def shifts_labels(models: Sequence[Module]) -> bool:
    """Return whether one of `models` is a causal language model of transformers, which shifts labels in its loss."""
    return any(getattr(model, "loss_type", None) == "ForCausalLM" for model in models)


class _Samples(Weights):
    def of(self, start: int, stop: int, part: Any) -> float:
        return stop - start


class _Tokens(Weights):
    def __init__(self, labels: Tensor, is_shifted: bool) -> None:
        counted = labels[..., 1:] if is_shifted else labels
        units = counted.ne(_IGNORED_LABEL).reshape(len(labels), -1).sum(1)
        self._coming = Reading({"units": units}) if _waits(units) else None
        self._units: list[int] = units.tolist() if self._coming is None else []

    @property
    def is_known(self) -> bool:  # type: ignore[override]
        return self._coming is None

    def of(self, start: int, stop: int, part: Any) -> float:
        if self._coming is not None:
            units, self._coming = self._coming.values()["units"], None
            self._units = units.tolist() if isinstance(units, Tensor) else [units]  # a single one comes as a number
        return sum(self._units[start:stop])


def _waits(units: Tensor) -> bool:
    """Return whether reading `units` waits for what was computed before, and can be delayed."""
    return units.is_cuda


class _Called(Weights):
    def __init__(self, count: Callable[[Any], float]) -> None:
        self._count = count
        self._known: dict[tuple[int, int], float] = {}

    def of(self, start: int, stop: int, part: Any) -> float:
        if (start, stop) not in self._known:
            weight = float(self._count(part))
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(
                    f"weight must count the units that the loss is the mean of; for samples {start} to {stop} it "
                    f"returned {weight}"
                )
            self._known[start, stop] = weight
        return self._known[start, stop]


def _labels(batch: Any) -> Tensor:
    labels = batch.get("labels") if isinstance(batch, Mapping) else getattr(batch, "labels", None)
    if not isinstance(labels, Tensor) or labels.ndim == 0:
        raise ValueError(
            f"weight='tokens' counts the labels of a batch that are not {_IGNORED_LABEL}, and this "
            f"{type(batch).__name__} has no tensor called 'labels'. Count them yourself, such as "
            f"weight=lambda batch: (batch[1] != {_IGNORED_LABEL}).sum()"
        )
    return labels
