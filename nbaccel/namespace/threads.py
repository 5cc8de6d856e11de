"""Threads of the notebook, which a fork does not have, and the names that work by one. Runs in kernel and ranks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from types import ModuleType
from typing import Any

from nbaccel.base.values import attributes_of

__all__ = ["is_of", "threads_held_by", "threads_of_the_notebook"]

_SERVANTS = ("nbaccel", "ipykernel", "IPython", "zmq", "tornado", "tqdm", "debugpy", "pydevd", "traitlets", "psutil")
"""Packages whose threads serve the notebook itself: no program waits for one."""

_MOST_OBJECTS = 2000
"""Number of the notebook's objects that are searched before a start; it takes some milliseconds."""

_OPENED_AGAIN = ("concurrent.futures", "multiprocessing", "torch", "tensorboard")
"""Modules whose objects with threads a rank opens again by itself (`inherited.py`), or that wait for none."""


def threads_of_the_notebook() -> list[threading.Thread]:
    """Return threads of this process that a program may wait for. Called in the kernel, in the thread that forks."""
    mine = (threading.main_thread(), threading.current_thread())
    return [thread for thread in threading.enumerate() if thread not in mine and not is_of(thread, _SERVANTS)]


def threads_held_by(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the names whose values hold a thread of the program, or an object of one, with the thread's name.

    Called in the kernel. It follows attributes and the standard containers, and runs none of their code.

    Example:
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
    return list(islice((attributes_of(obj) or {}).values(), _MOST_OBJECTS))


def is_of(thread: threading.Thread, modules: Sequence[str]) -> bool:
    """Return whether the thread does the work of one of `modules` or of a module in them."""
    kind = type(thread)
    work = getattr(thread, "_target", None)
    module = str(getattr(work, "__module__", "") if kind is threading.Thread else kind.__module__)
    return any(module == name or module.startswith(f"{name}.") for name in modules)
