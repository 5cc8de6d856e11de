"""Launching: turns a task into a finished run.

Runs in the kernel; nothing of a run is left when `Launcher.run` returns.

The notebook's cells and the functions of `functions.py` use it alike. `Launcher.start` starts persistent ranks.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

from nbaccel.errors import CannotFork, LaunchRefused, NestedLaunch
from nbaccel.events import Restarted
from nbaccel.forkable import why_forks_fail
from nbaccel.hardware import Survey
from nbaccel.launch.crew import Crew
from nbaccel.launch.group import BadFork, Ended
from nbaccel.launch.holdings import held_here
from nbaccel.launch.hostmemory import HostMemory
from nbaccel.launch.keeper import Keeper
from nbaccel.launch.outcome import Outcome
from nbaccel.launch.postmortem import PostMortem
from nbaccel.launch.preflight import Start
from nbaccel.launch.rank.jupyter import cell_name
from nbaccel.launch.residents import Residents
from nbaccel.launch.restarting import Again, Attempt, Over, Restarting, wait_for_memory
from nbaccel.launch.run import Run
from nbaccel.launch.screen.audience import Audience
from nbaccel.launch.screen.router import Screen
from nbaccel.launch.spec import LaunchSpec, load_named
from nbaccel.launch.start import ForkStart, StartMethod, ZygoteStart
from nbaccel.launch.verdict import verdict
from nbaccel.launch.watching import Watching, open_log
from nbaccel.launch.witness import Witness
from nbaccel.world import World

__all__ = ["Launcher", "Outcome", "default_launcher", "refuse_nested_launch"]

_WARM_MODULES = ("torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel")


class Launcher:
    """Runs tasks, one after the other; owns the resources that they share (`Keeper`).

    occupied: the reason why no caller should wait for the present run; a run that would wait is refused with it. Empty:
    it waits.
    post_mortem: that of the last run, if it ended badly; set by the code that concludes a run.
    ended_group: torch's group that a run in this process has left; kept until the next run, see `ends_its_group`.
    last_run: the last run, as `Run.light` leaves it; None before the first.
    """

    def __init__(self) -> None:
        self.audience = Audience()
        self.occupied = ""
        self.post_mortem: PostMortem | None = None
        self.last_run: Run | None = None
        self.ended_group: Any = None
        self._one_at_a_time = threading.RLock()  # a function that runs in this process may start ranks
        self._residents: list[Residents] = []

    @functools.cached_property
    def keeper(self) -> Keeper:
        """Return the shared resources, made for the first run that starts a process: some machines can start none."""
        return Keeper()

    @property
    def helpers(self) -> dict[int, str]:
        """Return the purpose of each helper process, see `Keeper.helpers`."""
        return self.keeper.helpers() if "keeper" in self.__dict__ else {}

    def run(self, spec: LaunchSpec, watching: Watching) -> Outcome:
        """Start the ranks, show their output, and return when no process of the run is left.

        watching: the observers of the run; those of a run that is started again observe both attempts.

        Raises:
            NestedLaunch: this process is a rank itself.
            LaunchRefused: a run goes on for which no caller should wait, see `occupied`.
            CannotSend, CannotFork: nothing was started.
        """
        refuse_nested_launch()
        with self.turn():
            return self._run(spec, watching)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Serialize the runs that several threads start. A run may start another one, in its own thread.

        Raises:
            LaunchRefused: a run goes on for which no caller should wait, see `occupied`.
        """
        if not self._one_at_a_time.acquire(blocking=not self.occupied):
            raise LaunchRefused(self.occupied)
        try:
            self.ended_group = None
            yield
        finally:
            self._one_at_a_time.release()

    def _run(self, spec: LaunchSpec, watching: Watching) -> Outcome:
        _load_once(spec)
        restarting = Restarting(lambda: held_here(spec.task.namespace))
        restarts: list[str] = []
        log_path = self.keeper.new_log()
        with open_log(log_path) as log:

            def attempt(spec: LaunchSpec, witness: Witness) -> Ended:
                with closing(self._crew(spec, watching)) as crew:
                    return watching.watch(crew, spec, log, witness)

            while True:
                host, witness = HostMemory(), Witness()
                try:
                    ended = attempt(spec, witness)
                except BadFork as found:
                    spec = replace(spec, start=_instead_of_fork(spec.start, str(found)))
                    ended = attempt(spec, witness)
                match restarting.after(Attempt(spec, ended, witness, host)):
                    case Again(spec, line):
                        ended.close()
                        wait_for_memory(spec.gpus, ended, lambda: Survey.take().gpus)
                        restarts.append(line)
                        watching.say(line)
                        for listener in watching.listeners:
                            listener.feed(0, time.monotonic(), Restarted(line))
                    case Over(report):
                        break
        error = verdict(ended, spec.task, spec.start.method == "zygote", host, cell_name, report)
        return Outcome(spec.task, ended, spec.start, error, log_path, witness.checkpoint, restarts)

    def start(self, spec: LaunchSpec, screen: Screen) -> Residents:
        """Start persistent ranks, and run their setup and the task of `spec`, which has a home.

        Raises:
            NestedLaunch, CannotFork: nothing was started.
            The error of a rank that failed; KeyboardInterrupt: no rank is left.
        """
        refuse_nested_launch()
        with self.turn():
            _load_once(spec)
            try:
                residents = self._settle(spec, Watching(screen))
            except BadFork as found:
                residents = self._settle(
                    replace(spec, start=_instead_of_fork(spec.start, str(found))), Watching(screen)
                )
        self._residents = [each for each in self._residents if each.is_open] + [residents]
        return residents

    def _settle(self, spec: LaunchSpec, watching: Watching) -> Residents:
        home = spec.task.home
        assert home is not None
        host, crew = HostMemory(), self._crew(spec, watching)
        try:
            with open_log(self.keeper.new_log()) as log, closing(watching.watch(crew, spec, log)) as ended:
                error = verdict(ended, spec.task, spec.start.method == "zygote", host, cell_name)
                if ended.is_interrupted:
                    raise KeyboardInterrupt
                if error is not None:
                    raise error
                return Residents(spec, crew, home, ended, lock=self._one_at_a_time, new_log=self.keeper.new_log)
        except BaseException:
            crew.close()
            raise

    def _crew(self, spec: LaunchSpec, watching: Watching) -> Crew:
        """Return a `Crew` that is ready to start: everything that its ranks need exists, and no rank has begun."""
        method = self._method(spec.start)
        method.get_ready()  # the user may interrupt this like any other wait
        method.pack(spec, watching.beside)  # and this
        return Crew(spec.world_size, method, kernel_pidfd=self.keeper.kernel_pidfd, guard=self.keeper.guard)

    def _method(self, start: Start) -> StartMethod:
        if start.method == "zygote":
            return ZygoteStart(self.keeper.zygote())
        if (why := why_forks_fail()) is not None:
            # It changed after the start was chosen: by modules loaded for it, or in the notebook before a restart.
            raise BadFork(why)
        return ForkStart([*self.keeper.fds(), *(fd for residents in self._residents for fd in residents.fds)])

    def close(self) -> None:
        for residents in self._residents:
            residents.abandon()
        if "keeper" in self.__dict__:
            self.keeper.close()


def _instead_of_fork(start: Start, why: str) -> Start:
    if start.is_explicit:
        raise CannotFork(
            f'{why[0].upper()}{why[1:]}, so forked ranks could not train. start_method="fork" was asked for; '
            "leave it out and the ranks start from a clean process instead, or restart the kernel."
        )
    return Start("zygote", why)


@functools.cache
def _launcher_of(pid: int) -> Launcher:
    return Launcher()


def default_launcher() -> Launcher:
    """Return the launcher of this process. A child that inherited its parent's by fork gets its own."""
    return _launcher_of(os.getpid())


def refuse_nested_launch() -> None:
    world = World.from_env()
    if world.launch_id:
        raise NestedLaunch(
            f"this is rank {world.rank} of a run already, and ranks do not launch ranks. "
            "In a cell under %%accelerate the processes are there already: call the function directly, or leave "
            "%%accelerate out. Elsewhere call the launcher in the main program, not inside the function that it runs."
        )


def _load_once(spec: LaunchSpec) -> None:
    """Load modules in the kernel: the first DDP model would otherwise load 0.8 s of modules in every rank.

    It uses a thread, which an interrupt does not reach: a half-imported torch cannot be repaired, and would break the
    notebook. The interrupt is raised when the import is complete. If everything is loaded, or is being loaded in
    another thread, which is waited for, an interrupt can break nothing.
    """
    modules = [*_WARM_MODULES, *([] if spec.setup is None else [spec.setup.partition(":")[0]])]

    def load() -> None:
        for module in modules:
            importlib.import_module(module)
        if spec.setup is not None:
            load_named(spec.setup)

    if all(module in sys.modules for module in modules):
        load()
        return
    with ThreadPoolExecutor(1, "nbaccel-import") as loader:
        loader.submit(load).result()
