"""Keeps the originals of files that a rank of a dry run changes. Runs in ranks; imports no torch.

Python tells of a file before it opens it for writing, renames it or removes it. Then it is copied to the folder of the
run, by the first rank that changes it; of a file or folder that did not exist, a note is taken. The kernel puts the
copies back, and removes what is new: `check/folder_snapshot.py`. A file of which there can be no copy is not changed.

Not covered: what libraries write without Python, such as HDF5; and what libraries write into hidden folders and among
the temporary files, where their caches are.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from nbaccel.base.quantities import amount
from nbaccel.features.check.dry_run.rank_records import NEW_FOLDERS, NONE
from nbaccel.features.check.dry_run.redirection import Redirection
from nbaccel.features.check.unrun_statements import UnrunStatements, line_of_user
from nbaccel.launching.libraries.one_file import is_private_file

__all__ = ["KeptOriginals", "copy_bytes", "is_of_this_project"]

_MOST_OF_DISK = 0.5
"""Share of the free disk that a copy may take."""

_MOST_BYTES, _MOST_FILES = 4 << 30, 10_000
"""Bytes of a file, and of the files of a folder, that are copied: some seconds; and the number of files."""

_COPIED_BYTES = 1 << 30
"""Bytes of one call that copies."""


class CannotBeUndone(OSError):
    """The original of a file that is about to be changed cannot be kept."""


class KeptOriginals:
    """The originals of the files of this process.

    Args:
        folder: Ranks share it, and what is beside it is never kept.
        unrun: Is told what was refused.
    """

    def __init__(self, folder: str, unrun: UnrunStatements) -> None:
        self._places = Redirection(folder)
        self._run = os.path.realpath(os.path.dirname(folder))
        self._unrun = unrun
        self._home = os.getcwd()
        self._temporary = os.path.realpath(
            tempfile.gettempdir()
        )  # which writes a file while it holds a lock, the first time
        self._known: set[str] = set()
        self._made: set[str] = set()  # by libraries, where nothing is kept

    def look(self, event: str, args: tuple[Any, ...]) -> None:
        """Record an event of Python's; cheap for all but files.

        Raises:
            CannotBeUndone: The original cannot be kept.
        """
        if event == "open":
            if isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
                self._keep(args[0], follows=True, makes=bool(args[2] & os.O_CREAT))
        elif event == "sqlite3.connect":
            self._keep(args[0], follows=True, makes=True)
        elif event == "os.mkdir":
            self._note_folder(args[0], args[2])
        elif event == "os.truncate":
            self._keep(args[0], follows=True)
        elif event in ("os.remove", "os.rmdir"):
            self._keep(args[0], args[1])
        elif event == "shutil.rmtree":
            self._keep_tree(args[0])
        elif event == "os.rename":
            self._keep(args[0], args[2])
            self._keep(args[1], args[3], makes=True)

    def why_not_removed(self, given: str, moves: bool) -> str:
        """Return why the file or folder at a path cannot be put back, as a sentence; empty if it can.

        Args:
            moves: It is to be moved, not removed.
        """
        path = self._whole(given)
        if not os.path.lexists(path) or is_of_this_project(path, self._temporary) or self._is_made_here(path):
            return ""
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        what = f"it {'moves' if moves else 'removes'} {'the folder ' if is_folder else ''}{path}"
        if not path.startswith(self._home + os.sep):
            return f"{what}, which is outside of the working folder"
        if is_folder and moves:
            return what
        size, count = 0, 0
        for size, count in self._sizes(path):
            if size > self._room() or count > _MOST_FILES:
                return f"{what}, which is too large for a copy"
        return ""

    def _keep(self, given: Any, dir_fd: int = -1, *, follows: bool = False, makes: bool = False) -> None:
        """Keep the file at the path `given`, before it is changed.

        Args:
            follows: A link stands for its file.
            makes: A file that does not exist is made.
        """
        if dir_fd != -1 or not isinstance(given, (str, bytes, os.PathLike)):
            return
        try:
            path = os.path.abspath(os.fsdecode(given))
            if path in self._known or not (makes or os.path.lexists(path)):
                return
            self._known.add(path)
            path = os.path.realpath(path) if follows else self._whole(path)
            if self._is_kept(path):
                self._copy(path, self._places.place(path))
            elif makes and not os.path.lexists(path):
                self._made.add(path)
        except CannotBeUndone:
            self._known.discard(path)
            raise
        except Exception:  # it would appear as an error of the program's own call
            pass

    def _keep_tree(self, given: Any) -> None:
        """Keep all files below a folder that is about to be removed; an empty folder by an empty one."""
        if not isinstance(given, (str, bytes, os.PathLike)):
            return
        for folder, folders, files in os.walk(os.fsdecode(given)):
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            for name in (*files, *links):
                self._keep(os.path.join(folder, name))
            if not (files or folders):
                self._keep(folder)

    def _note_folder(self, given: Any, dir_fd: int) -> None:
        """Note a folder that is about to be made, in one write, which several ranks may do at once."""
        if dir_fd != -1 or not isinstance(given, (str, bytes, os.PathLike)):
            return
        with suppress(Exception):  # as above
            path = os.path.realpath(os.fsdecode(given))
            if os.path.lexists(path) or "\n" in path:
                return
            if not self._is_kept(path):
                self._made.add(path)
                return
            fd = os.open(os.path.join(self._run, NEW_FOLDERS), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(fd, os.fsencode(path) + b"\n")
            finally:
                os.close(fd)

    def _is_kept(self, path: str) -> bool:
        """Return whether the original of a file counts: it is the user's, or a line of the user's changes it."""
        if path.startswith((self._run + os.sep, "/dev/", "/proc/")) or is_of_this_project(path, self._temporary):
            return False
        return not is_private_file(path, self._home, self._temporary) or line_of_user() is not None

    def _is_made_here(self, path: str) -> bool:
        """Return whether a rank has made the file or folder, or a folder around it."""
        made = set(self._made)
        with suppress(OSError), open(os.path.join(self._run, NEW_FOLDERS), "rb") as file:
            made.update(map(os.fsdecode, file.read().splitlines()))
        place = self._places.place(path)
        if os.path.islink(place) and os.readlink(place) == NONE:
            return True
        return any(path == each or path.startswith(each + os.sep) for each in made)

    def _copy(self, path: str, place: str) -> None:
        """Copy a file to its place, unless another rank has done so."""
        if os.path.lexists(place):
            return
        os.makedirs(os.path.dirname(place), exist_ok=True)
        try:
            known = os.lstat(path)
        except FileNotFoundError:
            os.symlink(NONE, place)
            return
        if stat.S_ISDIR(known.st_mode):
            os.makedirs(place)
        elif stat.S_ISLNK(known.st_mode):
            os.symlink(os.readlink(path), place)
        elif stat.S_ISREG(known.st_mode):
            if known.st_size > self._room():
                why = f"{path} has {amount(known.st_size)}, which is too large for a copy"
                self._unrun.refuse(f"it changes a file, and {why}")
                raise CannotBeUndone(errno.EFBIG, f"a check does not change it: {why}")
            copy = os.path.join(self._run, f"copy-{os.getpid()}-{threading.get_ident()}")
            try:
                copy_bytes(path, copy)
                os.link(copy, place)  # of several ranks, one gets to do it
            finally:
                os.unlink(copy)

    def _room(self) -> int:
        disk = os.statvfs(self._run)
        return min(_MOST_BYTES, int(_MOST_OF_DISK * disk.f_bavail * disk.f_frsize))

    @staticmethod
    def _whole(path: str) -> str:
        """Return an absolute path whose last part may be a link, and no other part."""
        parent, name = os.path.split(os.path.abspath(path))
        return os.path.join(os.path.realpath(parent), name)

    @staticmethod
    def _sizes(path: str) -> Iterator[tuple[int, int]]:
        """Yield the bytes, and the number, of the files below a path, or of the file there, as they add up."""
        size = count = 0
        found = os.walk(path) if os.path.isdir(path) and not os.path.islink(path) else [("", [], [path])]
        for folder, _, names in found:
            for name in names:
                with suppress(OSError):
                    size, count = size + os.lstat(os.path.join(folder, name)).st_size, count + 1
            yield size, count


def is_of_this_project(path: str, temporary: str) -> bool:
    """Return whether a file is of a run, a log or a check of nbaccel.

    Args:
        temporary: The folder for temporary files.
    """
    return path.startswith(os.path.join(temporary, "nbaccel-"))


def copy_bytes(path: str, copy: str) -> None:
    """Copy a file with its mode and times, by calls that no other part of a dry run has replaced."""
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        known = os.fstat(source)
        target = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            while sent := os.sendfile(target, source, done, _COPIED_BYTES):
                done += sent
            os.fchmod(target, stat.S_IMODE(known.st_mode))
            os.utime(target, ns=(known.st_atime_ns, known.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)
