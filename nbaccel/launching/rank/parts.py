"""The parts of every rank, in their order. Runs in ranks.

`RankParts` calls each method of all of them, and is the only one that knows them by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from nbaccel.base.events import Sink
from nbaccel.base.settings import RunSettings
from nbaccel.base.task_end import finish_stopped_task, finish_task, forget_task
from nbaccel.errors import RunStopped
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.rank_part import RankPart, RankTask, watch_of_flags
from nbaccel.launching.ipc.spec import Results, WorkerBoot, load_named
from nbaccel.launching.libraries import OtherLibraries
from nbaccel.launching.libraries.one_file import OneFile
from nbaccel.launching.rank.lifetime import CutWatch
from nbaccel.launching.rank.process_setup import ProcessGroups
from nbaccel.launching.rank.separate_trainings import OneTraining
from nbaccel.launching.rank.sharded_results import ShardedResults
from nbaccel.namespace.parameters import parameters_of
from nbaccel.namespace.wrappers import plain

__all__ = ["RankParts"]


class RankParts:
    """The parts of one rank. Made before it begins; nothing is changed before `install`.

    Args:
        boot: Names those that features add.
        written: Files of the kernel that are open for writing, and that the task may write to.

    Attributes:
        page: The control page.
        learns_mode: What is told how the program trains; None if nothing wants to know.
        cut: The part that ends waits in the device, and knows whether the rank's values are whole.
    """

    def __init__(self, boot: WorkerBoot, written: Sequence[Any] = ()) -> None:
        world = boot.world
        self.page = page = ControlPage(boot.page_fd, world.world_size)
        settings = RunSettings.from_env(boot.environ)
        acts_as_one = world.is_distributed and not settings.independent
        self.cut = CutWatch(page, world.rank)
        training = OneTraining(page, world, is_watching=acts_as_one)
        is_dry = settings.dry_run is not None
        flags = watch_of_flags(world.rank, training.wrappers, is_dry) if boot.watches_flags else None
        self.learns_mode: Sink | None = None if flags is None else flags.take
        self._parts: list[RankPart] = [
            self.cut,  # first: it forms groups anew that the others use, and hears of an error before they change it
            ProcessGroups(boot.store_path, world, page, boot.address),
            OtherLibraries(world, boot.sees_one_card, boot.store_path if acts_as_one else ""),  # after the groups
            ShardedResults(self.cut),
            *(load_named(name)(argument) for name, argument in boot.parts),  # before `OneFile`, which they look through
            _SetupWatch(),  # before the next, which asks it what it keeps equal
            training,
        ]
        if flags is not None:
            self._parts.append(flags)  # after these two, whose errors say more
        if acts_as_one:
            self._parts.append(OneFile(world, boot.store_path, written))

    def install(self) -> None:
        for part in self._parts:
            part.install()

    def begin(self, running: RankTask) -> None:
        for part in self._parts:
            part.begin(running)

    def end(self) -> None:
        finish_task()  # first: the parts look at what the ranks hold
        for part in self._parts:
            part.end()

    def stop(self, error: BaseException) -> None:
        if isinstance(error, RunStopped):  # which all ranks meet before the same step
            finish_stopped_task()
        with contextlib.suppress(Exception):  # the error of the task is the one to tell
            forget_task()
        for part in self._parts:
            part.stop(error)

    def facts(self, status: str, results: Results) -> dict[str, Any]:
        return {name: fact for part in self._parts for name, fact in part.facts(status, results).items()}


class _SetupWatch(RankPart):
    """Tells the `TaskWatch` that the run's setup has made of each task."""

    def __init__(self) -> None:
        self._running: RankTask | None = None

    def begin(self, running: RankTask) -> None:
        self._running = running
        if (watch := running.equal_watch) is not None:
            watch.begin(running.task.namespace)

    def end(self) -> None:
        if self._running is not None and (watch := self._running.equal_watch) is not None:
            watch.end()

    def stop(self, error: BaseException) -> None:
        if self._running is not None and (watch := self._running.equal_watch) is not None:
            watch.stop()

    def facts(self, status: str, results: Results) -> dict[str, Any]:
        """Return the names of values that the program made for one batch, and whether it failed on a part of one."""
        running, self._running = self._running, None  # a rank that waits for its next task holds nothing of this one
        if running is None or (watch := running.watch) is None:
            return {}
        namespace, of_batches = running.task.namespace or {}, []
        for name in results.facts.get("checksums", {}):
            with contextlib.suppress(Exception):  # a class of the user's may raise anything
                if watch.is_of_batch(parameters_of(plain(namespace[name]))):
                    of_batches.append(name)
        return {"of_batches": of_batches, "fails_on_parts": watch.fails_on_parts if status == "failed" else ""}
