"""Folders that are complete or absent, whenever the process is killed. Runs in rank 0.

A folder is written beside its name as ``.<name>.tmp-<pid>``, flushed to the disk and renamed; the older folder of
that name is first renamed to ``.<name>.old-<pid>`` and then disposed of, as `recycling` describes. The next save
cleans up what a killed process left behind: a complete folder whose name is free gets it, everything else of a
dead process is deleted.

Not covered: two programs that save under one name at the same time (the later one wins), and file systems whose
rename is not atomic.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nbaccel.errors import CannotSave, CheckpointCorrupt
from nbaccel.train.checkpoint.files import aside, sync
from nbaccel.train.checkpoint.manifest import Manifest
from nbaccel.train.checkpoint.recycling import disposal_in

__all__ = [
    "complete_leftovers",
    "delete_dead",
    "delete_whole",
    "in_units",
    "is_alive",
    "may_write_below",
    "replacing",
    "sayable",
]

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_RIGHT = (errno.EROFS, errno.EACCES, errno.EPERM)
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""Pattern of an operating system's error at the end of a text of safetensors, which writes from Rust."""

_RESERVE_BYTES = 1 << 20
"""Reserve for data whose size is not known before it is written: JSON, folders, the file system's own blocks."""


@contextmanager
def replacing(target: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends; an older `target` is deleted after that.

    needed_bytes: about how much the block is going to write.
    Raises:
            CannotSave: no space, or no right to write here; raised before the first byte where that can be known.
    """
    unfinished = _own_name(target, "tmp")
    with sayable(target, needed_bytes):
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
def sayable(target: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn errors of full disks and forbidden folders into one error that a person can act on.

    Raises:
            CannotSave: names `target`, and the bytes.
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


def in_units(size: int) -> str:
    """
    >>> in_units(1_234_567)
    '1.23 MB'
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"


def _bytes(size: int) -> str:
    return f"{size} bytes, {in_units(size)}" if size >= 1000 else f"{size} bytes"


def _code(error: Exception) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    said = _OS_ERROR.search(str(error))
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
