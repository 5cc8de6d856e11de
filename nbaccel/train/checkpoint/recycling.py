"""Disposal: deletes or reuses a checkpoint's folder that is no longer needed. Runs in rank 0.

On a disk the folder is deleted. On a mounted drive, such as Google Drive on Colab, deleted files go to a trash that
counts as used space, so a rotation would fill the drive: there one outdated folder stays beside the checkpoints as
``.nbaccel_spare``, and the next checkpoint is written over its files. That folder is no checkpoint and is never loaded.

Not covered: files that hooks have written, other than a checkpoint's own parts; they are deleted there too.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from nbaccel.storage import Storage
from nbaccel.train.checkpoint.manifest import MANIFEST
from nbaccel.train.checkpoint.place import OURS

__all__ = ["SPARE", "Disposal", "Recycling", "disposal_in", "sweep"]

SPARE = ".nbaccel_spare"


class Disposal:
    """Disposal on a disk: folders are made, and deleted."""

    def make(self, folder: Path) -> None:
        """Make `folder`, for a checkpoint that is going to be written."""
        folder.mkdir()

    def clear(self, folder: Path) -> None:
        """Delete a folder that no longer has a checkpoint's name, if it exists.

        What cannot be deleted now (NFS keeps open files) is deleted later.
        """
        shutil.rmtree(folder, ignore_errors=True)


class Recycling(Disposal):
    """Disposal on a drive with a trash: the next checkpoint overwrites the files of one outdated folder."""

    def make(self, folder: Path) -> None:
        spare = folder.with_name(SPARE)
        try:
            # Emptied under its own name: under the name of an unfinished checkpoint it would look like a complete one.
            for path in spare.iterdir():
                _empty(path)
            os.rename(spare, folder)
        except FileNotFoundError:  # none exists yet, or another program took it
            super().make(folder)

    def clear(self, folder: Path) -> None:
        try:
            os.rename(folder, folder.with_name(SPARE))
        except OSError:  # one exists already, or there is nothing to clear
            super().clear(folder)


def disposal_in(folder: Path) -> Disposal:
    """Return the disposal for folders inside `folder`."""
    return Recycling() if Storage.of(folder).is_drive else Disposal()


def sweep(folder: Path) -> None:
    """Delete from a newly written folder the files that remain of the recycled one: they are empty by now."""
    for path in folder.iterdir():
        is_own = OURS.fullmatch(path.name) and path.name != MANIFEST  # which is written last
        if is_own and path.is_file() and not path.stat().st_size:
            path.unlink()


def _empty(path: Path) -> None:
    """Keep the file without its content, if it is one of a checkpoint's own and linked in no other folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or not OURS.fullmatch(path.name) or path.stat().st_nlink > 1:
        path.unlink()
    else:
        os.truncate(path, 0)
