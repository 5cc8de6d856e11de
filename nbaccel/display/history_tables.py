"""The curves of a history as tables: for pandas, and as a file of text. Runs in the kernel."""

from __future__ import annotations

import csv
import os
from importlib import import_module
from typing import Any, Protocol

from nbaccel.display.phase import PhaseRecord

__all__ = ["HasPhases", "import_pandas", "table_of", "write_csv"]


class HasPhases(Protocol):
    """A history, by what its tables show."""

    @property
    def phases(self) -> list[PhaseRecord]:
        """Return its phases, in their order."""


def table_of(history: HasPhases, rank: int | None) -> Any:
    """Return all curves as a `pandas.DataFrame`, see `History.to_pandas`."""
    pandas = import_pandas("to_dict() gives the same numbers")
    frames = []
    for phase in history.phases:
        lines = {name: series.mean() if rank is None else series.line(rank) for name, series in phase.series.items()}
        columns = {name: pandas.Series(line.mean, index=list(line.step), dtype=float) for name, line in lines.items()}
        frames.append(pandas.DataFrame(columns).sort_index())
    return pandas.concat(frames, keys=[phase.name for phase in history.phases], names=["phase", "step"])


def write_csv(history: HasPhases, path: str | os.PathLike[str], rank: int | None) -> None:
    """Write all curves to a file, see `History.to_csv`."""
    names = list(dict.fromkeys(name for phase in history.phases for name in phase.series))
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["phase", "step", *names])
        for phase in history.phases:
            lines = [series.mean() if rank is None else series.line(rank) for series in phase.series.values()]
            columns = {
                name: dict(zip(line.step, line.mean, strict=True))
                for name, line in zip(phase.series, lines, strict=True)
            }
            for step in sorted({step for column in columns.values() for step in column}):
                table.writerow([phase.name, step, *(columns.get(name, {}).get(step, "") for name in names)])


def import_pandas(instead: str) -> Any:
    """Return the module pandas.

    Args:
        instead: The end of the error where it is not installed, such as "table() gives the same numbers".

    Raises:
        ImportError: The library pandas is not installed.
    """
    try:
        return import_module("pandas")
    except ImportError:
        raise ImportError(f"to_pandas() needs pandas: pip install pandas. {instead} without it.") from None
