"""Open files: finds the files that living ranks are writing. Runs in the kernel, when a run fails.

Files that were written and closed before are not found, nor those that a library writes in its own process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["files_being_written"]

_NOT_FILES = ("/dev/", "/proc/", "/memfd:", "/sys/")
_DELETED = " (deleted)"
_UNFINISHED = ".tmp-"
"""Part of the folder's name of a checkpoint that was being written: it will not exist under that name."""


def files_being_written(pids: Iterable[int], own_folder: str) -> list[str]:
    """Return the paths of regular files that processes hold open for writing, and this process does not.

    A forked rank holds the files that the kernel had open: the history of IPython is not one of the rank's files.

    own_folder: the run's private folder, which is removed with the run; files in it are left out.
    """
    private = os.path.realpath(own_folder) + os.sep
    ours = set(_written_by(os.getpid()))
    theirs = {path for pid in pids for path in _written_by(pid) if not path.startswith(private)}
    return sorted(theirs - ours)


def _written_by(pid: int) -> list[str]:
    paths = []
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # it is over already
        return []
    for number in numbers:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{number}")
            if (
                not path.startswith("/")
                or path.startswith(_NOT_FILES)
                or path.endswith(_DELETED)
                or _UNFINISHED in path
            ):
                continue
            with open(f"/proc/{pid}/fdinfo/{number}", encoding="utf-8") as info:
                flags = dict(line.split(":", 1) for line in info if ":" in line)["flags"]
        except (OSError, KeyError):
            continue
        if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
            paths.append(path)
    return paths


def _is_to_stay(path: str) -> bool:
    """Return whether `path` names a file that will exist later."""
    is_file = path.startswith("/") and not path.startswith(_NOT_FILES)
    return is_file and not path.endswith(_DELETED) and _UNFINISHED not in path
