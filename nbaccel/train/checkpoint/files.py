"""Files that are known to be on the disk, and whose damage is detected. Run in ranks; know nothing of checkpoints.

A *sealed* JSON file contains the CRC32 of its own content. CRC32 detects damage, not malice: against malice,
pickles are never loaded (6.8 GiB/s here, SHA-256 1.9).
"""

from __future__ import annotations

import errno
import glob
import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from nbaccel.errors import CheckpointCorrupt

__all__ = ["SideThread", "aside", "checksum", "read_sealed", "sync", "write_sealed"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_CHUNK_BYTES = 1 << 20

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of file systems that cannot sync a folder (FUSE, network drives); there only the rename is possible."""


class SideThread(ThreadPoolExecutor):
    """One thread that works beside the thread that made it; where no thread can be started, the caller does the work.

    Python 3.12.0 and 3.12.1 start none once a program is at its end, where its last checkpoint may still be written.
    """

    def __init__(self, name: str) -> None:
        super().__init__(1, name)
        self._has_thread = True

    def submit(self, function: Callable[_P, _T], /, *args: _P.args, **options: _P.kwargs) -> Future[_T]:
        if self._has_thread:
            try:
                return super().submit(function, *args, **options)
            except RuntimeError:
                self._has_thread = False  # the work stays in a queue that nothing reads from here on
        done: Future[_T] = Future()
        try:
            done.set_result(function(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


def aside(target: Path, pattern: str) -> Iterator[Path]:
    """Yield paths beside `target` with names such as ``.<name>.tmp-17``; `pattern` is the part after the name."""
    return target.parent.glob(f".{glob.escape(target.name)}.{pattern}")


def checksum(path: Path) -> str:
    """Return the CRC32 of the file, eight hexadecimal digits."""
    crc, buffer = 0, bytearray(_CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
    return f"{crc:08x}"


def sync(path: Path) -> None:
    """Wait until the disk has the file, or the folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_FOLDER_SYNC):
            raise
    finally:
        os.close(descriptor)


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write `content` with its checksum; it is on the disk when this returns."""
    path.write_text(json.dumps({**content, "crc32": _crc(content)}, indent=1), encoding="utf-8")
    sync(path)


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` was given.

    Raises:
        FileNotFoundError: there is no such file.
            CheckpointCorrupt: the file is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        expected = content.pop("crc32")
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {error}", str(path), "sealed JSON", str(error)) from error
    got = _crc(content)
    if got != expected:
        raise CheckpointCorrupt(
            f"{path} is damaged: its checksum is {got}, it was written with {expected}", str(path), str(expected), got
        )
    return dict(content)


def _crc(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
