"""Disable objects that a fork inherited: child processes, pools, exit functions, open files, threads. Runs in ranks.

The notebook goes on using all of them. So a rank must not end, join, flush, delete or unlink any of them: neither when
it ends, nor when its cell rebinds a name and the last reference in this process goes. And it must not use these objects
as if they worked here: threads and child processes belong to the kernel. Objects that can be opened again are opened
again at their first use (executors, pools, loaders with workers, TensorBoard's writer); everything else is unchanged. A
wait for threads of the notebook is ended by `LostThreads`; the kernel finds them before a fork
(`namespace/threads.py`).
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import os
import queue
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from nbaccel.errors import NotInRanks
from nbaccel.launching.ipc.user_code import cell_name, is_users
from nbaccel.namespace.event_files import open_again_at_first_use
from nbaccel.namespace.threads import is_of

__all__ = [
    "LOST_THREADS",
    "LostThreads",
    "put_aside",
    "what_closes_itself",
]

_ELEMENTS = 1000
"""Largest number of elements of a container that is searched: a longer one holds data, not open files."""

_PYTHON_EXITS = (
    "concurrent.futures.thread",
    "concurrent.futures.process",
    "joblib.externals.loky.process_executor",
    "loky.process_executor",
)
"""Modules whose `_python_exit` joins the threads of their executors when the interpreter ends."""


def what_closes_itself() -> list[Any]:
    """Return files, connections, pools, generators and similar objects that the notebook's names lead to.

    Called in the kernel, which keeps them alive in the ranks that it forks then: to look at each object in a rank
    would copy its page. When the cell rebinds `file`, the old file would be flushed and closed there: it would contain
    its text twice. A database connection would send its closing message to the server on the kernel's socket.
    """
    found: list[Any] = []
    known: dict[int, bool] = {}  # by id, since the user's metaclass may have no hash
    for value in list(vars(sys.modules["__main__"]).values()):
        parts: Iterable[Any] = [value]
        if type(value) in (list, tuple, set) and len(value) <= _ELEMENTS:
            parts = [*value]
        elif type(value) is dict and len(value) <= _ELEMENTS:
            parts = [*value.values()]
        for part in parts:
            kind = type(part)
            if (closes := known.get(id(kind))) is None:
                with contextlib.suppress(Exception):  # of a metaclass of the user's
                    closes = known[id(kind)] = _closes_itself(kind)
            if closes:
                found.append(part)
    return found


def _closes_itself(kind: type) -> bool:
    return any(hasattr(kind, name) for name in ("__del__", "__exit__", "close")) and kind.__module__ != "torch"


def put_aside(rank: int) -> list[Any]:
    """Disable the objects that this process inherited by its fork. Called once, in a forked rank, before any user code.

    Much of the state that is changed here is private to the standard library and to torch. The function continues if a
    version has it under another name: tests with each supported version notice that, and a rank that does not start
    would help nobody.

    Return objects that the caller keeps until the process ends: anything that is released here would be closed or
    deleted.
    """
    kept: list[Any] = []
    steps: tuple[Callable[[list[Any]], None], ...] = (
        _pools,  # before the finalizers, through which pools are found
        _finalizers,
        _loader_workers,  # before the children, which show whether there are any
        _children,
        _servers_of_multiprocessing,
        _workers_are_forked,
        _executors,
        _exit_functions_of_threads,
        _log_handlers,
        partial(open_again_at_first_use, rank),
    )
    for step in steps:
        with contextlib.suppress(Exception):  # see above
            step(kept)
    return kept


def _children(kept: list[Any]) -> None:
    """Forget the kernel's child processes: a process that ends terminates the children that it knows."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        kept.append(set(process._children))
        process._children.clear()


def _finalizers(kept: list[Any]) -> None:
    """Forget finalizers: those of `weakref.finalize` delete temporary folders, those of multiprocessing unlink.

    A rank's own finalizers run at its end: `weakref.finalize` registers that with its first one.
    """
    finalize: Any = weakref.finalize
    kept.append(finalize._registry)  # not a copy: one more reference would write to the object's page
    finalize._registry = {}
    finalize._registered_with_atexit = False
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        kept.append(dict(util._finalizer_registry))
        util._finalizer_registry.clear()
        util._run_after_forkers()  # as in every process that multiprocessing forks


# A tracker deletes blocks when any process with access has ended: https://github.com/python/cpython/pull/110778.
def _servers_of_multiprocessing(kept: list[Any]) -> None:
    """Forget the forkserver, which is a child of the kernel; the resource tracker is shared with the kernel.

    The tracker is known by a pipe. A tracker of this rank would unlink the notebook's shared memory when the rank ends:
    attaching to a block registers it. A lock that a thread of the kernel held would never be released here.
    """
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is not None:
        kept.append(tracker._resource_tracker._lock)
        tracker._resource_tracker._lock = threading.RLock()
    server = sys.modules.get("multiprocessing.forkserver")
    if server is None:
        return
    state = server._forkserver
    if state._forkserver_alive_fd is not None:
        os.close(state._forkserver_alive_fd)
    for name in ("address", "alive_fd", "pid", "authkey"):
        if hasattr(state, f"_forkserver_{name}"):
            setattr(state, f"_forkserver_{name}", None)
    state._inherited_fds = None
    kept.append(state._lock)
    state._lock = threading.Lock()


# Python 3.14's default cannot send what cannot be pickled: https://github.com/python/cpython/pull/125750.
def _workers_are_forked(kept: list[Any]) -> None:
    """Let processes that a rank starts be forked, as they are up to Python 3.13, unless the user chose another way.

    A forked worker knows a class of the notebook; a worker that a forkserver starts cannot find it. An explicit choice
    of Python's default cannot be distinguished from that default.
    """
    context = sys.modules.get("multiprocessing.context")
    if context is None:
        return
    default = context._default_context
    if default._actual_context in (None, default._default_context):
        default._default_context = context._concrete_contexts["fork"]
        default._actual_context = None


def _pools(kept: list[Any]) -> None:
    """Let pools of multiprocessing start workers of this rank when they are used here."""
    pools = sys.modules.get("multiprocessing.pool")
    util = sys.modules.get("multiprocessing.util")
    if pools is None or util is None:
        return
    for finalizer in list(util._finalizer_registry.values()):
        reference = finalizer._weakref
        pool = None if reference is None else reference()
        if isinstance(pool, pools.Pool) and pool._state == pools.RUN:
            kept.append(pool)
            _reopen_at_first_use(pool, kept)


def _reopen_at_first_use(pool: Any, kept: list[Any]) -> None:
    from multiprocessing.pool import Pool

    shadows = ("_check_running", "close", "terminate", "join")

    def reopen() -> None:
        kept.append(dict(vars(pool)))
        for name in shadows:
            del vars(pool)[name]
        Pool.__init__(pool, pool._processes, pool._initializer, pool._initargs, pool._maxtasksperchild, pool._ctx)

    for name in shadows[1:]:
        setattr(pool, name, _nothing)
    pool._check_running = reopen


def _nothing() -> None:
    """Do nothing: nothing of this pool runs in this process."""


def _executors(kept: list[Any]) -> None:
    """Let executors start threads and processes of this rank: otherwise they rely on those of the kernel."""
    threads = sys.modules.get("concurrent.futures.thread")
    if threads is not None:
        for thread in list(threads._threads_queues):
            executor = thread._args[0]()
            if executor is not None:
                kept += [executor, dict(vars(executor))]
                executor._threads = set()
                executor._work_queue = queue.SimpleQueue()
                executor._idle_semaphore = threading.Semaphore(0)
                executor._shutdown_lock = threading.Lock()
    processes = sys.modules.get("concurrent.futures.process")
    if processes is not None:
        for thread in list(processes._threads_wakeups):
            executor = thread.executor_reference()
            if executor is not None and not executor._shutdown_thread:
                kept += [executor, dict(vars(executor))]
                processes.ProcessPoolExecutor.__init__(
                    executor,
                    executor._max_workers,
                    executor._mp_context,
                    executor._initializer,
                    executor._initargs,
                    max_tasks_per_child=executor._max_tasks_per_child,
                )
    for name in ("joblib.externals.loky.reusable_executor", "loky.reusable_executor"):
        module: Any = sys.modules.get(name)
        if module is not None and module._executor is not None:
            kept.append(module._executor)
            module._executor = None


def _exit_functions_of_threads(kept: list[Any]) -> None:
    """Forget functions that run before threads are joined, except those for the executors that this rank will make."""
    own: Any = threading
    kept.append(list(own._threading_atexits))
    own._threading_atexits.clear()
    for name in _PYTHON_EXITS:
        module: Any = sys.modules.get(name)
        if module is None:
            continue
        for registry in ("_threads_queues", "_threads_wakeups"):
            if hasattr(module, registry):
                kept.append(dict(getattr(module, registry)))
                getattr(module, registry).clear()
        own._register_atexit(module._python_exit)


def _log_handlers(kept: list[Any]) -> None:
    """Forget the handlers of logging: a new configuration flushes and closes all that are known."""
    own: Any = logging
    kept.append(list(own._handlerList))
    del own._handlerList[:]


def _loader_workers(kept: list[Any]) -> None:
    """Let loaders start workers of this rank, and leave those of the kernel alone.

    A loader with persistent workers keeps its iterator, and with it the kernel's workers; an iterator that is released
    tells its workers to end.
    """
    loaders = sys.modules.get("torch.utils.data.dataloader")
    process = sys.modules.get("multiprocessing.process")
    if loaders is None or process is None or not process._children:
        return
    kind: Any = loaders._MultiProcessingDataLoaderIter
    reset, next_data, shut_down = kind._reset, kind._next_data, kind._shutdown_workers
    forget_pids = loaders._utils.signal_handling._remove_worker_pids
    me = os.getpid()

    def is_own(iterator: Any) -> bool:
        workers = getattr(iterator, "_workers", None)
        return not workers or workers[0]._parent_pid == os.getpid() or os.getpid() != me

    def _reset(iterator: Any, loader: Any, first_iter: bool = False) -> None:
        if is_own(iterator):
            reset(iterator, loader, first_iter)
        else:
            kept.append(dict(vars(iterator)))
            forget_pids(id(iterator))
            vars(iterator).clear()
            iterator.__init__(loader)

    def _next_data(iterator: Any) -> Any:
        if not is_own(iterator):
            raise NotInRanks(
                "this iterator over a DataLoader was begun in the notebook, and its workers belong to the notebook; "
                "write iter(loader) in the cell"
            )
        return next_data(iterator)

    def _shutdown_workers(iterator: Any) -> None:
        if is_own(iterator):
            shut_down(iterator)
        else:
            kept.append(dict(vars(iterator)))
            forget_pids(id(iterator))  # torch stores them by the iterator's id, which another object may get now

    kind._reset, kind._next_data, kind._shutdown_workers = _reset, _next_data, _shutdown_workers


_EVERY_S = 2.0
_VAIN_S = 8.0
_IDLE_TICKS = 10
"""Hundredths of a second that a waiting thread may compute in a second."""
_WAKE_NOBODY = ("tqdm", "multiprocessing.queues")
"""Modules whose threads in a rank only write."""

LOST_THREADS = "nbaccel-lost-threads"
"""The thread of the project that `threading` knows and that wakes no waiting thread. Others do: one writes a checkpoint
that the program waits for."""

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


class LostThreads:
    """Watches the main thread of a rank whose notebook had `threads`.

    A fork keeps only the thread that forks. Work that another thread of the notebook does (a prefetcher that fills a
    queue, a writer that empties one) would keep the rank waiting for ever. So the main thread is checked from time to
    time. Its wait is in vain if it waits without a limit for a condition or a lock of Python, has not moved for some
    seconds, and no thread of the rank is left that could wake it. A wait with a limit, again and again at one place, as
    `while not event.wait(5)` of dask does, may end otherwise: of that one line tells.

    Args:
        interrupt: Raises its argument in the main thread, where the user's code is running.
    """

    def __init__(self, rank: int, threads: Sequence[threading.Thread], interrupt: Callable[[Exception], None]) -> None:
        self._rank = rank
        self._names = [thread.name for thread in threads]
        self._interrupt = interrupt

    def start(self) -> None:
        """Begin to watch, in a thread; a notebook without threads of its own needs no watch."""
        if self._names:
            threading.Thread(target=self._run, name=LOST_THREADS, daemon=True).start()

    def _run(self) -> None:
        seen: tuple[int, int, int] | None = None
        since = time.monotonic()
        rounds = _Rounds()
        while True:
            time.sleep(_EVERY_S)
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            if frame is not None and rounds.are_in_vain(frame) and not self._may_be_woken():
                line = self._sentence(frame, frame.f_locals.get("self")).replace("\n ", "")
                sys.stdout.write(f"nbaccel: {line}\n")
                sys.stdout.flush()
            place = None if frame is None else (id(frame), frame.f_lasti, _cpu_ticks())
            if frame is None or place != seen:
                seen, since = place, time.monotonic()
            elif time.monotonic() - since >= _VAIN_S:
                awaited = self._awaited_in_vain(frame)
                since = time.monotonic()
                if awaited is not None:
                    self._interrupt(NotInRanks(self._sentence(frame, awaited)))
            del frame  # the frame keeps the user's objects alive

    def _may_be_woken(self) -> bool:
        """Return whether a thread of the rank is left that may signal what the main thread waits for."""
        others = [each for each in threading.enumerate() if each is not threading.main_thread()]
        return any(each.name != LOST_THREADS and not is_of(each, _WAKE_NOBODY) for each in others)

    def _awaited_in_vain(self, frame: FrameType) -> Any:
        """Return the condition or lock that no thread is left to signal; None if a thread may do it."""
        if self._may_be_woken():
            return None
        if _is_wait(frame):
            names = frame.f_locals
            return names.get("self") if names.get("timeout") is None else None
        return _lock_in_line(frame)

    def _sentence(self, frame: FrameType, awaited: Any) -> str:
        frames: list[FrameType] = []
        outer: FrameType | None = frame
        while outer is not None:
            frames.append(outer)
            outer = outer.f_back
        cell = next((each for each in reversed(frames) if is_users(each.f_code.co_filename)), frame)
        names = {**cell.f_globals, **cell.f_locals}
        objects = [
            awaited,
            *(each.f_locals["self"] for each in frames[: frames.index(cell)] if "self" in each.f_locals),
        ]
        name, called = "", objects[-1]
        for each in objects:  # the outermost object that the cell has a name for
            found = next((name for name, value in names.items() if value is each and not name.startswith("_")), None)
            name, called = (name, called) if found is None else (found, each)
        kind = f"{type(called).__module__}.{type(called).__qualname__}"
        what = f"{name} ({kind})" if name else f"an object of {kind}"
        file, line = cell.f_code.co_filename, cell.f_lineno
        return (
            f"rank {self._rank} waits for a thread of the notebook, and threads do not live on in ranks: "
            f"{what} at {cell_name(file) or file}, line {line}: {linecache.getline(file, line).strip()}\n"
            f"  Threads of the notebook: {', '.join(self._names[:6])}. Make {name or 'it'} in this cell, so that "
            "its thread belongs to the rank, or use it in a cell without %%accelerate."
        )


class _Rounds:
    """Notices that the main thread waits with a limit, again and again at one place. Said once in a process."""

    def __init__(self) -> None:
        self._place: tuple[int, int] | None = None
        self._since = 0.0
        self._ticks = 0
        self._is_told = False

    def are_in_vain(self, frame: FrameType) -> bool:
        """Return whether the waits have gone on for long, and for more than two of their limits, without computing."""
        timeout = frame.f_locals.get("timeout") if _is_wait(frame) else None
        outer: FrameType | None = frame
        while outer is not None and outer.f_code.co_filename == threading.__file__:
            outer = outer.f_back
        place = None if outer is None or not isinstance(timeout, int | float) else (id(outer), outer.f_lasti)
        now, ticks = time.monotonic(), _cpu_ticks()
        if place is None or place != self._place:
            self._place, self._since, self._ticks = place, now, ticks
            return False
        waited_s = now - self._since
        is_idle = ticks - self._ticks < _IDLE_TICKS * waited_s
        self._is_told = self._is_told or not is_idle
        if self._is_told or timeout is None or waited_s < 2 * max(timeout, _VAIN_S):
            return False
        self._is_told = True
        return True


def _is_wait(frame: FrameType) -> bool:
    return frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait"


def _lock_in_line(frame: FrameType) -> Any:
    """Return the lock that the line is about to take: by `with lock:` or `lock.acquire()`; None if there is none."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    if not (line.startswith("with ") and line.endswith(":")) and ".acquire(" not in line:
        return None
    names = {**frame.f_globals, **frame.f_locals}
    for path in _NAME.findall(line):
        first, *attributes = path.removesuffix(".acquire").split(".")
        value = names.get(first)
        for attribute in attributes:
            value = vars(value).get(attribute) if hasattr(value, "__dict__") else None
        if type(value) in (type(threading.Lock()), type(threading.RLock())) and repr(value).startswith("<locked"):
            return value
    return None


def _cpu_ticks() -> int:
    """Return the processor time that the main thread has used: a thread that computes does not wait."""
    with open(f"/proc/self/task/{os.getpid()}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
