"""Lists the files that a rank writes anew, for a sweep. Runs in ranks; imports no torch.

These are the files that Python opens for writing, moves to a name, or that `torch.save` and the `save_file` of
safetensors write. Files that lines are added to (`open(path, "a")`) are not listed: runs may share such a one.
`nbaccel.features.sweep.shared_files` compares the lists of runs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from nbaccel.launching.ipc.import_hooks import when_loaded
from nbaccel.launching.ipc.rank_part import RankPart
from nbaccel.launching.libraries.one_file import is_private_file

__all__ = ["WrittenFiles", "note_written_files"]

_MOST_FILES = 10_000
"""Number of a rank's files that are listed: a run that writes more makes a file for each item."""


class WrittenFiles(RankPart):
    """Lists the files that a rank writes, in the file that the argument names."""

    def install(self) -> None:
        note_written_files(self.argument)


def note_written_files(path: str) -> None:
    """Begin to list the files that this process writes. Called once per process.

    Args:
        path: The path of the list, one line for each file; the folder it is in belongs to the run, and its files are
            not listed.
    """
    files = _Files(path)
    when_loaded({"torch": partial(_wrap_torch, files), "safetensors.torch": partial(_wrap_safetensors, files)})
    sys.addaudithook(files.look)  # stays until the process, a rank, ends


class _Files:
    """The files of this process.

    Args:
        path: The path of the list.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)  # the program may change the working directory
        self._home = os.getcwd()
        self._own_folder = os.path.dirname(os.path.abspath(path)) + os.sep
        self._known: set[str] = set()
        self._is_looking = False

    def look(self, event: str, args: tuple[Any, ...]) -> None:
        """Record an event of Python's; cheap for all but files, and never raises."""
        if event == "open":
            if isinstance(args[1], str) and args[1][:1] in "wx":
                self.note(args[0])
        elif event == "os.rename":
            self.note(args[1])

    def note(self, given: Any) -> None:
        """List a file, if the program gave a path."""
        if self._is_looking or not isinstance(given, (str, bytes, os.PathLike)):
            return
        self._is_looking = True  # what is opened meanwhile is the list
        try:
            path = os.path.abspath(os.fsdecode(given))
            is_known = path in self._known or path.startswith(self._own_folder) or len(self._known) >= _MOST_FILES
            if not is_known and not is_private_file(path, self._home):
                self._known.add(path)
                self._add(path)
        except Exception:  # an error here would appear as one of the program's own call
            pass
        finally:
            self._is_looking = False

    def _add(self, path: str) -> None:
        """Add a line in one write, which several ranks may do at once; what cannot be written is left out."""
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, os.fsencode(path).replace(b"\n", b" ") + b"\n")
        finally:
            os.close(fd)


def _wrap_torch(files: _Files, torch: Any) -> None:
    torch.save = torch.serialization.save = _noted(torch.save, files, 1, "f")


def _wrap_safetensors(files: _Files, module: Any) -> None:
    module.save_file = _noted(module.save_file, files, 1, "filename")


def _noted(function: Callable[..., Any], files: _Files, position: int, name: str) -> Callable[..., Any]:
    """Return `function`, which lists the path that it is given.

    Args:
        position, name: Those of that argument.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        files.note(args[position] if len(args) > position else kwargs.get(name))
        return function(*args, **kwargs)

    return call
