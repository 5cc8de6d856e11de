"""Adapts other libraries to ranks, and makes the `Trainer` of Hugging Face and of Lightning report. Runs in ranks.

Nothing is imported here that the program does not import: a trainer's class is patched when its module is loaded, or if
the kernel had loaded it. Its training method then first adds a callback of the project to the trainer, through the
trainer's own list of callbacks. If a version of a library does not fit, the program runs as it would without the
callback. A run in the kernel's own process makes them report while it lasts, and leaves classes and trainers as they
were. Imports `launching/ipc`, `namespace` and `base`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any

from nbaccel.base.world import World
from nbaccel.launching.ipc.import_hooks import when_loaded, when_loaded_meanwhile
from nbaccel.launching.ipc.rank_part import RankPart
from nbaccel.launching.libraries import lightning, transformers
from nbaccel.launching.libraries.existing_world import join_existing_world
from nbaccel.launching.libraries.nested_launchers import refuse_launchers
from nbaccel.launching.libraries.one_output import refuse_logins
from nbaccel.launching.libraries.one_process import forget_one_process, let_the_local_rank_be_the_only_card

__all__ = [
    "OtherLibraries",
    "attach_to_foreign_trainers",
    "foreign_trainers_report",
]

_TRAINERS: Mapping[str, tuple[str, Callable[[Any], bool], Callable[[Any], None]]] = {
    "transformers.trainer": ("train", transformers.add_callback, transformers.remove_callback),
    "lightning.pytorch.trainer.trainer": ("fit", lightning.add_callback, lightning.remove_callback),
    "pytorch_lightning.trainer.trainer": ("fit", lightning.add_callback, lightning.remove_callback),
}
"""Modules with a class `Trainer`: the method that trains, the functions that prepare a trainer and undo it."""


class OtherLibraries(RankPart):
    """Makes libraries use the existing ranks, and report.

    Args:
        sees_one_card: See `WorkerBoot`.
    """

    def __init__(self, world: World, sees_one_card: bool) -> None:
        self._world = world
        self._sees_one_card = sees_one_card

    def install(self) -> None:
        refuse_launchers(self._world)
        forget_one_process(self._world)
        join_existing_world(self._world)
        if self._sees_one_card:
            let_the_local_rank_be_the_only_card(self._world)
        refuse_logins(self._world.rank)
        attach_to_foreign_trainers()


def attach_to_foreign_trainers() -> None:
    """Make the trainers that this process uses, now or later, report. Called once per process."""
    when_loaded(dict.fromkeys(_TRAINERS, _attach))


@contextmanager
def foreign_trainers_report(has_stopped: Callable[[], bool]) -> Iterator[None]:
    """Make the trainers that the block uses report, as they do in ranks.

    Args:
        has_stopped: Returns whether an interrupt of the user's has acted in the block. A trainer that reacts by ending
            its training in its own way returns to a program that cannot know of it: `KeyboardInterrupt` is raised
            there.
    """
    with ExitStack() as undo:
        attach = functools.partial(_attach_meanwhile, undo, has_stopped)
        undo.enter_context(when_loaded_meanwhile(dict.fromkeys(_TRAINERS, attach)))
        yield


def _attach_meanwhile(undo: ExitStack, has_stopped: Callable[[], bool], module: ModuleType) -> None:
    method, add_callback, remove_callback = _TRAINERS[module.__name__]
    trains = getattr(module.Trainer, method)

    @functools.wraps(trains)
    def with_callback(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        had_stopped, is_added = has_stopped(), False
        try:
            with suppress(Exception):  # as below
                is_added = add_callback(trainer)
            value = trains(trainer, *args, **kwargs)
        finally:
            if is_added:
                remove_callback(trainer)
        if has_stopped() and not had_stopped:
            raise KeyboardInterrupt("the run was interrupted")
        return value

    def detach() -> None:
        if getattr(module.Trainer, method) is with_callback:
            setattr(module.Trainer, method, trains)

    setattr(module.Trainer, method, with_callback)
    undo.callback(detach)


def _attach(module: ModuleType) -> None:
    method, add_callback, _ = _TRAINERS[module.__name__]
    trains = getattr(module.Trainer, method)

    @functools.wraps(trains)
    def with_callback(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # an unknown version: it trains, and reports nothing
            add_callback(trainer)
        return trains(trainer, *args, **kwargs)

    setattr(module.Trainer, method, with_callback)
