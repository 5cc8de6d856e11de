"""All that a cell has left in a notebook, as plain values, for tests that compare two runs. Runs in kernels too."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["left"]

_PLAIN = (bool, int, float, str, type(None))
_HAVE_STATE = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.amp.GradScaler,
)


def left(namespace: Mapping[str, Any], without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return values of names by their places, and the random states.

    Args:
        without: Names that are left out.
    """
    found: dict[str, Any] = {}

    def look(place: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value.detach().tolist()
        elif isinstance(value, np.ndarray):
            found[place] = value.tolist()
        elif isinstance(value, _HAVE_STATE):
            look(place, {name: each for name, each in value.state_dict().items() if not callable(each)})
        elif isinstance(value, dict):
            for key, each in value.items():
                look(f"{place}[{key!r}]", each)
        elif isinstance(value, list | tuple):
            found[place] = len(value)
            for at, each in enumerate(value):
                look(f"{place}[{at}]", each)
        elif isinstance(value, _PLAIN):
            found[place] = value
        elif type(value).__name__ in ("Trainer", "EMA"):
            look(place, vars(value))

    for name, value in namespace.items():
        if not name.startswith("_") and name not in without:
            look(name, value)
    found["random"] = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    return found
