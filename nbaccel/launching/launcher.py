"""Launcher: turns a task into a finished run. Runs in the kernel; nothing of a run is left when `Launcher.run` returns.

The notebook's cells and the functions of `launch.api` use it alike. Where a
fork turns out to fail, it changes the start method. `LauncherResources` are what outlives a single run: the reaper, the
zygote, the folder of logs; one per process that launches. They are closed when the process ends; if it is killed, the
reaper does what closing would have done.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from nbaccel.base.events import Restarted
from nbaccel.base.forkable import why_forks_fail
from nbaccel.base.settings import RunSettings
from nbaccel.base.task_end import finish_task
from nbaccel.base.world import World
from nbaccel.display.views import Views
from nbaccel.errors import CannotFork, LaunchRefused, NestedLaunch
from nbaccel.features import feature
from nbaccel.launching.attempts import KillsElsewhere, LaunchAttempt, OomKillWatch, RunRecorder
from nbaccel.launching.ended_runs import EndedRuns
from nbaccel.launching.ipc import reaper
from nbaccel.launching.ipc.spec import LaunchSpec, Start, load_named
from nbaccel.launching.libraries import what_meets_loaded_libraries
from nbaccel.launching.processes.attached_debugger import undebugged, untrace
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.run_coroutine import RunCoroutine, driven
from nbaccel.launching.processes.start import ForkStart, StartMethod
from nbaccel.launching.processes.supervisor import BadFork, RunObservers, open_log
from nbaccel.launching.processes.workers import WorkerGroup
from nbaccel.launching.run import Run, record_of
from nbaccel.namespace.inventory import no_collections
from nbaccel.namespace.open_files import LOG_FOLDER

if TYPE_CHECKING:
    from nbaccel.features.clean_start.zygote import Zygote
    from nbaccel.features.persistent.persistent_workers import PersistentWorkers
    from nbaccel.launching.diagnosis import FailedRun, PostMortem

__all__ = [
    "Lasting",
    "Launcher",
    "LauncherResources",
    "default_launcher",
    "instead_of_fork",
    "load_once",
    "refuse_nested_launch",
]

_WARM_MODULES = ("torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel")


class Launcher:
    """Runs tasks, one after the other; owns the resources that they share (`LauncherResources`).

    Attributes:
        ended_group: torch's group that a run in this process has left; kept until the next run, see `ends_its_group`.
        ended_runs, post_mortem: See `remember`; no post-mortem before the first run.
    """

    def __init__(self) -> None:
        self.views = Views()
        self.ended_runs = EndedRuns()
        self.post_mortem: PostMortem | None = None
        self.ended_group: Any = None
        self._one_at_a_time = threading.RLock()  # a function that runs in this process may start ranks
        self._occupied = ""
        self._persistent: list[PersistentWorkers] = []
        self._side_by_side: list[WorkerGroup] = []

    @functools.cached_property
    def resources(self) -> LauncherResources:
        """Return the shared resources, made for the first run that starts a process: some machines can start none."""
        return LauncherResources()

    @property
    def helpers(self) -> dict[int, str]:
        """Return the purpose of each helper process, see `LauncherResources.helpers`."""
        return self.resources.helpers() if "resources" in self.__dict__ else {}

    def run(self, spec: LaunchSpec, watching: RunObservers, occupied: str = "") -> tuple[Run, RankResults]:
        """Start the ranks, show their output, and return when no process of the run is left.

        It returns the record of the run, and what its ranks have left, which the caller closes.

        Args:
            watching: The observers of the run; those of a run that is started again observe both attempts.
            occupied: See `turn`.

        Raises:
            NestedLaunch: This process is a rank itself.
            LaunchRefused: A run goes on for which no caller should wait, see `turn`.
            CannotSend, CannotFork: Nothing was started.
        """
        refuse_nested_launch()
        with self.turn(occupied):
            return driven(self.as_coroutine(spec, watching))

    @contextmanager
    def turn(self, occupied: str = "") -> Iterator[None]:
        """Serialize the runs that several threads start. A run may start another one, in its own thread.

        What this process has trained is whole in the block, so that ranks may become copies of it.

        Args:
            occupied: The reason why no other caller should wait for this run: it is refused with that. Empty: it waits.

        Raises:
            LaunchRefused: The run of another thread is one for which no caller should wait.
        """
        if not self._one_at_a_time.acquire(blocking=not self._occupied):
            raise LaunchRefused(self._occupied)
        outer = self._occupied
        try:
            self._occupied = occupied or outer
            self.ended_group = None
            finish_task()
            yield
        finally:
            self._occupied = outer
            self._one_at_a_time.release()

    @staticmethod
    def load(setup: str | None) -> None:
        """Load the modules that ranks share with this process, before the seconds of the first of several runs."""
        load_once([] if setup is None else [setup])

    def remember(self, run: Run, post_mortem: PostMortem | None) -> None:
        """Add a run that is over, as `Run.light` leaves it, to `ended_runs`.

        Args:
            post_mortem: Kept until the next run; None if it ended well.
        """
        self.post_mortem = post_mortem
        try:
            self.ended_runs.add(run)
        except OSError as error:
            warnings.warn(f"this run was not kept in {error.filename or 'its file'}: {error.strerror}", stacklevel=2)

    @property
    def last_run(self) -> Run | None:
        """Return the run that was remembered last; None before the first."""
        return self.ended_runs.newest

    def as_coroutine(
        self, spec: LaunchSpec, watching: RunObservers, log_path: str = ""
    ) -> RunCoroutine[tuple[Run, RankResults]]:
        """Do one run, see `run`, beside others that the calling thread watches; the caller holds the `turn` of all.

        Args:
            log_path: The file that gets all output; empty for one that lasts as long as this process.
        """
        load_once(spec.named_objects, spec.settings, spec.world_size)
        failed: FailedRun | None = None
        namespace = spec.task.namespace
        error: BaseException | None = None
        restarts: list[str] = []
        log_path = log_path or self.resources.new_log()
        with open_log(log_path) as log:
            while True:
                host = OomKillWatch() if spec.fork_server is None else KillsElsewhere()
                recorder = RunRecorder()
                try:
                    ended = yield from self._attempt(spec, watching, log, recorder)
                except BadFork as found:
                    spec = replace(spec, start=instead_of_fork(spec.start, str(found)))
                    ended = yield from self._attempt(spec, watching, log, recorder)
                told = LaunchAttempt(spec, ended, recorder, host)
                if failed is None:
                    if ended.first_failed is None:
                        break  # and what follows a failure is not loaded
                    from nbaccel.launching.diagnosis import FailedRun
                    from nbaccel.launching.kernel_holdings import held_here

                    failed = FailedRun(lambda: held_here(namespace))
                if (again := failed.again(told)) is None:
                    told, error = failed.end(told)
                    break
                spec = again.spec
                restarts.append(again.line)
                watching.say(again.line)
                for listener in watching.listeners:
                    listener.feed(0, time.monotonic(), Restarted(again.line))
        return record_of(told.ended, told.spec.start, error, log_path, told.recorder.checkpoint, restarts), told.ended

    def _attempt(
        self, spec: LaunchSpec, watching: RunObservers, log: BinaryIO, recorder: RunRecorder
    ) -> RunCoroutine[RankResults]:
        with closing(self.worker_group(spec, watching)) as worker_group:
            self._side_by_side.append(worker_group)
            try:
                return (yield from watching.as_coroutine(worker_group, spec.task, spec.end, log, recorder))
            finally:
                self._side_by_side.remove(worker_group)

    def keep(self, persistent: PersistentWorkers) -> None:
        """Keep the descriptors of ranks that stay from later forks, and end these ranks with this process."""
        self._persistent = [each for each in self._persistent if each.is_open] + [persistent]

    def worker_group(self, spec: LaunchSpec, watching: RunObservers) -> WorkerGroup:
        """Return a `WorkerGroup` that is ready to start: all that its ranks need exists, and no rank has begun."""
        method = self._method(spec)
        method.get_ready()  # the user may interrupt this like any other wait
        method.pack(spec.task, spec.world_size, spec.end.timeout_s, watching.beside)  # and this
        return WorkerGroup(
            spec,
            method,
            kernel_pidfd=self.resources.kernel_pidfd,
            guard=self.resources.guard,
            folder=self.resources.new_run_folder(),
        )

    def _method(self, spec: LaunchSpec) -> StartMethod:
        if spec.fork_server is not None or spec.start.method == "zygote":
            from nbaccel.launching.processes.zygote_start import ZygoteStart

            if (server := spec.fork_server) is not None:
                return ZygoteStart(lambda: server)
            return ZygoteStart(self.resources.zygote, starts_again=spec.end.restarts_ranks)
        if (why := why_forks_fail()) is not None:
            # It changed after the start was chosen: by modules loaded for it, or in the notebook before a restart.
            raise BadFork(why)
        of_others = [fd for persistent in self._persistent for fd in persistent.fds]
        of_others += [fd for worker_group in self._side_by_side for fd in worker_group.fds_during_its_run()]
        return ForkStart([*self.resources.fds(), *of_others])

    def close(self) -> None:
        for persistent in self._persistent:
            persistent.abandon()
        if "resources" in self.__dict__:
            self.resources.close()


def instead_of_fork(start: Start, why: str) -> Start:
    """Return the start method of a run whose forks have turned out to fail.

    Raises:
        CannotFork: The user insisted on forks.
    """
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


def load_once(
    named: Sequence[str],
    settings: RunSettings | None = None,
    world_size: int = 1,
    warm: Sequence[str] = _WARM_MODULES,
) -> None:
    """Load in the kernel what every rank would load: its first DDP model would otherwise take 0.8 s for modules.

    It uses a thread, which an interrupt does not reach: a half-imported torch cannot be repaired, and would break the
    notebook. The interrupt is raised when the import is complete. If everything is loaded, or is being loaded in
    another thread, which is waited for, an interrupt can break nothing.

    Collections of garbage would take a fifth of the time, and find 6 MB of it, which a later one finds as well.

    Args:
        named: Objects, as "module:name"; such a module may have a function `load_for_ranks`, which loads what ranks
            with these settings need.
        warm: Modules that every rank uses.
    """
    modules = [*warm, *(each.partition(":")[0] for each in named)]
    # of these choices the modules are not known here
    asks = settings is not None and (settings.strategy is not None or settings.changes_loops)
    of_libraries = what_meets_loaded_libraries()
    is_loaded = not asks and all(module in sys.modules for module in (*modules, *of_libraries))

    def load() -> None:
        if not is_loaded:
            untrace()
        for module in modules:
            loaded = importlib.import_module(module)
            if settings is not None and (load_for_ranks := getattr(loaded, "load_for_ranks", None)) is not None:
                load_for_ranks(settings, world_size)
        for module in of_libraries if is_loaded else what_meets_loaded_libraries():  # now torch is, which loads some
            with contextlib.suppress(ModuleNotFoundError):  # a folder of features is not there: the ranks say so
                importlib.import_module(module)
        for each in named:
            load_named(each)

    if is_loaded:
        load()
        return
    with no_collections(), contextlib.ExitStack() as afterwards, ThreadPoolExecutor(1, "nbaccel-import") as loader:
        loader.submit(load).result()
        afterwards.callback(_ThreadOfLittleMemory().end)


class _ThreadOfLittleMemory:
    """A thread that ends after another one, so that the next thread does not take over the memory of that one.

    The C library gives a new thread the memory of the one that ended last. After imports its free places lie on
    thousands of pages, and a rank, which goes on with the memory of the thread that forked it, copies a page for nearly
    each of its allocations.
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._is_over.wait, name="nbaccel-last", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


_REAPER_S = 1.0


class Lasting(Protocol):
    """Something that a feature keeps from one run to the next, until `%accelerate stop` or the end of this process."""

    def end(self) -> str:
        """End it, and return it in words; empty if nothing was there."""

    def fds(self) -> list[int]:
        """Return its descriptors, which no rank may hold."""


class LauncherResources:
    """Starts the reaper and the zygote when they are first needed and ends them with the process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.kernel_pidfd = os.pidfd_open(self.pid)
        self._guarded: set[str] = set()
        self._reaper: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._zygote: Zygote | None = None
        self._folder: str | None = None
        self._runs = self._groups = 0
        self.lasting: list[Lasting] = []
        atexit.register(self.close)

    def guard(self, *lines: str) -> None:
        """Send lines to the reaper, starting it if needed; see `reaper._Watch.learn` for the possible lines."""
        for line in lines:
            if line.startswith("-"):
                self._guarded.discard(line[1:] if line.startswith(("-/", "-!")) else f"+{line[1:]}")
            else:
                if line.startswith("="):
                    self._guarded = {said for said in self._guarded if not said.startswith("=")}
                self._guarded.add(line)
        if self._reaper is None or self._reaper.poll() is not None:
            self._start_reaper()
            lines = tuple(self._guarded)  # repeat to the new one what the dead one was told
        assert self._line is not None
        with contextlib.suppress(BrokenPipeError):
            self._line.sendall("".join(f"{line}\n" for line in lines).encode())

    def zygote(self) -> Zygote:
        """Return the zygote; start one if there is none, or none that fits the installed torch."""
        if self._zygote is not None and not self._zygote.is_usable:
            self._end_zygote()
        if self._zygote is None:
            zygote: Zygote = feature("ranks from a clean process")(self.kernel_pidfd, "IPython" in sys.modules)
            self._zygote = zygote
            self.guard(f"+{zygote.pid}")
        return self._zygote

    def new_log(self) -> str:
        """Return the path of the next run's log; the folder is removed with the process."""
        self._runs += 1
        return os.path.join(self._own_folder(), f"run-{self._runs}.log")

    def new_run_folder(self) -> str:
        """Make a folder for ranks that meet there; a reaper that knows of the folder of logs need not hear of it."""
        self._groups += 1
        path = os.path.join(self._own_folder(), f"ranks-{self._groups}")
        os.mkdir(path, 0o700)
        return path

    def _own_folder(self) -> str:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix=LOG_FOLDER)  # mode 0700
            self.guard(self._folder)
        return self._folder

    def helpers(self) -> dict[int, str]:
        """Return the purpose of each process that was started, by process id."""
        named = {}
        if self._reaper is not None:
            named[self._reaper.pid] = "reaper, which ends ranks if the kernel dies"
        if self._zygote is not None:
            named[self._zygote.pid] = "zygote, a clean process to start ranks from"
        return named

    def fds(self) -> list[int]:
        """Return the descriptors that a forked rank must not hold."""
        held = [fd for each in self.lasting for fd in each.fds()]
        held += [] if self._line is None else [self._line.fileno()]
        return held if self._zygote is None else [*held, self._zygote.fileno()]

    def end_lasting(self) -> list[str]:
        """End what features keep between runs, and return it in words."""
        lasting, self.lasting = self.lasting, []
        return [words for each in lasting if (words := each.end())]

    def close(self) -> None:
        """End the processes that were started.

        Do nothing the second time, or in a process that inherited this object by fork.
        """
        if os.getpid() != self.pid or self.kernel_pidfd < 0:
            return
        atexit.unregister(self.close)
        self.end_lasting()
        self._end_zygote()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._reaper is not None and self._line is not None:
            # A child that the user forked holds a copy of the socket: closing this one alone would not end it.
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)
            self._line.close()
            # It stays while there are ranks (a launch in a daemon thread), and ends them once this process is gone.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._reaper.wait(_REAPER_S)
            self._reaper = self._line = None
        os.close(self.kernel_pidfd)
        self.kernel_pidfd = -1  # the number may be reused by now

    def _end_zygote(self) -> None:
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            zygote.close()
            self.guard(f"-{zygote.pid}")

    def _start_reaper(self) -> None:
        if self._line is not None:
            self._line.close()
        mine, theirs = socket.socketpair()
        with theirs, undebugged():
            self._reaper = subprocess.Popen(
                [sys.executable, "-S", "-E", reaper.__file__, str(self.kernel_pidfd), str(theirs.fileno())],
                pass_fds=[self.kernel_pidfd, theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        self._line = mine
