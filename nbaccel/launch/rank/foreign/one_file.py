"""Let a file that every rank of a raw loop saves be written once, by rank 0. Runs in ranks; imports no torch.

`torch.save` and the `save_file` of safetensors do nothing in other ranks where rank 0 saves the same path, and return
when the file is complete. `torch.load` and `load_file` wait until rank 0 has written what it has begun, and what this
rank has skipped. Ranks that save paths of their own write them. What rank 0 saves stands in a journal, a file of the
run's. Not covered: open files, names such as `from torch import save` of the notebook, `numpy.save`, `pickle.dump`.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from nbaccel.launch.rank.loaded import when_loaded
from nbaccel.world import World

__all__ = ["write_one_file"]

_LONGEST_WAIT_S = 60.0
_LONGEST_DELAY_S = 2.0
"""How late rank 0 may come to a save that the ranks have in common."""
_POLL_S = 0.005
_BEGUN, _DONE, _READ = "begun", "done", "read"

_KNOW_RANKS = (
    *("nbaccel.", "accelerate.", "deepspeed.", "torch.distributed.", "transformers.trainer"),
    *("lightning.", "lightning_fabric.", "pytorch_lightning."),
)
"""Modules that choose by themselves which ranks save."""


def write_one_file(world: World, store_path: str) -> None:
    """Let what this rank saves be rank 0's file, where that saves it too. Once per process.

    store_path: a path that is the same in all ranks of the run, in a folder of the run's own.
    """
    journal = _Journal(f"{store_path}.files")
    files = _Writer(journal) if world.is_main_process else _Follower(journal, world)
    when_loaded({"torch": partial(_wrap_torchs, files), "safetensors.torch": partial(_wrap_safetensors, files)})


class _Journal:
    """What rank 0 has begun to save, has saved and has read, a line each."""

    def __init__(self, path: str) -> None:
        self._path = path

    def note(self, what: str, path: str) -> None:
        with suppress(OSError), open(self._path, "a") as file:
            file.write(_line(what, path))

    def count(self, what: str, path: str) -> int:
        line = _line(what, path)
        with suppress(OSError), open(self._path) as file:
            return sum(each == line for each in file)
        return 0

    @contextmanager
    def lock(self, path: str, kind: int) -> Iterator[None]:
        """Keep a reader of `path` and its writer apart.  kind: `fcntl.LOCK_SH` to read, `fcntl.LOCK_EX` to write."""
        with ExitStack() as stack:
            with suppress(OSError):
                fcntl.flock(stack.enter_context(open(f"{self._path}.{zlib.crc32(os.fsencode(path))}", "w")), kind)
            yield


class _Files(Protocol):
    """How a rank saves and loads.  path: absolute.  saves, loads: do it."""

    def save(self, path: str, saves: Callable[[], Any]) -> Any: ...

    def load(self, path: str, loads: Callable[[], Any]) -> Any: ...


class _Writer:
    """Rank 0 saves, and tells the others."""

    def __init__(self, journal: _Journal) -> None:
        self._journal = journal
        self._saved: set[str] = set()

    def save(self, path: str, saves: Callable[[], Any]) -> Any:
        self._saved.add(path)
        self._journal.note(_BEGUN, path)
        try:
            with self._journal.lock(path, fcntl.LOCK_EX):
                return saves()
        finally:
            self._journal.note(_DONE, path)

    def load(self, path: str, loads: Callable[[], Any]) -> Any:
        if path in self._saved:
            self._journal.note(_READ, path)  # nobody waits for a save that is not to come before this
        return loads()


class _Follower:
    """Another rank: the k-th save of a path is rank 0's k-th of it, and so is the k-th time that it is loaded."""

    def __init__(self, journal: _Journal, world: World) -> None:
        self._journal = journal
        self._world = world
        self._saved: Counter[str] = Counter()
        self._loaded: Counter[str] = Counter()
        self._is_told = world.rank != 1  # one rank says it

    def save(self, path: str, saves: Callable[[], Any]) -> Any:
        self._saved[path] += 1
        number = self._saved[path]
        is_common = _wait(lambda: self._journal.count(_BEGUN, path) >= number, _LONGEST_DELAY_S)
        if is_common:
            _wait(lambda: self._journal.count(_DONE, path) >= number, _LONGEST_WAIT_S)
        elif not self._journal.count(_BEGUN, path):
            return saves()
        if not self._is_told:
            self._is_told = True
            warnings.warn(
                f"{os.path.basename(path)} is one file, saved by rank 0 of {self._world.world_size}; other ranks skip "
                "a path that rank 0 saves. A file of each rank: put the rank into its name, or %%accelerate "
                "--independent.",
                stacklevel=3,
            )
        return None

    def load(self, path: str, loads: Callable[[], Any]) -> Any:
        begun = self._journal.count(_BEGUN, path)
        if not begun and not self._saved[path]:
            return loads()
        self._loaded[path] += 1
        saves, reads = max(begun, self._saved[path]), self._loaded[path]

        def is_complete() -> bool:
            done = self._journal.count(_DONE, path)
            return done >= saves or (done >= begun and self._journal.count(_READ, path) >= reads)

        if begun and not _wait(is_complete, _LONGEST_WAIT_S):
            warnings.warn(
                f"rank {self._world.rank} loads {path} although rank 0 of {self._world.world_size} has not saved what "
                f"this rank skipped, in {_LONGEST_WAIT_S:.0f} s. It may be older: let all ranks save it equally often.",
                stacklevel=3,
            )
        with self._journal.lock(path, fcntl.LOCK_SH):
            return loads()


def _wrap_torchs(files: _Files, torch: Any) -> None:
    for name, wrapped in (
        ("save", _wrapped(torch.save, files.save, 1, "f")),
        ("load", _wrapped(torch.load, files.load, 0, "f")),
    ):
        setattr(torch, name, wrapped)
        setattr(torch.serialization, name, wrapped)  # where pickle finds it


def _wrap_safetensors(files: _Files, module: Any) -> None:
    module.save_file = _wrapped(module.save_file, files.save, 1, "filename")
    module.load_file = _wrapped(module.load_file, files.load, 0, "filename")


def _wrapped(
    function: Callable[..., Any], act: Callable[[str, Callable[[], Any]], Any], position: int, name: str
) -> Callable[..., Any]:
    """`function`, by way of `act` where a program gives it a path.  position, name: of that argument."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get(name)
        caller = f"{sys._getframe(1).f_globals.get('__name__')}."
        if not isinstance(given, (str, os.PathLike)) or caller.startswith(_KNOW_RANKS):
            return function(*args, **kwargs)
        return act(os.path.abspath(os.fsdecode(given)), partial(function, *args, **kwargs))

    return call


def _line(what: str, path: str) -> str:
    return f"{what} {json.dumps(path)}\n"


def _wait(is_so: Callable[[], bool], longest_s: float) -> bool:
    """Whether it is so at last."""
    until = time.monotonic() + longest_s
    while not (result := is_so()) and time.monotonic() < until:
        time.sleep(_POLL_S)  # ended by rank 0's line, or by the limit
    return result
