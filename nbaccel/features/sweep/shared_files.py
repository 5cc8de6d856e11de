"""SharedFiles: the files that two runs of a sweep write side by side. Runs in the kernel; pure.

Runs of a sweep go on in one working directory. If two of them save ``best.pt``, one loads what the other has saved, and
nothing fails. The ranks list what they write (`features/sweep/written_files.py`); here the lists are compared
while the runs go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["FileList", "SharedFiles"]


class FileList:
    """The list of the files that one run has written, as far as it was read.

    Args:
        path: The path of the list.

    Example:
        >>> FileList("/nowhere/files").added()
        set()
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._position = 0

    def added(self) -> set[str]:
        """Return the files that were added since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                lines = file.read().rpartition(b"\n")[0]
        except OSError:
            return set()
        if not lines:
            return set()
        self._position += len(lines) + 1
        return {os.fsdecode(line) for line in lines.split(b"\n")}


@dataclass(slots=True)
class _Run:
    """The files of one run.

    Args:
        beside: Numbers of the runs that went on at the same time.
    """

    source: FileList
    files: set[str] = field(default_factory=set)
    beside: set[int] = field(default_factory=set)
    is_over: bool = False


class SharedFiles:
    """Finds the files that several runs write which go on at the same time."""

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}
        self._said: set[str] = set()

    def begin(self, number: int, path: str) -> None:
        """Take note that a run begins.

        Args:
            path: The path of its list.
        """
        beside = {other for other, run in self._runs.items() if not run.is_over}
        for other in beside:
            self._runs[other].beside.add(number)
        self._runs[number] = _Run(FileList(path), beside=beside)

    def end(self, number: int) -> None:
        """Take note that a run is over; nothing happens if it has not begun."""
        if number not in self._runs:
            return
        self._files_of(number)
        self._runs[number].is_over = True

    def is_alone(self, number: int) -> bool:
        """Return whether a run that is over has written no file that one beside it had written by then."""
        run = self._runs[number]
        return not any(run.files & self._files_of(other) for other in run.beside)

    def found(self) -> Iterator[tuple[str, int, int]]:
        """Yield each file that two runs have written, once, with the numbers of the runs."""
        for number, run in self._runs.items():
            files = self._files_of(number)
            for other in run.beside:
                for path in sorted((files & self._files_of(other)) - self._said):
                    self._said.add(path)
                    yield path, min(number, other), max(number, other)

    def _files_of(self, number: int) -> set[str]:
        run = self._runs[number]
        if not run.is_over:
            run.files |= run.source.added()
        return run.files
