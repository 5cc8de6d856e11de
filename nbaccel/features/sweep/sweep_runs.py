"""SweepRuns: the result of a sweep, as runs and as a table. Pure data; in the kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, overload

from nbaccel.base.quantities import plural
from nbaccel.display.history_tables import import_pandas
from nbaccel.features.sweep.finished_runs import describe_configuration
from nbaccel.launching.run import Run

__all__ = [
    "SweepRuns",
    "counted",
    "line_of",
]


class SweepRuns(Sequence[Run]):
    """The runs of a sweep, in the order of its configurations. Each is the `Run` of `launch`.

    `run.config` has its values, `run.value` what rank 0 returned, `run.error` its error, None if it ended well.

    Example:
        >>> from nbaccel.display.history import History
        >>> run = Run([0.9], History(1), None, "fork", "", "", seconds=2.0, config={"lr": 0.1})
        >>> SweepRuns([run]).table()
        [{'lr': 0.1, 'value': 0.9, 'seconds': 2.0, 'status': 'done', 'seed': None}]
    """

    def __init__(self, runs: Sequence[Run], title: str = "") -> None:
        self._runs = list(runs)
        self._title = title

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, at: int) -> Run: ...
    @overload
    def __getitem__(self, at: slice) -> SweepRuns: ...
    def __getitem__(self, at: int | slice) -> Run | SweepRuns:
        return SweepRuns(self._runs[at], self._title) if isinstance(at, slice) else self._runs[at]

    def table(self) -> list[dict[str, Any]]:
        """Return one row for each run: its values, its result, its last numbers, seconds, status and seed.

        A result that is a dict has a column for each of its names, another one is "value". A name that occurs twice
        keeps the value that the sweep gave.
        """
        return [_row_of(run) for run in self._runs]

    def to_pandas(self) -> Any:
        """Return `table` as a `pandas.DataFrame`.

        Raises:
            ImportError: Pandas is not installed.
        """
        pandas = import_pandas("table() gives the same rows")
        return pandas.DataFrame(self.table())

    def __repr__(self) -> str:
        lines = [f"{at}. {line_of(run)}" for at, run in enumerate(self._runs, 1)]
        return "\n".join([f"{self._title or 'sweep'}: {counted(self._runs)}", *lines])


def counted(runs: Sequence[Run]) -> str:
    """Return how many runs ended how.

    Example:
        >>> counted([])
        '0 runs'
    """
    ends = Counter(run.state.word for run in runs if run.state is not None)
    words = [f"{ends[word]} {word}" for word in ("done", "failed", "stopped") if ends[word]]
    return f"{plural(len(runs), 'run')}{': ' if words else ''}{', '.join(words)}"


def line_of(run: Run) -> str:
    return f"{describe_configuration(run.config)}: {run.in_a_line()}"


def _row_of(run: Run) -> dict[str, Any]:
    value = run.value if run.values else None
    result = {str(name): part for name, part in value.items()} if isinstance(value, dict) else {"value": value}
    history = run.history
    numbers = {name: history.phase.series[name].latest for name in history.names}
    word = "" if run.state is None else run.state.word
    about = {"seconds": run.seconds, "status": word, "seed": run.origin.seed}
    return _in_order(run.config, result, numbers, about)


def _in_order(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return all entries; of equal names the first counts."""
    row: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            row.setdefault(name, value)
    return row
