"""Lets rank 0 alone write a file that every rank of a raw loop saves. Runs in ranks; imports no torch.

In other ranks `torch.save` and the `save_file` of safetensors do nothing if rank 0 saves the same path, and return when
the file is complete. `torch.load` and `load_file` wait until rank 0 has finished the saves that it has begun, and those
that this rank has skipped. Ranks that save different paths write them. The saves of rank 0 are listed in a journal, a
file of the run. Not covered: open files, names such as `from torch import save` of the notebook, `numpy.save`,
`pickle.dump`: the first file that several ranks open for writing is named, once.

If another rank has made a folder meanwhile, `os.mkdir` raises no error, since a program checks before it makes one. Not
covered: a folder that a rank removes when another has made it.

Removing and renaming are the same: what a rank removes in its k-th call, and another one has removed in its own, is no
error. A file that rank 0 has saved is removed or moved by rank 0 alone, and is such a file where it was moved to; it
keeps a removed file open, and ranks that have not come to their own call load from there, so that no rank waits. Not
covered: what a rank reads by `open`.
"""

from __future__ import annotations

import fcntl
import functools
import io
import json
import os
import shutil
import stat
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Literal, Protocol

from nbaccel.base.notices import is_users
from nbaccel.base.world import World
from nbaccel.launching.ipc.import_hooks import Changes, Replacement
from nbaccel.launching.ipc.rank_part import RankPart

__all__ = ["OneFile", "is_private_file"]

_LONGEST_WAIT_S = 60.0
_LONGEST_DELAY_S = 2.0
"""Seconds that rank 0 may be late for a save that the ranks have in common."""
_POLL_S = 0.005
_BEGUN, _DONE, _READ, _MADE, _OPENED, _TOLD = "begun", "done", "read", "made", "opened", "told"
_REMOVED, _GONE, _PASSED, _HELD, _MOVED = "removed", "gone", "passed", "held", "moved"
_MOST_REMOVED = 1000
"""Number of a rank's removals that are told to the others: each is a line of the journal."""
_MOST_OPENED = 100
"""Number of a rank's files that are compared: the journal is read for each."""

_KNOW_RANKS = (
    *("nbaccel.", "accelerate.", "deepspeed.", "torch.distributed.", "transformers.trainer"),
    *("lightning.", "lightning_fabric.", "pytorch_lightning."),
)
"""Modules that choose by themselves which ranks save."""


class OneFile(RankPart):
    """Lets rank 0 alone write the files that this rank and rank 0 save.

    Args:
        store_path: A path that is the same in all ranks of the run, in a folder of the run's own.
        written: Files that the notebook has open for writing.
    """

    def __init__(self, world: World, store_path: str, written: Sequence[Any] = ()) -> None:
        journal = _Journal(f"{store_path}.files")
        self._written = written
        self._files = _Writer(journal, world.world_size) if world.is_main_process else _Follower(journal, world)
        self._folders = _Folders(journal)
        self._opened = _OpenedFiles(journal, world)
        self._changes = _changes().current()

    def install(self) -> None:
        _acting.files, _acting.folders = self._files, self._folders
        self._changes.put()
        sys.addaudithook(self._opened.look)  # stays until the process, a rank, ends
        for file in self._written:
            self._opened.watch(file)


class _Journal:
    """The saves that rank 0 has begun and finished, its loads, and the folders and files of all ranks, one per line."""

    def __init__(self, path: str) -> None:
        self.path = path

    def note(self, what: str, path: str) -> None:
        with suppress(OSError), open(self.path, "a") as file:
            file.write(_line(what, path))

    def count(self, what: str, path: str) -> int:
        line = _line(what, path)
        with suppress(OSError), open(self.path) as file:
            return sum(each == line for each in file)
        return 0

    def last(self, what: str) -> str:
        """Return what was noted last as `what`; empty if nothing was."""
        found = ""
        with suppress(OSError), open(self.path) as file:
            for line in file:
                kind, _, text = line.partition(" ")
                found = json.loads(text) if kind == what else found
        return found

    @contextmanager
    def lock(self, path: str, kind: int) -> Iterator[None]:
        """Keep a reader of `path` and its writer apart.

        Args:
            kind: `fcntl.LOCK_SH` to read, `fcntl.LOCK_EX` to write.
        """
        with ExitStack() as stack:
            with suppress(OSError):
                fcntl.flock(stack.enter_context(open(f"{self.path}.{zlib.crc32(os.fsencode(path))}", "w")), kind)
            yield


class _Files(Protocol):
    """The saving, loading and removing of a rank.

    path: absolute.

    Attributes:
        saves, loads, removes: Functions that do it; `loads` may be given another path.
        target: Where `path` is moved to, absolute; None if it is removed.
    """

    def save(self, path: str, saves: Callable[..., Any]) -> Any: ...

    def load(self, path: str, loads: Callable[..., Any]) -> Any: ...

    def remove(self, path: str, removes: Callable[[], Any], target: str | None = None) -> Any: ...


class _Removals:
    """Removals and renamings by the ranks: the k-th call of a rank is that of the others."""

    def __init__(self, journal: _Journal) -> None:
        self._journal = journal
        self._removed: Counter[str] = Counter()  # by this rank, or by another for it

    def remove(self, path: str, removes: Callable[[], Any]) -> Any:
        """Remove `path`, unless another rank has removed it in its own k-th call, and this is the k-th here."""
        if self._removed.total() >= _MOST_REMOVED:
            return removes()
        with self._journal.lock(path, fcntl.LOCK_EX):
            try:
                found = removes()
            except FileNotFoundError:
                if self._removed[path] >= self._journal.count(_REMOVED, path) or os.path.lexists(path):
                    raise
                found = None
            else:
                self._journal.note(_REMOVED, path)
            self._removed[path] += 1
        return found


class _Writer:
    """Rank 0: saves and removes, and writes it into the journal.

    Args:
        world_size: The world size of the run.
    """

    def __init__(self, journal: _Journal, world_size: int) -> None:
        self._journal = journal
        self._others = world_size - 1
        self._saved: set[str] = set()
        self._removals = _Removals(journal)
        self._removed: Counter[str] = Counter()
        self._held: list[tuple[str, int, int]] = []  # path, the number of its removal, and its descriptor

    def remove(self, path: str, removes: Callable[[], Any], target: str | None = None) -> Any:
        below = _below(path, self._saved)
        if not below:
            return self._removals.remove(path, removes)
        self._let_go()
        moved = _moved(path, below, target)
        self._saved.update(moved)
        for each in moved:
            self._journal.note(_BEGUN, each)
        for each in below:
            self._removed[each] += 1
            number = self._removed[each]
            with suppress(OSError):
                descriptor = os.open(each, os.O_RDONLY | os.O_CLOEXEC)
                self._held.append((each, number, descriptor))
                self._journal.note(_of(_HELD, each, number), f"/proc/{os.getpid()}/fd/{descriptor}")
            if target is not None:
                self._journal.note(_of(_MOVED, each, number), _moved(path, [each], target)[0])
            self._journal.note(_REMOVED, each)  # before it is gone
        try:
            return removes()
        finally:
            for each in moved:
                self._journal.note(_DONE, each)
            for each in below:
                self._journal.note(_GONE, each)

    def _let_go(self) -> None:
        """Close files that all ranks have removed, and the oldest ones if they take more than half of what is free."""
        held = [each for each in self._held if self._journal.count(_PASSED, each[0]) < each[1] * self._others]
        sizes = [os.fstat(descriptor).st_size for _, _, descriptor in held]
        while held and sum(sizes) > _free_bytes(held[0][2]) / 2:
            held, sizes = held[1:], sizes[1:]
        for each in self._held:
            if each not in held:
                os.close(each[2])
        self._held = held

    def save(self, path: str, saves: Callable[..., Any]) -> Any:
        self._saved.add(path)
        self._journal.note(_BEGUN, path)
        try:
            with self._journal.lock(path, fcntl.LOCK_EX):
                return saves()
        finally:
            self._journal.note(_DONE, path)

    def load(self, path: str, loads: Callable[..., Any]) -> Any:
        if path in self._saved:
            self._journal.note(_READ, path)  # no rank waits here for a save that comes later
        return loads()


class _Follower:
    """A rank other than 0: skips the saves that rank 0 makes too, and waits for rank 0's file before it loads one.

    Saves of a path are matched by their number: the second save of a path here is the second one on rank 0. Loads are
    matched in the same way.
    """

    def __init__(self, journal: _Journal, world: World) -> None:
        self._journal = journal
        self._world = world
        self._saved: Counter[str] = Counter()
        self._loaded: Counter[str] = Counter()
        self._removals = _Removals(journal)
        self._removed: Counter[str] = Counter()
        self._is_told = world.rank != 1  # one rank says it

    def save(self, path: str, saves: Callable[..., Any]) -> Any:
        self._saved[path] += 1
        number = self._saved[path]
        is_common = _wait(lambda: self._journal.count(_BEGUN, path) >= number, _LONGEST_DELAY_S)
        if is_common:
            _wait(lambda: self._journal.count(_DONE, path) >= number, _LONGEST_WAIT_S)
        elif not self._journal.count(_BEGUN, path):
            with self._journal.lock(path, fcntl.LOCK_EX):  # rank 0 may only be late, and saves it over this one then
                return saves()
        if not self._is_told and is_users(sys._getframe(2).f_code.co_filename):  # nobody can name a library's files
            self._is_told = True
            _say(
                f"{os.path.basename(path)} is saved by rank 0 alone; for a file of each rank put the rank into its name"
            )
        return None

    def load(self, path: str, loads: Callable[..., Any]) -> Any:
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
            held = self._held_by_rank_0(path)
            try:
                return loads(held) if held else loads()
            except FileNotFoundError:
                held = self._held_by_rank_0(path)  # rank 0 has removed it meanwhile
                if not held:
                    raise
                return loads(held)

    def _held_by_rank_0(self, path: str) -> str:
        """Return another name of a file that rank 0 has removed and this rank has not; empty if there is none."""
        number = self._removed[path] + 1
        if self._journal.count(_REMOVED, path) < number:
            return ""
        held = self._journal.last(_of(_HELD, path, number))
        return held if held and os.path.exists(held) else ""

    def remove(self, path: str, removes: Callable[[], Any], target: str | None = None) -> Any:
        below = _below(path, self._saved)
        if not below:
            return self._removals.remove(path, removes)
        for each in below:
            self._removed[each] += 1
            self._journal.note(_PASSED, each)
        if not _wait(
            lambda: all(self._journal.count(_GONE, each) >= self._removed[each] for each in below), _LONGEST_WAIT_S
        ):
            return removes()
        for each in below:  # where rank 0 has moved them: it has looked whether the target was a folder
            if where := self._journal.last(_of(_MOVED, each, self._removed[each])):
                self._saved[where] += 1
        return target


def _of(what: str, path: str, number: int) -> str:
    """Return what is noted of the `number`-th removal of `path`."""
    return f"{what}:{zlib.crc32(os.fsencode(path))}:{number}"


def _free_bytes(descriptor: int) -> int:
    """Return the free bytes of the file system of an open file, which may have no name any more."""
    system = os.fstatvfs(descriptor)
    return system.f_bavail * system.f_frsize


def _below(path: str, saved: Iterable[str]) -> list[str]:
    """Return those of the saved files that are `path` or lie in it."""
    return [each for each in saved if each == path or each.startswith(path + os.sep)]


def _moved(path: str, below: Sequence[str], target: str | None) -> list[str]:
    """Return where the files `below` are after `path` was moved to `target`: saved files, as they were before."""
    return [] if target is None else [target + each.removeprefix(path) for each in below]


class _Folders:
    """The folders that ranks make."""

    def __init__(self, journal: _Journal) -> None:
        self._journal = journal
        self._made: Counter[str] = Counter()  # by this rank, or by another for it

    def make(self, path: str, makes: Callable[[], None]) -> None:
        """Make the folder `path`, unless another rank has made it in its own k-th call, and this is the k-th here."""
        with self._journal.lock(path, fcntl.LOCK_EX):
            try:
                makes()
            except FileExistsError:
                if self._made[path] >= self._journal.count(_MADE, path) or _is_no_folder(path):
                    raise
            else:
                self._journal.note(_MADE, path)
            self._made[path] += 1


def _is_no_folder(path: str) -> bool:
    """Return whether there is something else at `path`: the rank that made a folder there may have moved it by now."""
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


class _OpenedFiles:
    """The files that this rank opens for writing, compared with those of other ranks."""

    def __init__(self, journal: _Journal, world: World) -> None:
        self._journal = journal
        self._world = world
        self._known: set[str] = set()
        self._is_over = self._is_looking = False

    def look(self, event: str, args: tuple[Any, ...]) -> None:
        """Record an event of Python's; cheap for all but the opening of files, and never raises."""
        if event != "open" or self._is_over or self._is_looking:
            return
        self._is_looking = True  # files opened meanwhile belong to this class
        try:
            path, mode = args[0], args[1]
            if isinstance(mode, str) and mode[:1] in "wa" and isinstance(path, (str, bytes, os.PathLike)):
                home = tempfile.gettempdir() if _is_opened_by_a_line_of_the_user() else ""
                self._note(os.path.abspath(os.fsdecode(path)), "is opened for writing", home)
        except Exception:  # an error here would appear as an error of the program's `open`
            self._is_over = True
        finally:
            self._is_looking = False

    def watch(self, file: Any) -> None:
        """Record the first write to a file that the notebook has open, whatever writes: a handler, a `csv.writer`.

        Args:
            file: The file of Python's own classes. All of them call the `write` of the file below, which writes to the
                descriptor.
        """
        with suppress(Exception):  # a file without one is not watched
            while not isinstance(file, io.FileIO):
                file = file.buffer if isinstance(file, io.TextIOWrapper) else file.raw
            path = os.path.abspath(os.readlink(f"/proc/self/fd/{file.fileno()}"))
            if "write" not in vars(file) and not is_private_file(path):
                vars(file)["write"] = partial(self._first_write, file, path)

    def _first_write(self, file: Any, path: str, data: Any) -> Any:
        del vars(file)["write"]  # the class's own is back
        if not self._is_over:
            self._is_looking = True
            with suppress(Exception):
                self._note(path, "is open in the notebook and written")
            self._is_looking = False
        return file.write(data)

    def _note(self, path: str, how: str, home: str = "") -> None:
        if path in self._known or path.startswith(self._journal.path) or is_private_file(path, home):
            return
        self._known.add(path)
        self._is_over = len(self._known) >= _MOST_OPENED
        with self._journal.lock("", fcntl.LOCK_EX):
            self._journal.note(_OPENED, path)
            if self._journal.count(_OPENED, path) < 2:
                return
            self._is_over = True
            if self._journal.count(_TOLD, ""):
                return
            self._journal.note(_TOLD, "")
        name, ranks = os.path.basename(path), self._world.world_size
        _say(
            f"{name} {how} by more than one of {ranks} ranks: lines that are added stand there once for each rank, and "
            "of a whole file the last rank's is left. Let one rank write it (if accelerator.is_main_process:), or put "
            "the rank into its name"
        )


def _is_opened_by_a_line_of_the_user() -> bool:
    """Return whether the file that is being opened is one of the user's lines', maybe by way of Python's own library.

    Libraries keep caches among the temporary files, and a user a log.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and f"{frame.f_globals.get('__name__')}".partition(".")[0] in sys.stdlib_module_names:
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def _say(text: str) -> None:
    sys.stdout.write(f"nbaccel: {text}\n")
    sys.stdout.flush()


class _Acting:
    """Holds what the functions below act by in this process: they are made once, in the kernel, for all ranks."""

    files: _Files
    folders: _Folders


_acting = _Acting()


@functools.cache  # made once for all runs of a kernel
def _changes() -> Changes:
    return Changes([("os", _of_system), ("torch", _of_torch), ("safetensors.torch", _of_safetensors)])


def _of_system(module: Any) -> list[Replacement]:
    removals = ((os, "remove"), (os, "unlink"), (shutil, "rmtree"))
    moves = ((os, "rename"), (os, "replace"), (shutil, "move"))
    return [
        Replacement([os], "mkdir", _making),
        *(Replacement([module], name, _removing) for module, name in removals),
        *(Replacement([module], name, partial(_removing, moves=True)) for module, name in moves),
    ]


def _of_torch(torch: Any) -> list[Replacement]:
    holders = (torch, torch.serialization)  # pickle finds them in the second
    return [
        Replacement(holders, "save", partial(_wrapped, act="save", position=1, name="f")),
        Replacement(holders, "load", partial(_wrapped, act="load", position=0, name="f")),
    ]


def _of_safetensors(module: Any) -> list[Replacement]:
    return [
        Replacement([module], "save_file", partial(_wrapped, act="save", position=1, name="filename")),
        Replacement([module], "load_file", partial(_wrapped, act="load", position=0, name="filename")),
    ]


def _making(makes: Callable[..., None]) -> Callable[..., None]:
    """Return `makes`, which makes a folder, called through `_acting.folders` for programs."""

    @functools.wraps(makes)
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (caller := f"{frame.f_globals.get('__name__')}.").startswith(("os.", "pathlib.")):
            frame = frame.f_back
        if dir_fd is not None or caller.startswith(("tempfile.", *_KNOW_RANKS)):
            makes(path, mode, dir_fd=dir_fd)
        else:
            _acting.folders.make(os.path.abspath(os.fsdecode(path)), partial(makes, path, mode))

    return mkdir


def _removing(real: Callable[..., Any], moves: bool = False) -> Callable[..., Any]:
    """Return `real`, which removes or moves its first argument, called through `_acting.files` for programs."""
    moves_into = real is shutil.move

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        path = args[0] if args else kwargs.get("path", kwargs.get("src"))
        frame: FrameType | None = sys._getframe(1)
        inner = ("os.", "pathlib.")
        while frame is not None and (caller := f"{frame.f_globals.get('__name__')}.").startswith(inner):
            frame = frame.f_back
        known = ("shutil.", "tempfile.", "multiprocessing.", *_KNOW_RANKS)
        if not isinstance(path, (str, os.PathLike)) or "dir_fd" in kwargs or caller.startswith(known):
            return real(*args, **kwargs)
        path = os.path.abspath(os.fsdecode(path))
        target = (args[1] if len(args) > 1 else kwargs.get("dst")) if moves else None
        if target is not None:
            target = os.path.abspath(os.fsdecode(target))
            if moves_into and os.path.isdir(target):
                target = os.path.join(target, os.path.basename(path))
        found = _acting.files.remove(path, partial(real, *args, **kwargs), target)
        return found if moves_into else None

    return call


def _wrapped(
    function: Callable[..., Any], act: Literal["save", "load"], position: int, name: str
) -> Callable[..., Any]:
    """Return `function`, called through `_acting.files` if a program gives it a path.

    Args:
        act: The method of the files.
        position, name: Those of that argument.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get(name)
        caller = f"{sys._getframe(1).f_globals.get('__name__')}."
        if not isinstance(given, (str, os.PathLike)) or caller.startswith(_KNOW_RANKS):
            return function(*args, **kwargs)

        def does(path: str | None = None) -> Any:
            if path is None:
                return function(*args, **kwargs)
            if len(args) > position:
                return function(*args[:position], path, *args[position + 1 :], **kwargs)
            return function(*args, **{**kwargs, name: path})

        return getattr(_acting.files, act)(os.path.abspath(os.fsdecode(given)), does)

    return call


def _line(what: str, path: str) -> str:
    return f"{what} {json.dumps(path)}\n"


def _wait(is_so: Callable[[], bool], longest_s: float) -> bool:
    """Wait until `is_so` is true; return whether it is."""
    until = time.monotonic() + longest_s
    while not (result := is_so()) and time.monotonic() < until:
        time.sleep(_POLL_S)  # ended by rank 0's line, or by the limit
    return result


def is_private_file(path: str, home: str = "", temporary: str = "") -> bool:
    """Return whether `path` is in a place for devices, temporary files or caches, which no user reads as a result.

    A folder is opened for a temporary file without a name (`tempfile.TemporaryFile`).

    Args:
        home: A folder whose files count even if it is among the temporary ones.
        temporary: By default `tempfile`'s folder.

    Example:
        >>> is_private_file("/dev/null"), is_private_file("/content/best.pt")
        (True, False)
    """
    is_at_home = bool(home) and path.startswith(home + os.sep)
    below = path.removeprefix(home) if is_at_home else path  # home itself may lie below a hidden folder
    if path.startswith(("/dev/", "/proc/")) or f"{os.sep}." in below or f"{os.sep}__pycache__{os.sep}" in below:
        return True
    temporary = temporary or tempfile.gettempdir()
    return os.path.isdir(path) or (not is_at_home and path.startswith(f"{temporary}{os.sep}"))
