"""Record what a program saves in a dry run: path, bytes, seconds, and the loops it stands in. Runs in ranks.

Seen are `torch.save`, `save_file` of safetensors, and `numpy.save`, `savez` and `savez_compressed`, also where a module
has imported the function by its name; and checkpoints of this package (`DryRunHooks`). Not seen: `pickle.dump`, and
files that a program or a library writes by itself.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from nbaccel.features.check.dry_run.device_clock import device_seconds

__all__ = ["SavedFiles"]

_FUNCTIONS = {
    "torch": ("save",),
    "safetensors.torch": ("save_file",),
    "numpy": ("save", "savez", "savez_compressed"),
}
_FILES = {"torch.save": 1, "safetensors.torch.save_file": 1}
"""Position of the file among the arguments; otherwise 0."""
_SUFFIXES = {"numpy.save": ".npy", "numpy.savez": ".npz", "numpy.savez_compressed": ".npz"}
_KEYWORDS = ("f", "filename", "file")


class SavedFiles:
    """Saves of this process, each a record of the kind "save", and at the end one of the files that are still there.

    Args:
        write: Appends a record.
        open_loops: Returns the numbers of the loops that the program is in.
        part: Returns what measures the time of a part of a step while entered.
        original: Returns the path that the program has given, of one that may have been redirected.
    """

    def __init__(
        self,
        write: Callable[[Mapping[str, Any]], None],
        open_loops: Callable[[], Sequence[int]] = list,
        part: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        original: Callable[[str], str] = str,
    ) -> None:
        self._write = write
        self._original = original
        self._open_loops = open_loops
        self._part = part
        self._inside = threading.local()
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._paths: dict[str, None] = {}
        self._pid = self._thread = 0

    def begin(self) -> None:
        """Record saves from now on. Imports the libraries of the functions, where they are installed."""
        self._pid, self._thread = os.getpid(), threading.get_ident()
        ours: dict[int, tuple[Any, Any]] = {}
        for module, names in _FUNCTIONS.items():
            with suppress(ImportError, AttributeError):
                if importlib.util.find_spec(module) is not None:
                    owner = importlib.import_module(module)
                    for name in names:
                        real = getattr(owner, name)
                        ours[id(real)] = real, self._recorded(real, f"{module}.{name}")
        for holder in list(sys.modules.values()):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if id(value) in ours:
                    real, recorded = ours[id(value)]
                    self._replaced.append((holder, name, real, recorded))
                    setattr(holder, name, recorded)

    def end(self) -> None:
        """Put the functions back, unless they were wrapped meanwhile, and record which files are still there."""
        while self._replaced:
            owner, name, real, ours = self._replaced.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, real)
        if self._paths:
            self._write({"kind": "saves_left", "paths": [path for path in self._paths if os.path.exists(path)]})

    def loops(self) -> list[int]:
        """Return the loops that the program is in; none outside of its thread."""
        return list(self._open_loops()) if threading.get_ident() == self._thread else []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that the program waits for a save, which may go on in the background, as "saving"."""
        device_seconds()  # what the device was asked for before is no part of it
        with self._part("saving"):
            yield

    @contextmanager
    def saving(
        self,
        path: str,
        nbytes: Callable[[], int],
        loops: Sequence[int] | None = None,
        keeps: int | None = None,
    ) -> Iterator[None]:
        """Record what happens within as one save, unless it is within another one.

        Args:
            nbytes: Returns what it took on the disk, afterwards.
            loops: That the program was in; None: the present ones.
            keeps: How many of such saves stay; None: all of them, as far as is known.
        """
        if getattr(self._inside, "is_saving", False) or os.getpid() != self._pid:
            yield
            return
        path = self._original(path)
        is_here = threading.get_ident() == self._thread
        loops = self.loops() if loops is None else loops
        self._inside.is_saving = True
        began = device_seconds() if is_here else time.perf_counter()  # a save waits for what was asked for before
        try:
            with self._part("saving") if is_here else nullcontext():
                yield
        finally:
            self._inside.is_saving = False
        self._paths |= {path: None} if path else {}
        self._write(
            {
                "kind": "save",
                "path": path,
                "bytes": nbytes(),
                "seconds": time.perf_counter() - began,
                "loops": list(loops),
                "keeps": keeps,
            }
        )

    def _recorded(self, real: Callable[..., Any], function: str) -> Callable[..., Any]:
        @functools.wraps(real)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            file = next((kwargs[each] for each in _KEYWORDS if each in kwargs), None)
            at = _FILES.get(function, 0)
            if file is None and at < len(args):
                file = args[at]
            path, size = _measure(file, _SUFFIXES.get(function, ""))
            with self.saving(path, size):
                return real(*args, **kwargs)

        return recorded


def _measure(file: Any, suffix: str) -> tuple[str, Callable[[], int]]:
    """Return the path of a file, "" for one without, and a function that returns how many bytes were written."""
    if isinstance(file, str | os.PathLike):
        path = os.fspath(file)
        if suffix and not str(path).endswith(suffix):
            path = f"{path}{suffix}"
        return os.path.abspath(path), lambda: _size(path)
    began = _position(file)
    name = getattr(file, "name", "")
    return os.path.abspath(name) if isinstance(name, str) and name else "", lambda: max(0, _position(file) - began)


def _position(file: Any) -> int:
    with suppress(Exception):  # a file that cannot say it
        return int(file.tell())
    return 0


def _size(path: Any) -> int:
    with suppress(OSError):
        return os.path.getsize(path)
    return 0
