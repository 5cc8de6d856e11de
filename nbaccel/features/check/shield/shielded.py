"""Entry of a rank into the file shield of a dry run. Runs in ranks, before anything of ours starts a thread there.

From then on the process, and all that it starts, sees the file systems that `shield/shield_holder.py` has built:
what it writes is discarded. Rights and the working folder are as before. A forked rank also has the files that the
kernel has open or mapped to memory; `_keep_inherited_files` puts those of the shield into their places.

In a user namespace an overlay refuses to rename a folder that existed before, and parts of one file system are several
overlays. `_Renaming` copies there, where the real run would rename.

Not covered: a file of which the kernel has kept no name, since it was deleted, and what a library's thread writes that
was started by the fork itself: OpenTelemetry has one, and with it mlflow.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nbaccel.errors import LaunchRefused
from nbaccel.features.check.shield.mount_table import call_libc, mount_points, read_mounts
from nbaccel.launching.ipc.rank_part import RankPart
from nbaccel.launching.ipc.spec import Task

__all__ = ["Shielded", "enter"]

_CLONE_FS, _CLONE_NEWNS, _CLONE_NEWUSER = 0x00000200, 0x00020000, 0x10000000
_MAP_FIXED = 0x10
_MOST_COPIED_BYTES = 1 << 30
_CAPABILITY_VERSION_3 = 0x20080522
_LEAVE_OUT = ("/dev/", "/proc/", "/sys/")
_DELETED = " (deleted)"


class Shielded(RankPart):
    """Puts a rank behind the `FileShield` whose `entry` is the argument."""

    def enter(self, make_task: Callable[[], Task]) -> Callable[[], Task]:
        """Enter the shield, and return `make_task`; if that fails, a function that raises instead of making a task.

        Raises:
            LaunchRefused: By the function that is returned: what this rank would write would be real.
        """
        return _entered(self.argument, make_task)


def _entered(entry: str, make_task: Callable[[], Task]) -> Callable[[], Task]:
    try:
        enter(entry)
    except OSError as error:
        others = _other_threads()
        advice = f"with --start zygote, since this process has threads ({', '.join(others)})" if others else "again"
        refused = LaunchRefused(
            f"this rank could not enter the file shield of its dry run ({error.strerror or error}), and nothing of the "
            f"cell was run, since its files would be real ones: start the check {advice}."
        )

        def refuse() -> Task:
            raise refused

        return refuse
    return make_task


def enter(entry: str) -> None:
    """Enter the namespaces of a `FileShield` with the calling thread, and those that it starts.

    entry: its `entry`.
    Raises:
        OSError: there is no such shield any more, or this process may not enter it: Linux lets no process with
            several threads into a user namespace.
    """
    namespaces, identity, _ = entry.split(" ", 2)
    here = os.getcwd()
    rights, renaming = _Rights.of_this_process(), _Renaming.among_real_mounts()
    fds = {name: os.open(os.path.join(namespaces, name), os.O_RDONLY) for name in ("user", "mnt")}
    fds["root"] = os.open(os.path.join(namespaces, "../root"), os.O_PATH | os.O_DIRECTORY)
    try:
        if os.readlink(f"/proc/self/fd/{fds['mnt']}") != identity:
            raise OSError(errno.ESRCH, "its process has ended")
        is_alone = not os.path.samestat(os.fstat(fds["user"]), os.stat("/proc/self/ns/user"))
        if is_alone:
            call_libc("setns", fds["user"], _CLONE_NEWUSER)
        call_libc("unshare", _CLONE_FS)  # a library of the notebook may start a thread in each forked process
        call_libc("setns", fds["mnt"], _CLONE_NEWNS)
        os.fchdir(fds["root"])
        os.chroot(".")
        os.chdir(here)
        if is_alone:  # in its user namespace this process may do anything, which it may not in the real run
            rights.apply()
            os.rename, os.replace = renaming.wrapped(os.rename), renaming.wrapped(os.replace)
    finally:
        for fd in fds.values():
            os.close(fd)
    _keep_inherited_files(entry.split(" ", 2)[2])


def _other_threads() -> list[str]:
    """Return the names of the other threads of this process, which may not enter a user namespace then."""
    names = []
    for task in set(os.listdir("/proc/self/task")) - {str(threading.get_native_id())}:
        with suppress(OSError), open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as file:
            names.append(file.read().strip())
    return sorted(names)


class _Renaming:
    """Renames inside of a file system that the shield shows as several.  points: the mounts of the machine."""

    def __init__(self, points: list[str]) -> None:
        self._points = points

    @classmethod
    def among_real_mounts(cls) -> _Renaming:
        """Read the mounts, before the shield is entered."""
        return cls(sorted(mount_points(read_mounts()), key=len, reverse=True))

    def wrapped(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return `os.rename` or `os.replace`, which copies if only the shield refuses."""

        @functools.wraps(function)
        def rename(src: Any, dst: Any, **kwargs: Any) -> None:
            try:
                function(src, dst, **kwargs)
            except OSError as error:
                if error.errno != errno.EXDEV or kwargs or self._mount(src) != self._mount(dst):
                    raise
                _copy_over(os.fspath(src), os.fspath(dst))

        return rename

    def _mount(self, path: Any) -> str:
        """Return the mount in which the entry `path` lies; of a mount itself, that one."""
        parent, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        real = os.path.join(os.path.realpath(parent), name)
        return next(point for point in self._points if real == point or real.startswith(point.rstrip("/") + "/"))


def _copy_over(source: Any, target: Any) -> None:
    """Do by copies what a rename does."""
    if os.path.isdir(source) and not os.path.islink(source):
        if os.path.isdir(target):
            os.rmdir(target)  # raises for one that is not empty, as a rename does
        shutil.copytree(source, target, symlinks=True)
        shutil.rmtree(source)
    else:
        shutil.copy2(source, target, follow_symlinks=False)
        os.unlink(source)


class _RightsHeader(ctypes.Structure):
    """Structure `__user_cap_header_struct` of Linux."""

    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Rights:
    """The capabilities of this process.

    words: bits of effective, permitted and inheritable ones, for numbers below 32 and then above.
    """

    def __init__(self, words: Any) -> None:
        self._words = words

    @classmethod
    def of_this_process(cls) -> _Rights:
        words = (ctypes.c_uint32 * 6)()
        call_libc("capget", ctypes.byref(_RightsHeader(_CAPABILITY_VERSION_3, 0)), words)
        return cls(words)

    def apply(self) -> None:
        """Give up all others."""
        call_libc("capset", ctypes.byref(_RightsHeader(_CAPABILITY_VERSION_3, 0)), self._words)


def _keep_inherited_files(runs: str) -> None:
    """Put files of the shield into the places of the machine's files that this process has open, or mapped for writing.

    runs: the folder that the shield leaves alone.
    """
    for fd, path in _open_files(runs):
        try:
            state = _fdinfo(fd)
            again = _opened(path, fd, int(state["flags"], 8) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC))
        except OSError:  # it was closed meanwhile
            continue
        with suppress(OSError):  # some folders have no position
            os.lseek(again, int(state["pos"]), os.SEEK_SET)
        os.dup2(again, fd, inheritable=os.get_inheritable(fd))
        os.close(again)
    for region in list(_Region.all_for_writing(runs)):
        region.replace()


def _opened(path: str, fd: int, flags: int) -> int:
    """Open the shield's file at `path`, in the place of the machine's file `fd`.

    Where the shield could not copy it, since it is large or the disk is full, what is returned can only be read.
    """
    is_file, size = stat.S_ISREG(os.fstat(fd).st_mode), os.fstat(fd).st_size
    with suppress(OSError):
        if size <= _MOST_COPIED_BYTES or not flags & (os.O_WRONLY | os.O_RDWR):
            return os.open(path, flags)
    with suppress(OSError):
        if is_file:
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    return os.open(os.devnull, os.O_RDONLY)  # a program can make files in a folder that can be read


def _open_files(runs: str) -> Iterator[tuple[int, str]]:
    """Yield the descriptors of regular files and folders, each with its path."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")
            mode = os.fstat(int(name)).st_mode
            if _is_of_the_machine(path, runs) and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                yield int(name), path


def _is_of_the_machine(path: str, runs: str) -> bool:
    is_deleted = path.endswith(_DELETED) and not os.path.lexists(path)
    return path.startswith("/") and not path.startswith((*_LEAVE_OUT, "/memfd:", runs + "/")) and not is_deleted


def _fdinfo(fd: int) -> dict[str, str]:
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of the memory of this process that is a file, and that it shares with others.

    start, size, offset: in bytes; the last one in the file.  protection: bits of `mmap`.
    """

    start: int
    size: int
    offset: int
    protection: int
    path: str

    @classmethod
    def all_for_writing(cls, runs: str) -> Iterator[_Region]:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            lines = file.read().split("\n")
        for line in lines:
            found = re.fullmatch(r"(\w+)-(\w+) (r?)-?w(.)s (\w+) \S+ \d+ +(/.*)", line)
            if found is not None and _is_of_the_machine(found[6], runs):
                start, end, offset = (int(found[number], 16) for number in (1, 2, 5))
                protection = mmap.PROT_WRITE | (mmap.PROT_READ if found[3] else 0)
                yield cls(start, end - start, offset, protection, found[6])

    def replace(self) -> None:
        """Map the shield's file of that name there; the values are the same.

        Of a large file, which Linux would copy as a whole, other ranks do not see what this one writes.

        Raises:
            OSError: the file is not there, or too little memory is left.
        """
        is_large = os.stat(self.path).st_size > _MOST_COPIED_BYTES
        fd = os.open(self.path, os.O_RDONLY if is_large else os.O_RDWR)
        try:
            map_ = ctypes.CDLL(None, use_errno=True).mmap
            map_.restype = ctypes.c_void_p
            map_.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
            flags = _MAP_FIXED | (mmap.MAP_PRIVATE if is_large else mmap.MAP_SHARED)
            if map_(self.start, self.size, self.protection, flags, fd, self.offset) != self.start:
                raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")
        finally:
            os.close(fd)
