"""Find libraries whose threads a fork would lack, and that the cell leads to. Runs in the kernel.

These threads belong to C code, or are Python's own behind a library's functions: no name leads to them, and what waits
for one waits for ever, or the library ends the process. They are known by their names. A cell that does not lead to
the library, by a value, a function or a module, forks as ever.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from nbaccel.namespace.objects_behind import ObjectsBehind

__all__ = ["threads_a_fork_lacks"]

_BY_NAME: Mapping[str, tuple[str, ...]] = {
    # No fork after its threads have begun: https://docs.pola.rs/user-guide/misc/multiprocessing/.
    "polars": ("polars-",),
    "dask": ("Dask-", "IO loop"),
    "distributed": ("Dask-", "IO loop"),
}
"""Packages, with the beginnings of the names that their threads have."""

# numba ends a forked child itself where it uses OpenMP: https://github.com/numba/numba/pull/6324.
_NOT_SAFE = ("omp", "workqueue")
"""Layers of numba that end, or wait for ever, in a fork."""


def threads_a_fork_lacks(values: Callable[[], Mapping[str, Any]]) -> str | None:
    """Return why a fork could not use a library that `values` lead to, as half a sentence; None if it could.

    Args:
        values: A function that returns the values of the cell's names; it is called only if a library has such threads.
    """
    libraries = {name for name in (*_BY_NAME, "numba", "fsspec") if name in sys.modules}
    if not libraries:
        return None
    names = {thread.name for thread in threading.enumerate()}
    if "polars" in libraries:
        names |= set(_names_of_tasks())
    running = [name for name in _BY_NAME if name in libraries and any(map(_starts(_BY_NAME[name]), names))]
    if "numba" in libraries and _numba_has_threads():
        running.append("numba")
    if "fsspec" in libraries and "fsspecIO" in names and not hasattr(sys.modules["fsspec.asyn"], "reset_after_fork"):
        running.append("fsspec")
    if not running:
        return None
    packages = ObjectsBehind.of(values(), into_libraries=False).packages()
    library = next((name for name in running if name in packages), None)
    return None if library is None else f"{library} has threads in the notebook, which a fork lacks"


def _starts(beginnings: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda name: name.startswith(beginnings)


def _names_of_tasks() -> Iterator[str]:
    """Yield the names that the system has of all threads, also of those that are not Python's."""
    with suppress(OSError):
        for task in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as name:
                yield name.read().strip()


def _numba_has_threads() -> bool:
    """Return whether numba has started threads that do not live on in a fork; they have no names of their own."""
    parallel = sys.modules.get("numba.np.ufunc.parallel")
    if parallel is None or not getattr(parallel, "_is_initialized", False):
        return False
    with suppress(Exception):  # no parallel function has run
        return sys.modules["numba"].threading_layer() in _NOT_SAFE
    return False
