"""Start methods of ranks, and the usual one: a fork of the kernel. Runs in the kernel.

All give every rank the same `WorkerBoot` and the same runtime (`rank/main.py`); they differ in the process that is
copied: `ZygoteStart` asks another one. `MainThread` repairs CPython's record of the main thread in a child that another
thread has forked.

Reasons: docs/design/starting-ranks.md
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import io
import itertools
import os
import random
import signal
import stat
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nbaccel.launching.ipc.spec import Task, WorkerBoot
from nbaccel.launching.processes.attached_debugger import fork, leave_debugger, what_it_replaced
from nbaccel.launching.processes.calling_thread import CallingThread
from nbaccel.launching.processes.handle import WorkerProcess
from nbaccel.launching.processes.interaction import Pollable
from nbaccel.launching.rank.connections import Connections
from nbaccel.launching.rank.inherited import what_closes_itself
from nbaccel.launching.rank.jupyter import kernel_ports
from nbaccel.launching.rank.main import Rank, run_rank
from nbaccel.namespace.inventory import no_collections
from nbaccel.namespace.open_files import FilesOfRanks, take_places
from nbaccel.namespace.threads import threads_of_the_notebook

__all__ = [
    "ForkStart",
    "MainThread",
    "StartMethod",
    "quiet_tokenizers",
]


class StartMethod(Protocol):
    """One way to start ranks."""

    def get_ready(self) -> None:
        """Wait for the resources that `start` needs. Nothing has begun yet, so an interrupt may be raised here."""

    def pack(self, task: Task, world_size: int, timeout_s: float | None, beside: Sequence[Pollable]) -> None:
        """Pack the values that the ranks need and cannot see. The time limit and an interrupt can end it.

        Args:
            task: What the ranks run.
            world_size: The number of ranks.
            timeout_s: The time limit of the run, None for none.
            beside: Served while the packing goes on; they can end it too.

        Raises:
            CannotSend: A name cannot be sent to the ranks.
            TimeoutError: The time limit was over.
        """

    def close(self) -> None:
        """Release the packed values; a second call changes nothing."""

    def start(self, boots: Sequence[WorkerBoot], task: Task, kernel_fds: Collection[int]) -> list[WorkerProcess]:
        """Start one process for each boot record.

        Args:
            boots: The boot records, in the order of ranks. The descriptors in them still belong to the caller.
            task: What the ranks run.
            kernel_fds: Descriptors of the run that only the kernel may hold.

        Returns:
            The processes, in the order of ranks.
        """


class ForkStart:
    """Starts ranks as copies of the kernel: they see the whole notebook, and nothing is copied until it is written.

    Args:
        resource_fds: Descriptors that the kernel holds from run to run, and no rank may hold.
    """

    def __init__(self, resource_fds: Collection[int]) -> None:
        self._resource_fds = resource_fds
        self._files = FilesOfRanks()

    def get_ready(self) -> None:
        """Return at once: a fork needs only the kernel."""

    def pack(self, task: Task, world_size: int, timeout_s: float | None, beside: Sequence[Pollable]) -> None:
        """Pack nothing, since a fork sees everything, and find the open files that ranks must not share.

        Raises:
            LaunchRefused: They would have to.
        """
        self._files = FilesOfRanks.behind(
            task.values_to_send, task.own_codes(), world_size, all_are_wanted=task.home is not None
        )

    def close(self) -> None:
        """Release nothing."""

    def start(self, boots: Sequence[WorkerBoot], task: Task, kernel_fds: Collection[int]) -> list[WorkerProcess]:
        """Fork from a thread made for it: it has never run an OpenMP region, so no pool of threads is missing.

        That thread has the values of the calling one.
        """
        processes: list[WorkerProcess] = []
        failures: list[BaseException] = []

        def fork_all() -> None:
            try:
                caller.enter()
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                inherited = _Inherited.now(boots, [*self._resource_fds, *kernel_fds], collects)
                with contextlib.ExitStack() as opened:
                    files = [opened.enter_context(self._files.opened_anew()) for _ in boots]
                    # All before the first fork, behind which each page that the kernel writes to is copied.
                    ranks = [
                        _ForkedRank.of(index, inherited, files, self._files.written) for index in range(len(boots))
                    ]
                    for each in ranks:  # after the last fork, or one that fails
                        opened.callback(each.rank.release)
                    _forget_lookups(len(sys.modules))
                    for each in ranks:
                        processes.append(_fork(each, task, inherited))
            except BaseException as error:
                failures.append(error)

        _flush_open_files(self._files.written)
        collects = gc.isenabled()
        if collects:
            gc.collect(0)  # it would be due behind the forks, where each object that it looks at copies a page
        caller = CallingThread.capture()
        # A child of a thread that has run OpenMP waits for its pool:
        # https://github.com/pytorch/pytorch/issues/58962.
        # A collection between two forks would copy the pages of all that it looks at.
        quiet = quiet_tokenizers() if "tokenizers" in sys.modules else contextlib.nullcontext()
        with quiet, CallingThread.kept_local_values(), no_collections():
            thread = threading.Thread(target=caller.context.run, args=(fork_all,), name="nbaccel-fork")
            thread.start()
            thread.join()
        if failures:
            for process in processes:
                process.signal(signal.SIGKILL)
                process.reap()
            raise failures[0]
        return processes


@dataclass(frozen=True, slots=True)
class _Inherited:
    """State of the kernel that its forks inherit. It is found once, in the kernel, before all of them.

    Args:
        boots: The boot records of all ranks.
        close_fds: Descriptors of the run that only the kernel may hold.
        connections: See `Connections.leave`.
        main_thread: See `MainThread`.
        python_rng: The state of `random`.
        threads: Threads that user code may wait for, see `LostThreads`.
        kept: Objects that would close or delete something if a rank released them.
        replaced: See `leave_debugger`.
        collects: Whether the garbage collector is on in the kernel.
    """

    boots: Sequence[WorkerBoot]
    close_fds: Sequence[int]
    connections: Connections
    main_thread: MainThread | None
    python_rng: Any
    threads: Sequence[threading.Thread]
    kept: Sequence[Any]
    replaced: Sequence[tuple[dict[str, Any], str, Any]]
    collects: bool

    @classmethod
    def now(cls, boots: Sequence[WorkerBoot], close_fds: Sequence[int], collects: bool) -> _Inherited:
        """Find it. Called in the thread that forks."""
        own = {*close_fds, *(getattr(boot, name) for boot in boots for name in WorkerBoot.FDS)}
        return cls(
            boots,
            close_fds,
            Connections.find(kernel_ports(), own),
            MainThread.find(),
            random.getstate(),
            threads_of_the_notebook(),
            what_closes_itself(),
            what_it_replaced(),
            collects,
        )


@dataclass(frozen=True, slots=True)
class _ForkedRank:
    """A rank that is about to be forked.

    Args:
        own_files: See `take_places`.
        close_fds: Descriptors of the kernel and of other ranks, which this one may not hold.
    """

    rank: Rank
    own_files: Mapping[int, int]
    close_fds: Sequence[int]

    @classmethod
    def of(
        cls, index: int, inherited: _Inherited, files: Sequence[Mapping[int, int]], written: Sequence[Any]
    ) -> _ForkedRank:
        """Make the rank of a boot record.

        Args:
            index: That of the record.
            files: See `take_places`, by rank.
            written: See `Rank`.
        """
        boot, own_files = inherited.boots[index], files[index]
        own = {getattr(boot, name) for name in WorkerBoot.FDS}
        others = {getattr(other, name) for other in inherited.boots for name in WorkerBoot.FDS} - own
        of_others = [number for fresh in files if fresh is not own_files for number in fresh.values()]
        return cls(
            Rank(boot, written, _tokenizers_in_one_thread()), own_files, [*inherited.close_fds, *others, *of_others]
        )


def _fork(forked: _ForkedRank, task: Task, inherited: _Inherited) -> WorkerProcess:
    """Fork a rank. In the thread that calls it SIGINT is blocked; the garbage collector is off."""
    _share_resource_tracker()
    pid = fork()
    if pid == 0:
        try:
            # Python advises this in the kernel, https://github.com/python/cpython/pull/3705:
            # why not, `no_collections` says.
            gc.freeze()  # a collection would write to all objects of the notebook, and so copy their pages
            if inherited.collects:
                gc.enable()
            leave_debugger(inherited.replaced)
            if inherited.main_thread is not None:
                inherited.main_thread.become()
            inherited.connections.leave(forked.rank.boot is inherited.boots[0])
            take_places(forked.own_files)
            # A fork copies everything but this: CPython reseeds `random` in every forked child.
            random.setstate(inherited.python_rng)
            run_rank(
                forked.rank,
                lambda: task,
                forked.close_fds,
                is_fork=True,
                lost_threads=inherited.threads,
                kept=inherited.kept,
            )
        finally:
            os._exit(70)
    return WorkerProcess(pid, os.pidfd_open(pid), lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


@functools.lru_cache(maxsize=1)
def _forget_lookups(modules: int) -> None:
    """Empty CPython's cache of lookups in types, if modules were imported since this was done.

    An entry holds a reference to an attribute's name, after an import one of thousands that nobody looks up again. A
    rank that needs the entry would release that name, and so copy a page that nothing else of it uses.

    Args:
        modules: The number of loaded modules.
    """
    for name in ("_clear_internal_caches", "_clear_type_cache"):  # the first from Python 3.13 on
        if forget := getattr(sys, name, None):
            forget()
            break


def _share_resource_tracker() -> None:
    """Let a rank register shared memory and semaphores with the notebook's tracker, as multiprocessing's own forks do.

    Since Python 3.14 any other fork gets its own tracker, which unlinks shared memory to which the rank has only
    attached. The flag belongs to this thread.
    """
    # https://github.com/python/cpython/pull/146316: a fork keeps the tracker if this flag is set.
    intent: Any = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_fork_intent", None)
    if intent is not None:
        intent.preserve_fd = True


def _flush_open_files(others: Sequence[Any]) -> None:
    """Flush the notebook's open files: otherwise each rank that writes to one would write the buffered part again.

    Args:
        others: Those that no name of the notebook has.
    """
    for value in [*vars(sys.modules["__main__"]).values(), *others]:
        kind = type(value)
        if kind is io.TextIOWrapper or kind is io.BufferedWriter or kind is io.BufferedRandom:  # `FileIO` has no buffer
            with contextlib.suppress(Exception):  # closed, maybe only what is below, or not writable any more
                if value.writable() and stat.S_ISREG(os.fstat(value.fileno()).st_mode):
                    value.flush()


# The warning: https://github.com/huggingface/transformers/issues/5486.
@contextlib.contextmanager
def quiet_tokenizers() -> Iterator[None]:
    """Silence the tokenizers library's needless warning in every forked process, unless the user has set it."""
    if _OF_TOKENIZERS in os.environ:
        yield
        return
    os.environ[_OF_TOKENIZERS] = "false"
    try:
        yield
    finally:
        del os.environ[_OF_TOKENIZERS]


_OF_TOKENIZERS = "TOKENIZERS_PARALLELISM"


def _tokenizers_in_one_thread() -> dict[str, str]:
    """Return the variable by which fast tokenizers compute in one thread: a fork has none of those in the notebook.

    They read it at each call. The user may have told them to use several, which holds if a rank loads them anew.
    """
    is_to_be_set = "tokenizers" in sys.modules or _OF_TOKENIZERS not in os.environ
    return {_OF_TOKENIZERS: "false"} if is_to_be_set else {}


_WORD = ctypes.sizeof(ctypes.c_size_t)

_WORDS = 4096 // _WORD
"""Number of words of the runtime that are searched; it has some hundred times as many.

The pointer is word 83 in Python 3.13.
"""


@dataclass(frozen=True, slots=True)
class MainThread:
    """The main thread's place.

    In a child, the thread that forked it is the main thread. CPython records its identity (``PyOS_AfterFork_Child``).
    But from Python 3.13 on a signal wakes a thread state (``_PyEval_SignalReceived``), by a pointer in the runtime that
    is written once, when the interpreter begins. If another thread forked the child, this is the state of a thread that
    does not exist there. A loop in Python then receives no interrupt until it waits for something. Used before a fork,
    and in the child.

    Args:
        address: The address of two words, identity and pointer.
        state: The value of the pointer.
    """

    address: int
    state: int

    @classmethod
    def find(cls) -> MainThread | None:
        """Find the place, before a fork. None before Python 3.13, and if the runtime has another layout."""
        if sys.version_info < (3, 13):
            return None
        try:
            begin, states = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime")), _thread_states()
        except (ValueError, AttributeError):  # a Python that does not export them
            return None
        words = list((ctypes.c_size_t * _WORDS).from_address(begin))
        identity = threading.main_thread().ident
        found = [
            number
            for number, (word, after) in enumerate(itertools.pairwise(words))
            if word == identity and after in states
        ]
        return cls(begin + found[0] * _WORD, words[found[0] + 1]) if len(found) == 1 else None

    def become(self) -> None:
        """Make signals wake the calling thread; called in the child by its only thread."""
        words = (ctypes.c_size_t * 2).from_address(self.address)
        if list(words) == [threading.get_ident(), self.state]:  # CPython has set the identity
            words[1] = ctypes.PYFUNCTYPE(ctypes.c_size_t)(("PyThreadState_Get", ctypes.pythonapi))()


def _thread_states() -> set[int]:
    """Return the states of all threads of the main interpreter."""
    main = ctypes.PYFUNCTYPE(ctypes.c_size_t)(("PyInterpreterState_Main", ctypes.pythonapi))
    function = ctypes.PYFUNCTYPE(ctypes.c_size_t, ctypes.c_size_t)
    first, following = (
        function((name, ctypes.pythonapi)) for name in ("PyInterpreterState_ThreadHead", "PyThreadState_Next")
    )
    states: set[int] = set()
    state = first(main())
    while state:
        states.add(state)
        state = following(state)
    return states
