"""Parts a forked rank of a dry run from files that the notebook has open, or mapped to memory. Runs in ranks.

Its descriptors lead to copies of the files that the notebook writes, and its maps are private: what it writes is
seen by itself alone. A file that is too large for a copy can only be read, so that a write to it is an error.

Not covered: shared memory that is no file, and folders.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from nbaccel.features.check.kept_originals import copy_bytes, is_of_this_project
from nbaccel.namespace.open_files import regular_files

__all__ = ["part_from_inherited_files"]

_MAP_FIXED = 0x10
_MOST_COPIED_BYTES = 256 << 20
_NOT_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:")

_SHARED = re.compile(r"(\w+)-(\w+) (r?)-?w(.)s (\w+) \S+ \d+ +(/.*)")
"""A line of `/proc/self/maps` about a file that may be written to, and that others see."""


def part_from_inherited_files(folder: Path) -> None:
    """Let this process have its own copies of them, in `folder`, where they have no name."""
    temporary, home = os.path.realpath(tempfile.gettempdir()), os.getcwd()
    for file in regular_files():
        if not file.is_read and not is_of_this_project(file.path, temporary, home):
            with suppress(OSError):  # it was closed meanwhile
                _copy(file.number, folder)
    with (
        suppress(FileNotFoundError),
        open("/proc/self/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as maps,
    ):
        lines = maps.read().split("\n")  # only a line feed ends a line: a path may have other characters
        for found in filter(None, map(_SHARED.fullmatch, lines)):
            if not found[6].startswith(_NOT_FILES) and not is_of_this_project(found[6], temporary, home):
                with suppress(FileNotFoundError):  # it was removed: the notebook sees what this rank writes
                    _map_privately(found)


def _copy(number: int, folder: Path) -> None:
    """Put a copy of an open file into its place, at the same position; for a large one, the file itself, to read."""
    flags, position = fcntl.fcntl(number, fcntl.F_GETFL), os.lseek(number, 0, os.SEEK_CUR)
    try:
        if os.fstat(number).st_size > _MOST_COPIED_BYTES:
            raise OSError
        copy = folder / f"open-{os.getpid()}"
        copy_bytes(f"/proc/self/fd/{number}", str(copy))
        own = os.open(copy, flags & (os.O_ACCMODE | os.O_APPEND))
        copy.unlink()
    except OSError:  # or the disk is full
        own = os.open(f"/proc/self/fd/{number}" if os.access(f"/proc/self/fd/{number}", os.R_OK) else os.devnull, 0)
    os.lseek(own, position, os.SEEK_SET)
    os.dup2(own, number, inheritable=os.get_inheritable(number))
    os.close(own)


def _map_privately(found: re.Match[str]) -> None:
    """Map the file to the same place once more, so that what is written there is not written to the file."""
    start, end, offset = (int(found[number], 16) for number in (1, 2, 5))
    protection = mmap.PROT_WRITE | (mmap.PROT_READ if found[3] else 0)
    fd = os.open(found[6], os.O_RDONLY)
    try:
        map_ = ctypes.CDLL(None, use_errno=True).mmap
        map_.restype = ctypes.c_void_p
        map_.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        if map_(start, end - start, protection, _MAP_FIXED | mmap.MAP_PRIVATE, fd, offset) != start:
            raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)
