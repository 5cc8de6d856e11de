"""Folders of checkpoints that are complete or absent, whenever the process is killed. Runs in ranks; rank 0 writes.

A folder is written beside its name as ``.<name>.tmp-<pid>``, flushed to the disk and renamed; the older folder of that
name is first renamed to ``.<name>.old-<pid>`` and then deleted, or reused on drives with a trash (`Recycling`). The
next save cleans up what a killed process left behind: a complete folder whose name is free gets it, everything else of
a dead process is deleted. `place_for` finds the folder, which may be a subfolder of the one that a program names.

Not covered: two programs that save under one name at the same time (the later one wins), and file systems whose rename
is not atomic.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbaccel.base.quantities import three_digits
from nbaccel.errors import CannotSave, CheckpointCorrupt
from nbaccel.train.checkpoint.manifest import MANIFEST, Manifest, aside, names_added, sync

__all__ = [
    "OURS",
    "SPARE",
    "SUBFOLDER",
    "Disposal",
    "Recycling",
    "as_cannot_save",
    "complete_leftovers",
    "delete_dead",
    "delete_whole",
    "disposal_in",
    "is_alive",
    "may_write_below",
    "place_for",
    "place_of",
    "replacing",
    "sweep",
]

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_RIGHT = (errno.EROFS, errno.EACCES, errno.EPERM)
_OS_ERROR = r"\(os error (\d+)\)"
"""Pattern of an operating system's error at the end of a text of safetensors, which writes from Rust."""

_RESERVE_BYTES = 1 << 20
"""Reserve for data whose size is not known before it is written: JSON, folders, the file system's own blocks."""


@contextmanager
def replacing(target: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends; an older `target` is deleted after that.

    Args:
        needed_bytes: About how much the block is going to write.

    Raises:
        CannotSave: No space, or no right to write here; raised before the first byte where that can be known.
    """
    unfinished = _own_name(target, "tmp")
    with as_cannot_save(target, needed_bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
        _put_right(target)
        disposal = disposal_in(target.parent)
        try:
            disposal.make(unfinished)  # may free space, which is checked next
            _refuse_full_disk(target, needed_bytes)
            yield unfinished
            _take_name(target, unfinished)
        finally:
            disposal.clear(unfinished)


def may_write_below(folder: Path) -> bool:
    """Return whether this process may make `folder`, or write into it; nothing is made."""
    return os.access(_existing(folder), os.W_OK | os.X_OK)


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of `folder`, which may not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def delete_whole(folder: Path) -> None:
    """Delete `folder`; a process killed meanwhile leaves no half folder of that name."""
    outdated = _own_name(folder, "old")
    os.rename(folder, outdated)
    disposal_in(outdated.parent).clear(outdated)


def delete_dead(leftovers: Iterable[Path]) -> None:
    """Delete those of `leftovers` whose process, the number at the end of the name, is gone."""
    for leftover in leftovers:
        if not is_alive(leftover.name.rpartition("-")[2]):
            disposal_in(leftover.parent).clear(leftover)


def complete_leftovers(target: Path) -> list[Path]:
    """Return complete folders that a killed process did not get to rename to `target`, or to put back; newest first."""
    found = [*aside(target, "tmp-*"), *aside(target, "old-*")]
    return sorted((path for path in found if _is_whole(path)), key=lambda path: path.stat().st_mtime_ns, reverse=True)


@contextmanager
def as_cannot_save(target: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn errors of full disks and forbidden folders into one error that a person can act on.

    Raises:
        CannotSave: Names `target`, and the bytes.
    """
    try:
        yield
    except Exception as error:  # safetensors raises its own kind
        code = _code(error)
        if code in _NO_SPACE:
            raise _no_space(target, needed_bytes, os.strerror(code)) from error
        if code in _NO_RIGHT:
            raise CannotSave(
                f"cannot write the checkpoint {target} ({_bytes(needed_bytes)}): {os.strerror(code)}. Save it to a "
                f"folder that this process may write to.",
                str(target),
                needed_bytes,
            ) from error
        raise


def _bytes(size: int) -> str:
    return f"{size} bytes, {three_digits(size)}" if size >= 1000 else f"{size} bytes"


def _code(error: Exception) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    said = re.search(_OS_ERROR, str(error))
    return int(said[1]) if said else 0


def _no_space(target: Path, needed_bytes: int, reason: str) -> CannotSave:
    free = shutil.disk_usage(_existing(target.parent)).free
    return CannotSave(
        f"cannot write the checkpoint {target}: {reason}. It needs {_bytes(needed_bytes)}, and {target.parent} has "
        f"{_bytes(free)} free. An older checkpoint of that name is as it was; delete other files, lower total_limit, "
        "or save to another disk.",
        str(target),
        needed_bytes,
        free,
    )


def _refuse_full_disk(target: Path, needed_bytes: int) -> None:
    if shutil.disk_usage(target.parent).free < needed_bytes + _RESERVE_BYTES:
        raise _no_space(target, needed_bytes, os.strerror(errno.ENOSPC))


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _own_name(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{os.getpid()}")


def _take_name(target: Path, complete: Path) -> None:
    if not target.exists():
        os.rename(complete, target)
        sync(target.parent)
        return
    outdated = _own_name(target, "old")
    os.rename(target, outdated)
    os.rename(complete, target)
    sync(target.parent)
    disposal_in(outdated.parent).clear(outdated)


def _put_right(target: Path) -> None:
    """Finish or undo what a killed process left around `target`."""
    if not target.exists():
        for complete in complete_leftovers(target)[:1]:
            os.rename(complete, target)
            sync(target.parent)
    delete_dead([*aside(target, "tmp-*"), *aside(target, "old-*")])


def is_alive(pid: str) -> bool:
    """Return whether another process of this number runs. For our own number: False, since an earlier save failed."""
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_whole(folder: Path) -> bool:
    try:
        Manifest.read(folder).verify(folder)
    except CheckpointCorrupt:
        return False
    return True


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
    """Disposal on a drive with a trash: the next checkpoint overwrites the files of one outdated folder.

    On a mounted drive, such as Google Drive on Colab, deleted files go to a trash that counts as used space, so a
    rotation would fill the drive: there one outdated folder stays beside the checkpoints as ``.nbaccel_spare``, and the
    next checkpoint is written over its files. That folder is no checkpoint and is never loaded.

    Not covered: files that hooks have written, other than a checkpoint's own parts; they are deleted there too.
    """

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
    from nbaccel.base.storage import Storage  # which loads what is known of the hardware

    return Recycling() if Storage.of(folder).is_drive else Disposal()


def sweep(folder: Path) -> None:
    """Delete from a newly written folder the files that remain of the recycled one: they are empty by now."""
    for path in folder.iterdir():
        is_own = re.fullmatch(OURS, path.name) and path.name != MANIFEST  # which is written last
        if is_own and path.is_file() and not path.stat().st_size:
            path.unlink()


def _empty(path: Path) -> None:
    """Keep the file without its content, if it is one of a checkpoint's own and linked in no other folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or not re.fullmatch(OURS, path.name) or path.stat().st_nlink > 1:
        path.unlink()
    else:
        os.truncate(path, 0)


SUBFOLDER = "nbaccel_checkpoint"

OURS = (
    r"(model|optimizer|scheduler|custom)(_\d+)?(-rank\d+-of-\d+)?(\.frozen)?\.(json|safetensors|pkl)"
    r"|(training|remembered|manifest|generators_\w+)\.json"
    r"|(cell|difference|next_loss)\.(json|safetensors|pkl)"
    rf"|\.{SUBFOLDER}\..*"
)
"""Pattern of names of files in a checkpoint's folder, without the files of hooks."""

_NOBODYS = r"\.ipynb_checkpoints|\.DS_Store|__pycache__"
"""Pattern of names that Jupyter and operating systems create in any folder that was opened."""


def place_for(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that a checkpoint replaces when the program names `folder`. Links and ``~`` are followed.

    A checkpoint replaces its folder as a whole, so that folder must hold nothing else: ``save_state("checkpoints/")``
    may not delete ``checkpoints/epoch_0`` or the user's notes. In a folder with other things in it, and in one that
    cannot be renamed, the checkpoint is a subfolder; `load_state` looks there too. Nothing is written here.
    """
    named = Path(folder).expanduser().resolve()
    if (named / SUBFOLDER).exists() or os.path.ismount(named) or _holds_other_things(named):
        return named / SUBFOLDER
    return named


def place_of(folder: str | os.PathLike[str]) -> Path:
    """Return the folder to load from when the program names `folder`."""
    named = Path(folder).expanduser()
    return named / SUBFOLDER if (named / SUBFOLDER).exists() else named


def _holds_other_things(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    strange = {name for name in names if not (re.fullmatch(OURS, name) or re.fullmatch(_NOBODYS, name))}
    return bool(strange) and not strange <= _listed(folder)


def _listed(folder: Path) -> set[str]:
    """Return the names that the manifest of a checkpoint in `folder` lists, files of hooks included."""
    for _ in range(2):  # rank 0 may be replacing the folder right now
        with suppress(CheckpointCorrupt):
            return {Path(name).parts[0] for name in Manifest.read(folder).files} | names_added(folder)
    return set()
