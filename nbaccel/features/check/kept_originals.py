"""Keeps the originals of files that a rank of a dry run changes. Runs in ranks; imports no torch.

Python tells of a file before it opens it for writing, renames it or removes it. Then it is copied to the folder of the
run, by the first rank that changes it; of a file or folder that did not exist, a note is taken. The kernel puts the
copies back, and removes what is new: `check/folder_snapshot.py`. A file of which there can be no copy, for its size or
for an error, is not changed.

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
from functools import partial
from typing import Any, NoReturn

from nbaccel.base.quantities import amount
from nbaccel.features.check.dry_run.rank_records import INODES, NEW_FOLDERS, NONE, inode_of
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


_OF_THIS_PROJECT = ("nbaccel-check-", "nbaccel-logs-", "nbaccel-map-", "nbaccel-run-")
"""Beginnings of the names of its folders for temporary files."""


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
            self._keep_moved(*args)
        elif event == "os.chmod":
            self._keep(args[0], args[2], follows=True)
        elif event == "os.symlink":
            self._keep(args[1], args[2], makes=True)
        elif event == "os.link":  # what is written by the new name changes the file
            self._keep(args[0], args[2])
            self._keep(args[1], args[3], makes=args[2] != -1 or os.path.lexists(args[0]))

    def why_not_removed(self, given: str, moves: bool) -> str:
        """Return why the file or folder at a path cannot be put back, as a sentence; empty if it can.

        Args:
            moves: It is to be moved, not removed.
        """
        path = self._whole(given)
        if (
            not os.path.lexists(path)
            or is_of_this_project(path, self._temporary, self._home)
            or self._is_made_here(path)
        ):
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
            path = os.fsdecode(given)
            if not (makes or os.path.lexists(path)):
                return
            path = os.path.realpath(path) if follows else self._whole(path)
            if path in self._known:
                return
            self._known.add(path)
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

    def _keep_moved(self, source: Any, target: Any, source_dir: int, target_dir: int) -> None:
        """Keep what is about to be moved, and what is in its new place; note what a folder brings there."""
        is_path = source_dir == -1 and isinstance(source, (str, bytes, os.PathLike))
        path = os.fsdecode(source) if is_path else ""
        if is_path and not os.path.lexists(path):
            return  # nothing is moved
        if is_path and os.path.isdir(path) and not os.path.islink(path):
            if not self._is_made_here(self._whole(path)):
                self._keep_tree(path)
            new = os.fsdecode(target)
            self._note_folder(new, target_dir)
            for folder, folders, files in os.walk(path):
                for name in (*folders, *files):
                    there = os.path.join(folder, name)
                    is_folder = os.path.isdir(there) and not os.path.islink(there)
                    note = self._note_folder if is_folder else partial(self._keep, makes=True)
                    note(os.path.join(new, os.path.relpath(there, path)), target_dir)
        self._keep(source, source_dir)
        self._keep(target, target_dir, makes=not (is_path and os.path.isdir(path)))

    def _note_folder(self, given: Any, dir_fd: int) -> None:
        """Note a folder that is about to be made."""
        if dir_fd != -1 or not isinstance(given, (str, bytes, os.PathLike)):
            return
        with suppress(Exception):  # as above
            path = os.path.realpath(os.fsdecode(given))
            if os.path.lexists(path) or "\n" in path:
                return
            if not self._is_kept(path):
                self._made.add(path)
                return
            self._append(NEW_FOLDERS, path)

    def _append(self, name: str, line: str) -> None:
        """Append a line to a file of the run, in one write, which several ranks may do at once."""
        fd = os.open(os.path.join(self._run, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, os.fsencode(line) + b"\n")
        finally:
            os.close(fd)

    def _is_kept(self, path: str) -> bool:
        """Return whether the original of a file counts: it is the user's, or a line of the user's changes it."""
        if path.startswith((self._run + os.sep, "/dev/", "/proc/")):
            return False
        if is_of_this_project(path, self._temporary, self._home):
            return False
        return not is_private_file(path, self._home, self._temporary) or line_of_user() is not None

    def _is_made_here(self, path: str) -> bool:
        """Return whether a rank has made the file or folder, or a folder around it."""
        made = set(self._made)
        with suppress(OSError), open(os.path.join(self._run, NEW_FOLDERS), "rb") as file:
            made.update(map(os.fsdecode, file.read().split(b"\n")[:-1]))
        place = self._places.place(path)
        if os.path.islink(place) and os.readlink(place) == NONE:
            return True
        return any(path == each or path.startswith(each + os.sep) for each in made)

    def _copy(self, path: str, place: str) -> None:
        """Copy a file to its place, unless another rank has done so.

        Raises:
            CannotBeUndone: There can be no copy.
        """
        if os.path.lexists(place):
            return
        try:
            known = os.lstat(path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(NONE, place)
            return
        try:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if stat.S_ISDIR(known.st_mode):
                os.makedirs(place)
            elif stat.S_ISLNK(known.st_mode):
                os.symlink(os.readlink(path), place)
            elif stat.S_ISREG(known.st_mode):
                self._copy_file(path, place, known)
        except CannotBeUndone:
            raise
        except (FileExistsError, NotADirectoryError):  # another rank was faster; or it has made the folder of `path`
            pass
        except OSError as error:
            if not os.path.lexists(place) and any(os.access(each, os.W_OK) for each in (path, os.path.dirname(path))):
                self._refuse(error.errno, f"{path} cannot be copied ({error.strerror})")

    def _copy_file(self, path: str, place: str, known: os.stat_result) -> None:
        if known.st_size > self._room():
            self._refuse(errno.EFBIG, f"{path} has {amount(known.st_size)}, which is too large for a copy")
        copy = os.path.join(self._run, f"copy-{os.getpid()}-{threading.get_ident()}")
        try:
            copy_bytes(path, copy)
            os.link(copy, place)  # of several ranks, one gets to do it
        finally:
            with suppress(FileNotFoundError):
                os.unlink(copy)
        if "\n" not in path:
            self._append(INODES, f"{inode_of(known)} {path}")

    def _refuse(self, number: int | None, why: str) -> NoReturn:
        self._unrun.refuse(f"it changes a file, and {why}")
        raise CannotBeUndone(number, f"a check does not change it: {why}")

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


def is_of_this_project(path: str, temporary: str, home: str) -> bool:
    """Return whether a file is of a run, a log or a check of nbaccel.

    Args:
        temporary: The folder for temporary files.
        home: The working folder, whose files count even if it is among those of this project.
    """
    name = path.removeprefix(temporary + os.sep).partition(os.sep)[0]
    folder = os.path.join(temporary, name)
    is_ours = name.startswith(_OF_THIS_PROJECT) and f"{path}{os.sep}".startswith(folder + os.sep)
    return is_ours and not f"{home}{os.sep}".startswith(folder + os.sep)


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
