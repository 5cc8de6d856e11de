"""Keeps the originals of files that a rank changes: a dry run without a file shield. Runs in ranks; imports no torch.

Python tells of a file before it opens it for writing, renames it or removes it. Then it is copied to the folder of the
run, by the first rank that changes it; of a file or folder that did not exist, a note is taken. The kernel puts the
copies back, and removes what is new: `check/folder_snapshot.py`.

Not covered: what libraries write without Python, such as HDF5, and what programs write that a rank starts; files in
hidden folders and among the temporary ones; a file for which the disk has no room.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

from nbaccel.features.check.dry_run.rank_records import NEW_FOLDERS
from nbaccel.features.check.dry_run.redirection import Redirection
from nbaccel.launching.libraries.one_file import is_private_file

__all__ = ["keep_originals"]

_MOST_OF_DISK = 0.5
"""Share of the free disk that a copy may take."""

_COPIED_BYTES = 1 << 30
"""Bytes of one call that copies."""

_NONE = "there was none"
"""Target of the link that stands for the original of a file which a rank has made."""


def keep_originals(folder: str) -> None:
    """Begin to keep, below `folder`, the originals of what this process changes. Called once per process."""
    sys.addaudithook(_Originals(folder).look)  # stays until the process, a rank, ends


class _Originals:
    """The originals of the files of this process.  folder: ranks share it, and what is beside it is never kept."""

    def __init__(self, folder: str) -> None:
        self._places = Redirection(folder)
        self._run = os.path.realpath(os.path.dirname(folder))
        self._home = os.getcwd()
        self._temporary = tempfile.gettempdir()  # which writes a file while it holds a lock, the first time
        self._known: set[str] = set()

    def look(self, event: str, args: tuple[Any, ...]) -> None:
        """Record an event of Python's; cheap for all but files, and never raises."""
        if event == "open":
            if isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
                self._keep(args[0], follows=True, makes=bool(args[2] & os.O_CREAT))
        elif event == "os.mkdir":
            self._note_folder(args[0], args[2])
        elif event == "os.truncate":
            self._keep(args[0], follows=True)
        elif event == "os.remove":
            self._keep(args[0], args[1])
        elif event == "os.rename":
            self._keep(args[0], args[2])
            self._keep(args[1], args[3], makes=True)

    def _keep(self, given: Any, dir_fd: int = -1, *, follows: bool = False, makes: bool = False) -> None:
        """Keep the file at the path `given`, before it is changed.

        follows: a link stands for its file.  makes: a file that does not exist is made.
        """
        if dir_fd != -1 or not isinstance(given, (str, bytes, os.PathLike)):
            return
        with suppress(Exception):  # an error here would appear as one of the program's own call
            path = os.path.abspath(os.fsdecode(given))
            if path in self._known or not (makes or os.path.lexists(path)):
                return
            self._known.add(path)
            parent, name = os.path.split(path)
            path = os.path.realpath(path) if follows else os.path.join(os.path.realpath(parent), name)
            if self._is_of_the_user(path):
                self._copy(path, self._places.place(path))

    def _note_folder(self, given: Any, dir_fd: int) -> None:
        """Note a folder that is about to be made, in one write, which several ranks may do at once."""
        if dir_fd != -1 or not isinstance(given, (str, bytes, os.PathLike)):
            return
        with suppress(Exception):  # as above
            path = os.path.realpath(os.fsdecode(given))
            if self._is_of_the_user(path) and not os.path.lexists(path) and "\n" not in path:
                fd = os.open(os.path.join(self._run, NEW_FOLDERS), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                try:
                    os.write(fd, os.fsencode(path) + b"\n")
                finally:
                    os.close(fd)

    def _is_of_the_user(self, path: str) -> bool:
        return not path.startswith(self._run + os.sep) and not is_private_file(path, self._home, self._temporary)

    def _copy(self, path: str, place: str) -> None:
        """Copy a file to its place, unless another rank has done so."""
        if os.path.lexists(place):
            return
        os.makedirs(os.path.dirname(place), exist_ok=True)
        try:
            known = os.lstat(path)
        except FileNotFoundError:
            os.symlink(_NONE, place)
            return
        disk = os.statvfs(self._run)
        if not stat.S_ISREG(known.st_mode) or known.st_size > _MOST_OF_DISK * disk.f_bavail * disk.f_frsize:
            return
        copy = os.path.join(self._run, f"copy-{os.getpid()}-{threading.get_ident()}")
        try:
            _copied(path, copy)
            os.link(copy, place)  # of several ranks, one gets to do it
        finally:
            os.unlink(copy)


def _copied(path: str, copy: str) -> None:
    """Copy a file with its mode and times, by calls that no other part of a dry run has replaced."""
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
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
