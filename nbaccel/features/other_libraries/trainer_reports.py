"""Makes the `Trainer` of Hugging Face and of Lightning report. Runs in ranks, and inline in the kernel.

A trainer's class is patched when its module is loaded: its training method first adds a callback of the project to the
trainer, through the trainer's own list of callbacks. If a version of a library does not fit, the program runs as it
would without the callback. A run in the kernel's own process makes them report while it lasts, and leaves classes and
trainers as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from types import ModuleType
from typing import Any

from nbaccel.features.other_libraries import lightning, transformers
from nbaccel.launching.ipc.import_hooks import Action, Change, Prepare, Replacement
from nbaccel.launching.libraries import LibraryRank

__all__ = ["reports", "reports_meanwhile"]

_TRAINERS: Mapping[str, tuple[str, str, Any]] = {
    "transformers": ("transformers.trainer", "train", transformers),
    "lightning": ("lightning.pytorch.trainer.trainer", "fit", lightning),
    "pytorch_lightning": ("pytorch_lightning.trainer.trainer", "fit", lightning),
}
"""The module with a class `Trainer`, its method that trains, and what adds a callback to a trainer and removes it."""


def reports(here: LibraryRank, library: str) -> Iterator[tuple[str, Prepare]]:
    """Make the trainers that this process uses, now or later, report."""
    module, method, callback = _TRAINERS[library]
    yield module, partial(_attach, method, callback)


def reports_meanwhile(undo: ExitStack, has_stopped: Callable[[], bool], library: str) -> Iterator[tuple[str, Action]]:
    """Make the trainers that are used until `undo` is left report, as they do in ranks.

    Args:
        has_stopped: Returns whether an interrupt of the user's has acted meanwhile. A trainer that reacts by ending
            its training in its own way returns to a program that cannot know of it: `KeyboardInterrupt` is raised
            there.
    """
    module, method, callback = _TRAINERS[library]
    yield module, partial(_attach_meanwhile, undo, has_stopped, method, callback)


def _attach_meanwhile(
    undo: ExitStack, has_stopped: Callable[[], bool], method: str, callback: Any, module: ModuleType
) -> None:
    trains = getattr(module.Trainer, method)

    @functools.wraps(trains)
    def with_callback(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        had_stopped, is_added = has_stopped(), False
        try:
            with suppress(Exception):  # as below
                is_added = callback.add_callback(trainer)
            value = trains(trainer, *args, **kwargs)
        finally:
            if is_added:
                callback.remove_callback(trainer)
        if has_stopped() and not had_stopped:
            raise KeyboardInterrupt("the run was interrupted")
        return value

    def detach() -> None:
        if getattr(module.Trainer, method) is with_callback:
            setattr(module.Trainer, method, trains)

    setattr(module.Trainer, method, with_callback)
    undo.callback(detach)


def _attach(method: str, callback: Any, module: ModuleType) -> list[Change]:
    def reporting(trains: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(trains)
        def with_callback(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            with suppress(Exception):  # an unknown version: it trains, and reports nothing
                callback.add_callback(trainer)
            return trains(trainer, *args, **kwargs)

        return with_callback

    return [Replacement([module.Trainer], method, reporting)]
