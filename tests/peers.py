"""Both toolkits by name, for programs in the spelling they share. Call it in ranks: Accelerate keeps global state."""

from __future__ import annotations

import os
import warnings
from importlib import import_module
from types import SimpleNamespace

__all__ = ["TOOLKITS", "toolkit"]

TOOLKITS = ("accelerate", "nbaccel")

_OURS = {
    "AutocastKwargs": "nbaccel.train.step.kwargs_handlers",
    "DistributedDataParallelKwargs": "nbaccel.train.step.kwargs_handlers",
    "GradScalerKwargs": "nbaccel.train.step.kwargs_handlers",
    "GradientAccumulationPlugin": "nbaccel.train.step.accumulation",
    "ProfileKwargs": "nbaccel.train.step.kwargs_handlers",
}


def toolkit(name: str) -> SimpleNamespace:
    """The Accelerator of `name` and the classes that go with it; Accelerate's warnings are its own."""
    if name == "nbaccel":
        homes = _OURS
    else:
        warnings.simplefilter("ignore")
        os.environ["OMP_NUM_THREADS"] = "1"
        homes = dict.fromkeys(_OURS, "accelerate.utils")
    classes = {kind: getattr(import_module(home), kind) for kind, home in homes.items()}
    return SimpleNamespace(Accelerator=import_module(name).Accelerator, **classes)
