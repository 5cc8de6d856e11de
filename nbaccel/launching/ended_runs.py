"""EndedRuns: the runs of this process that are over, as plain data. In the kernel.

The `Launcher` adds each run when it ends. The latest few are kept whole, those before with coarser curves, and a
thousand at most: numbers, text and paths, no object of the program.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from nbaccel.launching.run import Run

__all__ = ["EndedRuns"]

_MOST_RUNS, _WHOLE_RUNS = 1_000, 4


class _RunSink(Protocol):
    def append(self, run: Run) -> None:
        """Keep a run; OSError if that fails."""


class EndedRuns:
    """The runs, oldest first; each has its number, and the number of the run whose checkpoint it resumed.

    Args:
        runs: Runs that have their numbers.

    Attributes:
        all: The runs.
        file: What keeps each further run; None for nothing.
        files: All that have been `file`, by path.
    """

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self.all = list(runs)
        self.file: _RunSink | None = None
        self.files: dict[str, Any] = {}
        self._added = max((run.number for run in self.all), default=0)

    def add(self, run: Run) -> None:
        """Add a run that is over, and give it the next number; append it to the file, if there is one.

        Raises:
            OSError: The file cannot be written; the run was added even so.
        """
        if not run.origin.began:
            run.origin = replace(run.origin, began=time.time() - run.seconds)
        self.append(run)
        if self.file is not None:
            self.file.append(run)

    def append(self, run: Run) -> None:
        """Add a run as it is, and give it the next number."""
        self._number(run)
        self.all.append(run)
        if len(self.all) > _WHOLE_RUNS:
            self.all[-1 - _WHOLE_RUNS] = self.all[-1 - _WHOLE_RUNS].thinned()
        del self.all[:-_MOST_RUNS]

    def place_before(self, earlier: list[Run]) -> None:
        """Place runs before the others, and number all anew."""
        self.all[:0] = earlier
        del self.all[:-_MOST_RUNS]
        self._added = 0
        for run in self.all:
            self._number(run)

    @property
    def newest(self) -> Run | None:
        """Return the last run of this kernel; where it has had none, the last of all, None if there is none."""
        own = (run for run in reversed(self.all) if not run.origin.is_earlier)
        return next(own, self.all[-1] if self.all else None)

    def _number(self, run: Run) -> None:
        self._added += 1
        run.number = self._added
        earlier = self._resumed_by(run)
        run.goes_on_from = 0 if earlier is None else earlier.number

    def _resumed_by(self, run: Run) -> Run | None:
        """Return the run that wrote the checkpoint from which `run` went on."""
        resumed = run.history.resumed
        if resumed is None:
            return None
        path = os.path.abspath(resumed.path)
        others = (earlier for earlier in reversed(self.all) if earlier is not run)
        return next((earlier for earlier in others if path in map(os.path.abspath, _saved_by(earlier))), None)


def _saved_by(run: Run) -> Iterator[str]:
    """Yield the checkpoints that a run wrote and that are known: the newest, and those marked in its history."""
    yield run.checkpoint
    for mark in run.history.marks:
        if mark.kind == "checkpoint":
            yield mark.text.removeprefix("saved ").rpartition(" in ")[0]
