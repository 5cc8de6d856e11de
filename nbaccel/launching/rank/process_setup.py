"""Set up a rank's process before the user's code: signals, rendezvous, OOM score, reserves for a report. Runs in ranks.

The parts are independent of each other; the worker's runtime uses them. Signals act in the user's code, and not in the
runtime around it (`DefaultSignals`, `Interrupt`, `ChildHandler`). Ranks of one machine meet in a file
(`meet_in_file`), are killed before the kernel when memory runs out (`raise_oom_score`), can always report
(`SpareDescriptors`, `StacksOnRequest`), and do not hang in the end of a group (`ended_groups_kept`).
`ForkCheck` finds out whether the kernel's CUDA or autograd has broken the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import FrameType
from typing import Any

from nbaccel.base.forkable import (
    AUTOGRAD_HAS_THREADS,
    CUDA_ERROR_NOT_INITIALIZED,
    DRIVER_IS_IN_USE,
    has_other_devices,
    loaded_driver,
    may_have_cuda,
)
from nbaccel.base.gpu_driver import has_gpu_driver
from nbaccel.base.world import World
from nbaccel.errors import PeerFailed
from nbaccel.launching.ipc.control import ControlPage
from nbaccel.launching.ipc.import_hooks import Change, Changes, Replacement
from nbaccel.launching.ipc.rank_part import RankPart
from nbaccel.launching.ipc.user_code import ASK, question_path, stack_path

__all__ = [
    "LOOPBACK",
    "ChildHandler",
    "DefaultSignals",
    "ForkCheck",
    "Interrupt",
    "ProcessGroups",
    "SpareDescriptors",
    "StacksOnRequest",
    "Variables",
    "ended_groups_kept",
    "meet_in_file",
    "meet_over_the_network",
    "raise_oom_score",
]


class Interrupt:
    """Turns SIGINT into KeyboardInterrupt in the user's code, and ignores it after that.

    A SIGINT that comes before is kept for the user's code: the kernel sends it once, and setting up can take seconds.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._has_come = False
        self._error: Exception | None = None

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._handle)

    def watch(self, on_change: Callable[[bool], None]) -> None:
        """Call `on_change` whenever the program sets a handler of SIGINT: with whether it is one of its own."""
        set_handler, pid = signal.signal, os.getpid()

        @functools.wraps(set_handler)
        def call(number: int, handler: Any) -> Any:
            before = set_handler(number, handler)
            if number == signal.SIGINT and os.getpid() == pid:
                on_change(callable(handler) and handler not in (self._handle, signal.default_int_handler))
            return before

        signal.signal = call  # type: ignore[assignment]

    def raise_in_main(self, error: Exception) -> None:
        """Raise `error` in the user's code, where the main thread may be waiting. Called by other threads.

        Nothing happens while the user's code does not run, or if it has its own handler for SIGINT.
        """
        if self.is_open and signal.getsignal(signal.SIGINT) == self._handle:
            self._error = error
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _handle(self, number: int, frame: Any) -> None:
        error, self._error = self._error, None
        if error is not None:
            if self.is_open:
                raise error
            return
        self._has_come = True
        if self.is_open:
            raise KeyboardInterrupt

    def forget(self) -> None:
        """Forget an interrupt: one that came for a task has nothing to do with the next."""
        self._has_come = False

    def __enter__(self) -> None:
        self.is_open = not self._has_come
        if self._has_come:
            raise KeyboardInterrupt

    def __exit__(self, *exc: object) -> None:
        self.is_open = False
        if signal.getsignal(signal.SIGINT) != self._handle:
            signal.signal(signal.SIGINT, self._handle)  # the program's own handler ends with its code


class ChildHandler:
    """Runs the user's handler of SIGCHLD in the user's code alone.

    torch's handler raises, for a DataLoader's worker that died, at any point of the program: a report would be cut off.
    """

    def __init__(self) -> None:
        self._handler: Any = signal.SIG_DFL

    def __enter__(self) -> None:
        signal.signal(signal.SIGCHLD, self._handler)

    def __exit__(self, *exc: object) -> None:
        self._handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL  # None: set by C code


_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


class DefaultSignals:
    """The default actions of signals, for a rank that inherits the handlers of Python and of the kernel.

    Made in the kernel, before the fork: most often no signal has a handler.
    """

    def __init__(self) -> None:
        self._handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_DFL]

    def restore(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in self._handled:
            signal.signal(number, signal.SIG_DFL)


class Variables:
    """The environment variables of a rank, with the C library's table of them. Made in the kernel, before the fork.

    The C library makes room for each new variable by itself, from lists of free places: a rank that sets its variables
    one by one copies some 80 pages for that.

    Args:
        values: The variables that this rank has of its own.
        defaults: Those that it has where nobody has set them.
    """

    def __init__(self, values: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        self._values = values
        self._defaults = defaults
        if _library is None:
            return
        own = {name: value for name, value in defaults.items() if _library.value_of(name.encode()) is None}
        self._encoded = {name.encode(): os.fsencode(value) for name, value in (own | dict(values)).items()}
        self._texts = ctypes.create_string_buffer(b"".join(b"%b=%b\0" % each for each in self._encoded.items()))
        self._table = array("L")
        at = ctypes.addressof(self._texts)
        for name, value in self._encoded.items():
            self._table.append(at)
            at += len(name) + len(value) + 2
        self._table.frombytes(_library.entries())
        for name in self._encoded:
            if (value_at := _library.value_of(name)) is not None:
                self._table.remove(value_at - len(name) - 1)
        self._table.append(0)
        self._address, _ = self._table.buffer_info()

    def install(self) -> None:
        """Give this process the variables."""
        if _library is None:
            for name, value in self._values.items():  # `update` copies many pages of the kernel's, of abstract classes
                os.environ[name] = value
            for name, value in self._defaults.items():
                os.environ.setdefault(name, value)
            return
        _library.table.value = self._address
        os.environ._data.update(self._encoded)  # type: ignore[attr-defined]


class _Library:
    """The C library's table of variables: addresses of texts as "name=value", the last one 0.

    Raises:
        ValueError, AttributeError: The C library keeps them otherwise.
    """

    def __init__(self) -> None:
        self.table = ctypes.c_void_p.in_dll(ctypes.pythonapi, "environ")
        self.value_of = ctypes.PyDLL(None).getenv  # its address; None for a variable that is not set
        self.value_of.restype = ctypes.c_void_p

    def entries(self) -> bytes:
        """Return the table but for its end."""
        if not self.table.value:
            return b""
        known = ctypes.cast(self.table, ctypes.POINTER(ctypes.c_void_p))
        count = next(index for index in itertools.count() if not known[index])
        return ctypes.string_at(self.table.value, count * ctypes.sizeof(ctypes.c_void_p))


def _the_library() -> _Library | None:
    try:
        return _Library() if hasattr(os.environ, "_data") else None
    except (ValueError, AttributeError):
        return None


_library = _the_library()


LOOPBACK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
"""Variables by which ranks of one machine do not connect over its network."""

_DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's own default for a process group


# torch's own stores have no password:
# https://docs.vllm.ai/en/v0.9.1/usage/security.html quotes PyTorch's security guide.
def meet_in_file(path: str, world: World, may_meet: Callable[[], None] = lambda: None) -> None:
    """Let `env://` in this process yield a store in the file `path` for this `world`.

    The ranks of one machine meet in a file of a private folder. Raw DDP, Accelerate and Fabric all initialise their
    group by `env://`, so they use this rendezvous without a change. No port is opened for it: torch's TCP store listens
    on every interface and has no password.

    A group that is destroyed and made again gets a new prefix, because the file still holds the old group's keys. The
    store does not get the world size: with it, the last rank to release a store removes the file, and sometimes that
    happened while a faster rank was already writing the next group's keys into it, which then waited for ever. The file
    is removed with its folder. Connections between the ranks stay on loopback, by `LOOPBACK`.

    Args:
        may_meet: Called when the file exists, before this rank waits for the others; raises if they cannot all come.
    """
    generations = itertools.count()

    def handler(url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        from torch.distributed import FileStore, PrefixStore

        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        may_meet()
        store = FileStore(path)
        store.set_timeout(timeout)
        yield PrefixStore(str(next(generations)), store), world.rank, world.world_size

    # torch.distributed has a function of the same name as this module, so the module is imported by its full name;
    # the public register_rendezvous_handler refuses a scheme that has a handler already.
    name = "torch.distributed.rendezvous"
    rendezvous: Any = sys.modules.get(name) or importlib.import_module(name)
    rendezvous._rendezvous_handlers["env"] = handler


def meet_over_the_network(path: str, world: World, address: str, may_meet: Callable[[], None] = lambda: None) -> None:
    """Let `env://` in this process yield a store that ranks on other machines reach too.

    Rank 0 has it, at one address of its machine alone, and writes that address with the port into `path`; the agents
    take the file to the other machines. torch's store has no password: docs/design/security.md.

    Args:
        path: A file of the run on this machine.
        world: The world of the ranks.
        address: This machine's address for the others.
        may_meet: Called while this rank waits for rank 0; raises if that cannot come.
    """
    generations = itertools.count()
    stores: list[Any] = []

    def handler(url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        from torch.distributed import PrefixStore

        if not stores:
            stores.append(_shared_store(path, world, address, timeout, may_meet))
        stores[0].set_timeout(timeout)
        yield PrefixStore(str(next(generations)), stores[0]), world.rank, world.world_size

    importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"] = handler


def _shared_store(path: str, world: World, address: str, timeout: timedelta, may_meet: Callable[[], None]) -> Any:
    from torch.distributed import TCPStore

    if world.rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
        port = listening.getsockname()[1]
        # Given a port, the store would listen on every interface.
        store = TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            use_libuv=False,
        )
        with open(f"{path}.new", "w", encoding="ascii") as file:
            file.write(f"{address} {port}")
        os.replace(f"{path}.new", path)
        return store
    # Ended by rank 0's address; by its end without one; if it fails, by the kernel, which ends the run.
    while not os.path.exists(path):
        may_meet()
        time.sleep(_MEET_POLL_S)
    with open(path, encoding="ascii") as file:
        host, port_there = file.read().split()
    return TCPStore(host, int(port_there), is_master=False, timeout=timeout, wait_for_workers=False)


_MEET_POLL_S = 0.01

# The highest score is chosen: https://manpages.debian.org/unstable/manpages/proc_pid_oom_score.5.en.gz.
RANK, CHILD_OF_RANK = 900, 1000
"""Scores, of at most 1000.

A loader's worker process is killed first: its end is an error in its rank, which can still report it.
"""


def raise_oom_score(score_file: str = "/proc/self/oom_score_adj") -> None:
    """Let this process be killed before the kernel, and the processes it forks before this one.

    When the machine runs out of memory, the system kills the process with the highest score first. Without this it may
    kill the notebook's kernel, which holds the data, for the memory that a rank takes. Every process may raise its own
    score; children inherit it, and it is never lowered here.
    """
    _raise_to(RANK, score_file)
    os.register_at_fork(after_in_child=lambda: _raise_to(CHILD_OF_RANK, score_file))


def _raise_to(score: int, score_file: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # not Linux, or not allowed: then the system chooses
        file = os.open(score_file, os.O_RDWR | os.O_CLOEXEC)
        try:
            if int(os.read(file, 32)) < score:
                os.pwrite(file, b"%d" % score, 0)
        finally:
            os.close(file)


class SpareDescriptors:
    """Descriptors kept back while the user's code runs, and released for the report.

    A rank whose program has opened as many files as allowed can still report.
    """

    _MOST = 6

    def __init__(self) -> None:
        self._fds: list[int] = []

    def keep(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._fds) < self._MOST:
                self._fds.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


_MOST_PLACES = 100
"""Largest number of places of a stack, the same as in faulthandler."""


class StacksOnRequest:
    """Answers the kernel's questions where this rank is: with the main thread's stack.

    The answer goes to a file of the run's private folder. Two parts of a rank can answer. The death watch's thread is
    asked through a FIFO: whatever a program does to its signals, the thread answers, unless C code keeps Python's lock.
    faulthandler is asked by a signal: it needs no lock, but programs replace handlers and block signals. The kernel
    therefore asks the thread first (`processes/asked_stacks.py`).

    Args:
        store_path: A file of that folder.

    Attributes:
        questions: The descriptor of the FIFO; None before `install`, and on a file system without FIFOs, where the
            signal is left.
    """

    def __init__(self, store_path: str, rank: int) -> None:
        self.questions: int | None = None
        self._path = stack_path(store_path, rank)
        self._question_path = question_path(store_path, rank)
        self._hears_signal = signal.getsignal(ASK) is signal.SIG_DFL  # else the notebook uses it

    def install(self) -> None:
        """Open the file and the FIFO; they are closed by the end of the process."""
        self._answers = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(self._answers, f"main {_name_of_main()}\n".encode())
        if self._hears_signal:
            faulthandler.register(ASK, file=self._answers, all_threads=True, chain=False)
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):  # of a process before this one, in a rank that is started again
                os.mkfifo(self._question_path, 0o600)
            # Also for writing: else it ends with the first request.
            self.questions = os.open(self._question_path, os.O_RDWR | os.O_CLOEXEC)

    def answer(self) -> None:
        """Write the main thread's stack, for a question that has come."""
        assert self.questions is not None
        with contextlib.suppress(OSError):  # a full disk must not end the thread that asks
            os.read(self.questions, 4096)
            os.write(self._answers, _stack().encode(errors="replace"))  # in one call: no other text comes between


def _stack() -> str:
    """Return the main thread's stack, in the form of faulthandler."""
    lines = [f"Thread {_name_of_main()} (most recent call first):"]
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and len(lines) <= _MOST_PLACES:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join([*lines, "", ""])


def _name_of_main() -> str:
    return f"{threading.main_thread().ident:#018x}"


# https://github.com/pytorch/pytorch/pull/33885.
_REFUSAL = "fork-based multiprocessing"
"""Part of autograd's error in a fork of a process in which it had threads for devices (torch's engine.cpp)."""


class ForkCheck:
    """Finds what breaks a forked rank. Made before the fork: which devices there may be is known in the kernel.

    The kernel's CUDA or autograd may have broken a fork. The kernel has checked before it forked (`forkable.py`), by
    indirect signs; a cause that these do not show, or that another thread of the kernel created in between, is found by
    trying, before any code of the user.

    A CUDA driver that the kernel has not loaded is not loaded here either, and no backward is tried for it, which would
    count its devices: so variables that the user's code sets for it (CUDA_LAUNCH_BLOCKING) keep their effect.
    """

    def __init__(self) -> None:
        self._may_have_cuda = may_have_cuda()
        self._has_other_devices = has_other_devices()

    def why_it_fails(self) -> str | None:
        """Return what breaks this rank, as half a sentence; None if nothing does. Called in the rank."""
        if _torch_says_so():
            return "CUDA was already used in the notebook, as a forked rank found out"
        # Not looked for without a device: a search in all folders of libraries if it is not there.
        driver = loaded_driver() if self._may_have_cuda else None
        if driver is not None and driver.cuInit(0) == CUDA_ERROR_NOT_INITIALIZED:
            return DRIVER_IS_IN_USE
        return AUTOGRAD_HAS_THREADS if self._has_other_devices and _autograd_refuses() else None


def _torch_says_so() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda._is_in_bad_fork():
        return False
    # On a machine without a GPU, a build for CUDA says so too once it was asked for devices, by is_available() or, from
    # torch 2.15 on, by the step of an optimizer; there it breaks nothing.
    return has_gpu_driver() or torch.version.hip is not None


def _autograd_refuses() -> bool:
    """Return whether a backward is refused in this process, by trying one of a single number on the CPU."""
    import torch

    try:
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones((), device="cpu", requires_grad=True).backward()
    except RuntimeError as error:
        return _REFUSAL in str(error)
    return False


class ProcessGroups(RankPart):
    """Lets the ranks meet in a file, or over the network, and their groups end without a hang.

    Args:
        store_path, world: See `meet_in_file`.
        address: This machine's address for ranks on other machines; empty if all are here.
    """

    def __init__(self, store_path: str, world: World, page: ControlPage, address: str = "") -> None:
        self._store_path = store_path
        self._world = world
        self._page = page
        self._address = address
        self._keeps = Changes([("torch.distributed.distributed_c10d", ended_groups_kept)])

    def install(self) -> None:
        if self._address:
            path = f"{self._store_path}.address"
            meet_over_the_network(path, self._world, self._address, self._refuse_without_the_first)
        else:
            meet_in_file(self._store_path, self._world, self._refuse_to_meet)
        self._keeps.put()

    def _refuse_without_the_first(self) -> None:
        """Refuse a process group for which rank 0, whose machine all ranks would meet on, does not come."""
        if self._page.has_finished(0):
            raise PeerFailed(
                f"{self._world.place} was about to form a process group, and rank 0, on whose machine all ranks meet, "
                "has come to its end: every rank has to make the same calls."
            )

    def _refuse_to_meet(self) -> None:
        """Refuse a process group after a rank has died, in a run whose ranks are started again one by one."""
        if self._page.has_lost_a_rank and self._world.is_distributed:
            raise PeerFailed(
                f"{self._world.place} was about to form a process group, and a rank of "
                "this run has died and was started again: ranks that are started again one by one cannot all meet. "
                "Leave collectives out, among them prepare and main_process_first, or do that work before."
            )


_kept: list[Any] = []


def ended_groups_kept(c10d: Any) -> list[Change]:
    """Return what keeps groups of this process from being destructed as they end.

    The destructor of a gloo group joins its threads, for which one of them may be waiting to drop the last collective's
    tensors under Python's lock: who calls it with that lock held never returns. Before torch 2.8 that was every
    `dist.destroy_process_group()`, see https://github.com/pytorch/pytorch/pull/154976. Since then it is what drops the
    last reference in C++, as a `DistributedDataParallel` does that a function leaves behind: one of three launches on
    a machine under load. The destructor is not called while a reference to the group exists. When the next group ends,
    the threads of the one before are idle, and it is let go: else each retry after an out-of-memory would leave three
    threads with their stacks, and `RLIMIT_DATA` counts 8 MB for each. Before torch 2.8 all are kept.
    """
    only_gloo = [int(part) for part in c10d.torch.__version__.split(".")[:2]] >= [2, 8]

    def keeping(update: Callable[[Any], None]) -> Callable[[Any], None]:
        def keep_and_update(group: Any) -> None:
            """Keep the groups; called with None while the groups that end are still listed."""
            if group is None:
                listed = c10d._world.pg_map.items()
                ended = [each for each, (backend, _) in listed if "gloo" in backend or not only_gloo]
                _kept[:] = ended if only_gloo else [*_kept, *ended]
            update(group)

        return keep_and_update

    return [Replacement([c10d], "_update_default_pg", keeping)]
