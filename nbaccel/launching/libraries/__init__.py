"""Meets other libraries: they use the existing ranks, act as one program, and report. Runs in ranks, or inline.

What meets a library is a feature, named by the library in the table: it is loaded when the library is, by the kernel or
by the program of a rank, and nothing is imported that the program does not import. Where it is missing, a library that
starts ranks of its own is refused; others go without it, and say so. `one_file` and `nested_launchers` need no library.
Imports `launching/ipc`, `namespace`, `base` and the table of `features`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from nbaccel.base.world import World
from nbaccel.errors import FeatureMissing
from nbaccel.features import feature, modules_of, named
from nbaccel.launching.ipc.import_hooks import Action, when_found
from nbaccel.launching.ipc.rank_part import RankPart, RankTask
from nbaccel.launching.ipc.spec import TaskWatch
from nbaccel.launching.libraries.nested_launchers import refuse_launchers

__all__ = [
    "ONE_PROGRAM",
    "REPORTS",
    "OtherLibraries",
    "actions_of",
    "what_meets_loaded_libraries",
]

_RANKS = "ranks with "
_LOGINS = "log-ins of "
REPORTS = "reports of "
ONE_PROGRAM = "one program with "


class OtherLibraries(RankPart):
    """Makes libraries use the existing ranks, and report.

    Args:
        sees_one_card: See `WorkerBoot`.
        store_path: A path that is the same in all ranks of the run, in a folder of the run's own; empty where the ranks
            do not act as one program.

    Attributes:
        world: That of this rank.
        store_path: As above.
        knows_ranks: The task that runs chooses by itself which ranks do something.
        watch: What keeps the task that runs equal in all ranks; None if it knows ranks, or nothing does.
    """

    def __init__(self, world: World, sees_one_card: bool = False, store_path: str = "") -> None:
        self.world = world
        self.store_path = store_path
        self.knows_ranks = True
        self.watch: TaskWatch | None = None
        self._as_own_card: Callable[[World], None] | None = None
        if sees_one_card:  # here, since a forked rank is made in the kernel
            from nbaccel.launching.libraries.own_card import let_the_local_rank_be_the_only_card

            self._as_own_card = let_the_local_rank_be_the_only_card

    def install(self) -> None:
        refuse_launchers(self.world)
        vars(sys).pop("ps1", None)  # no library shall take this process for an interactive one
        if self._as_own_card is not None:
            self._as_own_card(self.world)
        self.meet(_RANKS, _LOGINS, REPORTS)
        if self.store_path:
            self.meet(ONE_PROGRAM)

    def meet(self, *kinds: str) -> None:
        """Meet the libraries that the table has of these kinds, now or when they are loaded. Once per process."""
        when_found([(name, partial(actions_of, f"{kind}{name}", self, name)) for kind in kinds for name in named(kind)])

    def begin(self, running: RankTask) -> None:
        self.knows_ranks = running.task.knows_ranks
        self.watch = None if self.knows_ranks else running.equal_watch


def what_meets_loaded_libraries() -> list[str]:
    """Return the modules that meet what this process has loaded: those that its forks need at once."""
    kinds = (_RANKS, _LOGINS, REPORTS, ONE_PROGRAM)
    found = (module for kind in kinds for name, module in modules_of(kind).items() if name in sys.modules)
    return list(dict.fromkeys(found))


def actions_of(name: str, *args: Any) -> Iterable[tuple[str, Action]]:
    """Return what a feature does with the modules of a library."""
    try:
        actions: Iterable[tuple[str, Action]] = feature(name)(*args)
    except FeatureMissing as error:
        if name.startswith(_RANKS):  # each rank would train a model of its own
            raise
        warnings.warn(str(error), stacklevel=2)
        return ()
    return actions
