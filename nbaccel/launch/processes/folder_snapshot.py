"""Snapshot of the working folder before a dry run without a file shield: which files have changed. Runs in the kernel.

A snapshot can keep the files, so that those which a run has changed or removed are put back: a small one as a copy, a
large one as a second name of the same file, which costs nothing and outlives its removal.

Not covered: files outside of the folder, files in hidden folders, and a large file that was changed in its place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nbaccel.quantities import plural

__all__ = ["FolderSnapshot"]

_CACHE_OF_PYTHON = "__pycache__"
_SMALL_BYTES = 1 << 20
_MOST_COPIED_BYTES = 256 << 20

_State = tuple[int, int, int]
"""Time, size and number of a file."""


class FolderSnapshot:
    """The files below a folder, as they were at one moment.

    files: the state of each, by path.  most: files that are looked at.  keep: a folder of this snapshot's own, in which
    files are kept; None to keep none.
    """

    def __init__(self, folder: Path, files: dict[str, _State], most: int, keep: Path | None) -> None:
        self.folder = folder
        self._files, self._most = files, most
        self._kept: dict[str, Path] = {} if keep is None else dict(_kept_in(keep, files))

    @classmethod
    def of(cls, folder: Path, most: int = 20_000, keep: Path | None = None) -> FolderSnapshot:
        """Look at the files below `folder`, except those in hidden folders; links are not followed."""
        return cls(folder, dict(_files_below(folder, most)), most, keep)

    @property
    def is_whole(self) -> bool:
        """Return whether all files were looked at."""
        return len(self._files) < self._most

    def changed(self) -> list[str]:
        """Return the paths of files that were made, changed or removed since then, in order.

        The last entry says so where there are more files than were looked at.
        """
        now = dict(_files_below(self.folder, self._most))
        is_whole = self.is_whole and len(now) < self._most
        paths = {path for path in self._files.keys() & now.keys() if self._files[path] != now[path]}
        if is_whole:
            paths |= self._files.keys() ^ now.keys()
        else:
            # Of what only one of the two looks has seen, the disk itself tells whether it is new or gone.
            paths |= {path for path in self._files.keys() - now.keys() if not os.path.lexists(path)}
        told = sorted(paths)
        if not is_whole:
            told.append(f"{self.folder} holds more than {plural(self._most, 'file')}; new ones are not listed")
        return told

    def put_back(self) -> list[str]:
        """Put back kept files that were changed or removed since then; return their paths. New files stay."""
        done = []
        for path in self.changed():
            if path in self._kept:
                with suppress(OSError):  # it stays among those that have changed
                    self._restore(path, self._kept[path])
                    done.append(path)
        return done

    def _restore(self, path: str, kept: Path) -> None:
        time_ns, size, number = self._files[path]
        known = kept.stat()
        if known.st_ino == number and (known.st_mtime_ns, known.st_size) != (time_ns, size):
            raise OSError(f"{path} was changed in its place")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if known.st_ino == number:
            beside = f"{path}.nbaccel-{os.getpid()}"
            os.link(kept, beside)
            os.replace(beside, path)
        else:
            shutil.copy2(kept, path)
            self._files[path] = _state(os.stat(path))


def _state(known: os.stat_result) -> _State:
    return known.st_mtime_ns, known.st_size, known.st_ino


def _kept_in(keep: Path, files: dict[str, _State]) -> Iterator[tuple[str, Path]]:
    """Yield the path of each file that can be kept, and where it is kept."""
    left_bytes = _MOST_COPIED_BYTES
    for number, (path, (_, size, _)) in enumerate(files.items()):
        kept = keep / str(number)
        with suppress(OSError):  # another file system, or one that gives a file no second name
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            if size <= min(_SMALL_BYTES, left_bytes):
                left_bytes -= size
                shutil.copy2(path, kept)
            else:
                os.link(path, kept)
            yield path, kept


def _files_below(folder: Path, most: int) -> Iterator[tuple[str, _State]]:
    """Yield path and state of at most `most` files."""
    count = 0
    folders = [str(folder)]
    while folders:
        entries: list[os.DirEntry[str]] = []
        with suppress(OSError), os.scandir(folders.pop()) as found:  # removed meanwhile, or nobody may list it
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    if not entry.name.startswith(".") and entry.name != _CACHE_OF_PYTHON:
                        folders.append(entry.path)
                    continue
                if count >= most:
                    return
                count += 1
                yield entry.path, _state(entry.stat(follow_symlinks=False))
