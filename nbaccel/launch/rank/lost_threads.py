"""LostThreads: ends a wait for a thread of the notebook, which does not exist in a forked rank. Runs in forked ranks.

A fork keeps only the thread that forks. Work that another thread of the notebook does (a prefetcher that fills a queue,
a writer that empties one) would keep the rank waiting for ever. So the main thread is checked from time to time. Its
wait is in vain if it waits without a limit for a condition or a lock of Python, has not moved for some seconds, and no
thread of the rank is left that could wake it.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import FrameType, ModuleType
from typing import Any

from nbaccel.errors import NotInRanks
from nbaccel.launch.rank.jupyter import cell_name
from nbaccel.launch.rank.look import is_users

__all__ = ["LostThreads", "threads_held_by", "threads_of_the_notebook"]

_EVERY_S = 2.0
_VAIN_S = 8.0
_SERVANTS = ("nbaccel", "ipykernel", "IPython", "zmq", "tornado", "tqdm", "debugpy", "pydevd", "traitlets", "psutil")
"""Packages whose threads serve the notebook itself: no program waits for one."""

_WAKE_NOBODY = ("tqdm", "multiprocessing.queues")
"""Modules whose threads in a rank only write."""

_WATCHES = ("nbaccel-death-watch", "nbaccel-stacks", "nbaccel-telemetry", "nbaccel-lost-threads")
"""Threads of the project that wake no waiting thread. Others do: one writes a checkpoint that the program waits for."""

_MOST_OBJECTS = 2000
"""Number of the notebook's objects that are searched before a start; it takes some milliseconds."""

_OPENED_AGAIN = ("concurrent.futures", "multiprocessing", "torch", "tensorboard")
"""Modules whose objects with threads a rank opens again by itself (`inherited.py`), or that wait for none."""

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def threads_of_the_notebook() -> list[threading.Thread]:
    """Return threads of this process that a program may wait for. Called in the kernel, in the thread that forks."""
    mine = (threading.main_thread(), threading.current_thread())
    return [thread for thread in threading.enumerate() if thread not in mine and not _is_of(thread, _SERVANTS)]


def threads_held_by(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the names whose values hold a thread of the program, or an object of one, with the thread's name.

    Called in the kernel. It follows attributes and the standard containers, and runs none of their code.

    >>> threads_held_by({"x": [1, 2], "word": "x"})
    {}
    """
    alive = {id(obj): thread for thread in threads_of_the_notebook() for obj in (thread, *_worked_on_by(thread))}
    held: dict[str, str] = {}
    seen: set[int] = set()
    for name, value in values.items() if alive else ():
        todo = [value]
        while todo and len(seen) < _MOST_OBJECTS:
            obj = todo.pop()
            if id(obj) in alive:
                held[name] = alive[id(obj)].name
                break
            if id(obj) not in seen:
                seen.add(id(obj))
                todo += _parts(obj)
    return held


def _worked_on_by(thread: threading.Thread) -> list[Any]:
    """Return the object whose method the thread runs, and its arguments; plain values are left out."""
    target = getattr(thread, "_target", None)
    given = [getattr(target, "__self__", None), *getattr(thread, "_args", ()), *getattr(thread, "_kwargs", {}).values()]
    return [obj for obj in given if not issubclass(type(obj), int | float | str | bytes | tuple | type(None))]


def _parts(obj: Any) -> list[Any]:
    kind = type(obj)
    if kind in (list, tuple, set, frozenset):
        return list(islice(obj, _MOST_OBJECTS))
    if kind is dict:
        return list(islice(obj.values(), _MOST_OBJECTS))
    if issubclass(kind, type | ModuleType) or str(kind.__module__).startswith(_OPENED_AGAIN):
        return []
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return []
    return list(islice(attributes.values(), _MOST_OBJECTS)) if type(attributes) is dict else []


def _is_of(thread: threading.Thread, modules: Sequence[str]) -> bool:
    """Return whether the thread does the work of one of `modules` or of a module in them."""
    kind = type(thread)
    work = getattr(thread, "_target", None)
    module = str(getattr(work, "__module__", "") if kind is threading.Thread else kind.__module__)
    return any(module == name or module.startswith(f"{name}.") for name in modules)


class LostThreads:
    """Watches the main thread of a rank whose notebook had `threads`.

    interrupt: raises its argument in the main thread, where the user's code is running.
    """

    def __init__(self, rank: int, threads: Sequence[threading.Thread], interrupt: Callable[[Exception], None]) -> None:
        self._rank = rank
        self._names = [thread.name for thread in threads]
        self._interrupt = interrupt

    def start(self) -> None:
        """Begin to watch, in a thread; a notebook without threads of its own needs no watch."""
        if self._names:
            threading.Thread(target=self._run, name="nbaccel-lost-threads", daemon=True).start()

    def _run(self) -> None:
        seen: tuple[int, int, int] | None = None
        since = time.monotonic()
        while True:
            time.sleep(_EVERY_S)
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            place = None if frame is None else (id(frame), frame.f_lasti, _cpu_ticks())
            if frame is None or place != seen:
                seen, since = place, time.monotonic()
            elif time.monotonic() - since >= _VAIN_S:
                awaited = self._awaited_in_vain(frame)
                since = time.monotonic()
                if awaited is not None:
                    self._interrupt(NotInRanks(self._sentence(frame, awaited)))
            del frame  # the frame keeps the user's objects alive

    def _awaited_in_vain(self, frame: FrameType) -> Any:
        """Return the condition or lock that no thread is left to signal; None if a thread may do it."""
        others = [each for each in threading.enumerate() if each is not threading.main_thread()]
        if any(each.name not in _WATCHES and not _is_of(each, _WAKE_NOBODY) for each in others):
            return None
        code = frame.f_code
        if code.co_filename == threading.__file__ and code.co_name == "wait":
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
