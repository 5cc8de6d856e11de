"""Snapshot of the working folder before a dry run: which files have changed. Runs in the kernel.

Other programs may write there during the run: an editor, a training of another notebook. So a file is put back only if
it is gone, and the snapshot has a second name or a copy of it, or if a rank has kept the original that it was about to
change (`features/check/kept_originals.py`); and a new one is removed only if a rank has made it.

Not listed: files outside of the folder, in hidden folders, and on other file systems that are mounted below it; and
notebooks, which Jupyter saves meanwhile.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nbaccel.base.quantities import plural
from nbaccel.features.check.dry_run.rank_records import INODES, NEW_FOLDERS, NONE, inode_of
from nbaccel.features.check.dry_run.redirection import Redirection

__all__ = ["FolderSnapshot", "Undone", "undo_changes"]

_CACHE_OF_PYTHON = "__pycache__"
_NOTEBOOK = ".ipynb"

_MOST_FILES = 10_000
"""Number of files that are looked at, and of folders: a tenth of a second, and some seconds on a drive far away."""

_SMALL_BYTES, _MOST_COPIED_BYTES = 1 << 20, 64 << 20
"""Sizes of a file, and of all files, that are copied where a file can have no second name."""

_MOST_COPIED_FILES = 500
"""Number of such copies: on a drive far away, opening and reading one takes a fifth of a second."""

_State = tuple[int, int, int]
"""Time, size and number of a file."""


class FolderSnapshot:
    """The files below a folder, as they were at one moment.

    Args:
        files: The state of each, by path.
        is_whole: All files were looked at.
        most: Files that are looked at.
        keep: A folder of this snapshot's own, in which files get a second name; None to keep none.
    """

    def __init__(self, folder: Path, files: dict[str, _State], is_whole: bool, most: int, keep: Path | None) -> None:
        self.folder = folder
        self.is_whole = is_whole
        self._files, self._most = files, most
        self._kept: dict[str, Path] = {} if keep is None else dict(_kept_in(keep, files))

    @classmethod
    def of(cls, folder: Path, most: int = _MOST_FILES, keep: Path | None = None) -> FolderSnapshot:
        """Look at the files below `folder`, except those in hidden folders; links are not followed."""
        files, is_whole = _files_below(folder, most)
        return cls(folder, files, is_whole, most, keep)

    def changed(self) -> list[str]:
        """Return the paths of files that were made, changed or removed since then, in order.

        The last entry says so where there are more files than were looked at.
        """
        now, sees_all = _files_below(self.folder, self._most)
        is_whole = self.is_whole and sees_all
        paths = {path for path in self._files.keys() & now.keys() if self._files[path] != now[path]}
        if is_whole:
            paths |= self._files.keys() ^ now.keys()
        else:
            # Of what only one of the two looks has seen, the disk itself tells whether it is new or gone.
            paths |= {path for path in self._files.keys() - now.keys() if not os.path.lexists(path)}
        told = sorted(paths)
        if not is_whole:
            looked_at = plural(min(len(self._files), len(now)), "file")
            told.append(f"{self.folder} holds more than {looked_at}; new ones are not listed")
        return told

    def has(self, path: str) -> bool:
        """Return whether there was a file at a path."""
        return path in self._files

    def put_back(self) -> list[str]:
        """Put back files that are gone; return their paths."""
        done = []
        for path, kept in self._kept.items():
            if not os.path.lexists(path):
                with suppress(OSError):  # it stays among those that have changed
                    if _state(kept.stat())[:2] == self._files[path][:2]:  # else it was changed before it was removed
                        os.makedirs(os.path.dirname(path), exist_ok=True)
                        _link_or_copy(str(kept), path)
                        done.append(path)
        return sorted(done)


@dataclass(frozen=True)
class Undone:
    """The changes of ranks that were undone, and those that could not be.

    Attributes:
        done: Paths of files that are as before now.
        failed: The original of each file that could not be put back, by its path.
    """

    done: list[str]
    failed: dict[str, str]


def undo_changes(originals: Path) -> Undone:
    """Put back the files whose originals ranks have kept below `originals`, and remove what they have made.

    What the notebook has open is the same file afterwards, unless a rank has put another one into its place.
    """
    places, undone = Redirection(str(originals)), Undone([], {})
    inodes = {path: inode for inode, path in (line.split(" ", 1) for line in _lines(originals.with_name(INODES)))}
    for parent, folders, names in os.walk(os.path.realpath(originals)):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for kept in (os.path.join(parent, name) for name in sorted([*names, *links])):
            path = places.original(kept)
            is_new = os.path.islink(kept) and os.readlink(kept) == NONE
            try:
                if is_new:
                    os.unlink(path)
                elif not _is_alike(kept, path):
                    _put_into_place(kept, path, inodes.get(path))
                else:
                    continue
                undone.done.append(path)
            except OSError:  # it stays among those that have changed
                if not is_new:
                    undone.failed[path] = kept
        if not (folders or names):
            with suppress(OSError):  # as above
                os.makedirs(places.original(parent), exist_ok=True)
    for folder in sorted(_lines(originals.with_name(NEW_FOLDERS)), key=len, reverse=True):
        with suppress(OSError):  # it is gone, or not empty
            os.rmdir(folder)
    return undone


def _is_alike(kept: str, path: str) -> bool:
    with suppress(OSError):
        before, now = os.lstat(kept), os.lstat(path)
        if os.path.islink(kept) or os.path.islink(path):
            return os.readlink(kept) == os.readlink(path)
        return (before.st_mtime_ns, before.st_size, before.st_mode) == (now.st_mtime_ns, now.st_size, now.st_mode)
    return False


def _lines(file: Path) -> list[str]:
    """Return the lines of a file to which ranks append; none if there is no file."""
    with suppress(FileNotFoundError):
        return os.fsdecode(file.read_bytes()).split("\n")[:-1]
    return []


def _put_into_place(kept: str, path: str, inode: str | None) -> None:
    """Give a file its content back; if another one is in its place, copy beside it first.

    Args:
        inode: That of the file that was there, which the notebook may have open; None if it is not known.
    """
    with suppress(OSError):  # it is gone, nobody may write it, or the disk is full
        if inode == inode_of(os.lstat(path)):
            _rewrite(kept, path)
            return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    beside = f"{path}.nbaccel-{os.getpid()}"
    try:
        shutil.copy2(kept, beside, follow_symlinks=False)
        with suppress(OSError):  # it is gone, or only root may give a file to another user
            known = os.lstat(path)
            os.chown(beside, known.st_uid, known.st_gid, follow_symlinks=False)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def _rewrite(kept: str, path: str) -> None:
    """Copy a file into another one, once it is sure that the disk has room for that."""
    with open(kept, "rb") as source, open(path, "r+b") as target:
        size, before = os.fstat(source.fileno()).st_size, os.fstat(target.fileno()).st_size
        try:
            if size and sys.platform == "linux":
                os.posix_fallocate(target.fileno(), 0, size)
        except OSError:
            target.truncate(before)
            raise
        shutil.copyfileobj(source, target)
        target.truncate()
    shutil.copystat(kept, path)


def _state(known: os.stat_result) -> _State:
    return known.st_mtime_ns, known.st_size, known.st_ino


def _kept_in(keep: Path, files: dict[str, _State]) -> Iterator[tuple[str, Path]]:
    """Yield the path of each file that can be kept, and its second name, or that of a copy."""
    left_bytes, copies = _MOST_COPIED_BYTES, 0
    for number, (path, (_, size, _)) in enumerate(files.items()):
        kept = keep / str(number)
        with suppress(OSError):  # it was removed meanwhile
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            is_small = size <= min(_SMALL_BYTES, left_bytes) and copies < _MOST_COPIED_FILES
            copied = _link_or_copy(path, str(kept), may_copy=is_small)
            left_bytes, copies = left_bytes - copied, copies + (copied > 0)
            yield path, kept


def _link_or_copy(path: str, other: str, may_copy: bool = True) -> int:
    """Give a file another name, or copy it, if it is on another file system; return the bytes that were copied.

    Raises:
        OSError: Neither could be done.
    """
    try:
        os.link(path, other)
    except OSError:
        if not may_copy:
            raise
        shutil.copy2(path, other)
        return os.stat(other).st_size
    return 0


def _files_below(folder: Path, most: int) -> tuple[dict[str, _State], bool]:
    """Return the state of at most `most` files by path, and whether these are all."""
    files: dict[str, _State] = {}
    folders, count = [str(folder)], 0
    device = os.stat(folder).st_dev if folder.is_dir() else 0
    while folders:
        count += 1
        if count > most:
            return files, False
        entries: list[os.DirEntry[str]] = []
        with suppress(OSError), os.scandir(folders.pop()) as found:  # removed meanwhile, or nobody may list it
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            if len(files) >= most:
                return files, False
            with suppress(OSError):
                known = entry.stat(follow_symlinks=False)
                if not entry.is_dir(follow_symlinks=False):
                    if entry.name.endswith(_NOTEBOOK):
                        continue
                    files[entry.path] = _state(known)
                elif known.st_dev == device and not entry.name.startswith(".") and entry.name != _CACHE_OF_PYTHON:
                    folders.append(entry.path)
    return files, True
