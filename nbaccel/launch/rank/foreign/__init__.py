"""Foreign trainers: Hugging Face's `Trainer` and Lightning's report to the panel, and stop when it asks. In ranks.

Nothing is imported here that the program does not import: a trainer's class is met when its module is loaded, or
has been in the kernel. Its training method then adds a callback of ours to the trainer first, through the trainer's
own list of callbacks. Where a version of theirs does not fit, the program runs as it would without us.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from nbaccel.launch.rank.foreign import lightning, transformers
from nbaccel.launch.rank.loaded import when_loaded

__all__ = ["attach_to_foreign_trainers"]

_AddCallback = Callable[[Any], None]

_TRAINERS: Mapping[str, tuple[str, _AddCallback]] = {
    "transformers.trainer": ("train", transformers.add_callback),
    "lightning.pytorch.trainer.trainer": ("fit", lightning.add_callback),
    "pytorch_lightning.trainer.trainer": ("fit", lightning.add_callback),
}
"""Modules that define a class `Trainer`: the method that trains, and what to do to a trainer first."""


def attach_to_foreign_trainers() -> None:
    """Let the trainers that this process uses, now or later, report. Once per process."""
    when_loaded(dict.fromkeys(_TRAINERS, _attach))


def _attach(module: ModuleType) -> None:
    method, add_callback = _TRAINERS[module.__name__]
    trains = getattr(module.Trainer, method)

    @functools.wraps(trains)
    def with_callback(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # a version that is other than we know it: it trains, and tells us nothing
            add_callback(trainer)
        return trains(trainer, *args, **kwargs)

    setattr(module.Trainer, method, with_callback)
