"""Meets other libraries: they use the existing ranks, act as one program, and report. Runs in ranks, or inline.

What meets a library is a feature, named by the library in the table: it is loaded when the library is, by the kernel or
by the program of a rank, and nothing is imported that the program does not import. Where it is missing, a library that
starts ranks of its own is refused; others go without it, and say so. `one_file` and `nested_launchers` need no library.
Imports `launching/ipc`, `namespace`, `base` and the table of `features`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from nbaccel.base.world import World
from nbaccel.errors import FeatureMissing
from nbaccel.features import feature, modules_of, named
from nbaccel.launching.ipc.import_hooks import Changes
from nbaccel.launching.ipc.rank_part import RankPart, RankTask
from nbaccel.launching.ipc.spec import TaskWatch
from nbaccel.launching.libraries.nested_launchers import launchers_refused, refuse_groups_in_children

__all__ = [
    "ONE_PROGRAM",
    "REPORTS",
    "LibraryRank",
    "OtherLibraries",
    "actions_of",
    "what_meets_loaded_libraries",
]

_RANKS = "ranks with "
_LOGINS = "log-ins of "
REPORTS = "reports of "
ONE_PROGRAM = "one program with "


class LibraryRank:
    """The rank that this process is, for what meets libraries: that is made once for all runs of a kernel.

    Attributes:
        world: That of this rank.
        store_path: A path that is the same in all ranks of the run, in a folder of the run's own; empty where the ranks
            do not act as one program.
        knows_ranks: The task that runs chooses by itself which ranks do something.
        watch: What keeps the task that runs equal in all ranks; None if it knows ranks, or nothing does.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.store_path = ""
        self.knows_ranks = True
        self.watch: TaskWatch | None = None
        self._changes: dict[tuple[str, ...], Changes] = {}

    def changes(self, *kinds: str) -> Changes:
        """Return what meets the libraries that the table has of these kinds."""
        if kinds not in self._changes:
            asks = [(name, partial(actions_of, f"{kind}{name}", self, name)) for kind in kinds for name in named(kind)]
            self._changes[kinds] = Changes(launchers_refused(self.world) if _RANKS in kinds else (), asks)
        return self._changes[kinds].current()


_MOST_WORLDS = 64
_rank_in = functools.lru_cache(_MOST_WORLDS)(LibraryRank)


class OtherLibraries(RankPart):
    """Makes libraries use the existing ranks, and report.

    Args:
        sees_one_card: See `WorkerBoot`.
        store_path: See `LibraryRank`.

    Attributes:
        rank: What meets libraries asks it.
    """

    def __init__(self, world: World, sees_one_card: bool = False, store_path: str = "") -> None:
        self.rank = _rank_in(replace(world, launch_id=""))
        self._world = world
        self._store_path = store_path
        self._changes = self.rank.changes(_RANKS, _LOGINS, REPORTS, *([ONE_PROGRAM] if store_path else []))
        self._as_own_card: Callable[[World], None] | None = None
        if sees_one_card:  # here, since a forked rank is made in the kernel
            from nbaccel.launching.libraries.own_card import let_the_local_rank_be_the_only_card

            self._as_own_card = let_the_local_rank_be_the_only_card

    def install(self) -> None:
        self.rank.store_path = self._store_path
        refuse_groups_in_children(self._world)
        vars(sys).pop("ps1", None)  # no library shall take this process for an interactive one
        if self._as_own_card is not None:
            self._as_own_card(self._world)
        self._changes.put()

    def meet(self, *kinds: str) -> None:
        """Meet the libraries that the table has of these kinds, now or when they are loaded. Once per process."""
        self.rank.changes(*kinds).put()

    def begin(self, running: RankTask) -> None:
        self.rank.knows_ranks = running.task.knows_ranks
        self.rank.watch = None if self.rank.knows_ranks else running.equal_watch


def what_meets_loaded_libraries() -> list[str]:
    """Return the modules that meet what this process has loaded: those that its forks need at once."""
    kinds = (_RANKS, _LOGINS, REPORTS, ONE_PROGRAM)
    found = (module for kind in kinds for name, module in modules_of(kind).items() if name in sys.modules)
    return list(dict.fromkeys(found))


def actions_of(name: str, *args: Any) -> Iterable[tuple[str, Any]]:
    """Return what a feature does with the modules of a library, by their names."""
    try:
        actions: Iterable[tuple[str, Any]] = feature(name)(*args)
    except FeatureMissing as error:
        if name.startswith(_RANKS):  # each rank would train a model of its own
            raise
        warnings.warn(str(error), stacklevel=2)
        return ()
    return actions
