"""Runs: the runs of a notebook that are over, `nbaccel.runs`: tables and pictures of `EndedRuns`. In the kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from nbaccel.base.quantities import plural
from nbaccel.display.history_tables import import_pandas
from nbaccel.display.series import Line
from nbaccel.errors import LaunchRefused
from nbaccel.features.panel.comparison import RunComparison, RunRow, draw_runs
from nbaccel.features.panel.figure import Picture, picture
from nbaccel.features.panel.shared_plots import held_out_beside
from nbaccel.features.runs.run_file import RunFile
from nbaccel.features.runs.run_table import TableRow, differences, html_table, text_table
from nbaccel.launching.ended_runs import EndedRuns
from nbaccel.launching.run import Run

__all__ = ["Runs", "keep_runs", "show_runs"]

_POINTS = 120


class Runs(Sequence[Run]):
    """The runs of this notebook that are over, the oldest first.

    There is one for each ``%%accelerate`` cell, `launch`, `notebook_launcher`, `map` and `sweep`; the runs of a sweep
    are its `.runs`. The latest 1,000 are kept. They keep nothing else alive, see `Run`. The last four are whole; older
    ones have curves of at most 256 points and only short values.

        runs = nbaccel.runs
        runs                         # as the last line of a cell: a table, one line for each run
        runs[-2].curves["loss"]      # `runs[-1]` is `nbaccel.last_run`, unless another kernel has added one
        runs[-3:].plot("acc")        # as the last line of a cell: the curves of the last three in one axis
        runs.compare(3, 5)           # those of runs 3 and 5, by the numbers in the table, and how their flags differ
        runs.compare(metric=["loss", "acc"])  # those of all runs, one below the other
        runs.to_pandas()             # the table, as numbers

    Args:
        runs: The runs to begin with.

    Example:
        >>> len(Runs()), Runs()
        (0, no run yet)
    """

    def __init__(self, runs: Iterable[Run] | EndedRuns = ()) -> None:
        self._ended = runs if isinstance(runs, EndedRuns) else EndedRuns(runs)
        self._runs = self._ended.all
        self._everything: Sequence[Run] = self._runs  # where a slice looks for what its runs go on from

    def add(self, run: Run) -> None:
        """Add a run that is over, and give it the next number; append it to the file, if there is one.

        Args:
            run: The run, see `Run`.

        Raises:
            OSError: The file cannot be written; the run was added even so.

        Example:
            >>> nbaccel.runs.add(nbaccel.launch(train, 2))  # doctest: +SKIP
        """
        self._ended.add(run)

    def keep_in(self, path: str | None) -> str:
        """Keep the runs from now on in a file.

        When a file is named for the first time, its runs are placed before those of this kernel, all runs are numbered
        anew, and those of this kernel are appended to the file. Later calls add the runs that other kernels have
        appended meanwhile, with the next numbers.

        Args:
            path: The file; None for no file.

        Returns:
            A notice about damaged lines in the file; "" if there are none.

        Raises:
            OSError: The file cannot be read or written.

        Example:
            >>> nbaccel.runs.keep_in("runs.jsonl")  # doctest: +SKIP
        """
        ended = self._ended
        if path is None:
            ended.file = None
            return ""
        path = os.path.abspath(path)
        is_new = path not in ended.files
        file = ended.files.get(path, RunFile(path))
        others, damaged = file.read()
        ended.file = ended.files[path] = file
        if is_new:
            own = [run for run in self._runs if not run.origin.is_earlier]
            if others:
                ended.place_before(others)
            for run in own:
                file.append(run)
        else:
            for run in others:
                ended.append(run)
        if not damaged:
            return ""
        lines = plural(damaged, "damaged line")
        return f"{path}: {lines} could not be read and {'is' if damaged == 1 else 'are'} left out of nbaccel.runs"

    @property
    def newest(self) -> Run | None:
        """Return the last run of this kernel; where it has had none, the last of all, None if there is none."""
        return self._ended.newest

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Runs: ...
    def __getitem__(self, index: int | slice) -> Run | Runs:
        return self._part(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def _part(self, runs: Iterable[Run]) -> Runs:
        part = Runs(runs)
        part._everything = self._everything
        return part

    def numbered(self, *numbers: int) -> Runs:
        """Return the runs with some numbers, in their order.

        Args:
            *numbers: The numbers, as in the table.

        Raises:
            KeyError: No run has such a number.

        Example:
            >>> nbaccel.runs.numbered(3, 5).to_pandas()  # doctest: +SKIP
        """
        known = {run.number: run for run in self._runs}
        for one in numbers:
            if one not in known:
                there = f"there are runs {min(known)} to {max(known)}" if known else "there was no run yet"
                raise KeyError(f"no run has number {one}: {there}")
        return self._part(known[one] for one in numbers)

    def _whole_curve(self, run: Run, name: str) -> Line:
        """Return a curve of `run`, after that of the run that it goes on from, up to the saved step."""
        curves = run.history.phase.series
        line = curves[name].coarser(_POINTS).mean() if name in curves else Line()
        before = {earlier.number: earlier for earlier in self._everything if earlier.number < run.number}
        earlier = before.get(run.goes_on_from)
        if earlier is None or run.history.resumed is None:
            return line
        first = run.history.resumed.step
        head = self._whole_curve(earlier, name)
        kept = sum(step < first for step in head.step)
        return Line(
            head.step[:kept] + line.step,
            head.mean[:kept] + line.mean,
            head.low[:kept] + line.low,
            head.high[:kept] + line.high,
        )

    # --- tables ------------------------------------------------------------------------------------------------

    def table(self) -> list[dict[str, Any]]:
        """Return a dict for each run: its number, texts and paths, each flag that was chosen, and its last numbers.

        Example:
            >>> [row["run"] for row in nbaccel.runs.table()]  # doctest: +SKIP
        """
        return [_as_dict(run) for run in self._runs]

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame` with a row for each run.

        Raises:
            ImportError: Pandas is not installed; `table` works without it.

        Example:
            >>> nbaccel.runs.to_pandas().sort_values("loss")  # doctest: +SKIP
        """
        pandas = import_pandas("table() gives the same numbers")
        return pandas.DataFrame(self.table())

    def __repr__(self) -> str:
        return text_table([*map(_row, self._runs)])

    def _repr_html_(self) -> str:
        return html_table([*map(_row, self._runs)], "runs of this notebook")

    def _singles(self) -> Iterator[tuple[str, Run]]:
        """Yield each run with its number; in place of a sweep its runs, with numbers such as "5.1"."""
        for run in self._runs:
            if not run.runs:
                yield str(run.number), run
            for at, part in enumerate(run.runs, 1):
                yield f"{run.number}.{at}", part

    # --- pictures ----------------------------------------------------------------------------------------------

    def compare(self, *numbers: int, metric: str | Sequence[str] = ()) -> Picture:
        """Return the curves of some runs in one axis, and the flags in which they differ.

        Args:
            metric: The name of a curve, or several; by default as for `plot`.
            *numbers: The numbers of the runs, as in the table; none for all runs.

        Raises:
            KeyError: No run has that number, or no run has that metric.

        Example:
            >>> nbaccel.runs.compare(3, 5, metric="loss")  # doctest: +SKIP
        """
        chosen = [metric] if isinstance(metric, str) else metric
        return (self.numbered(*numbers) if numbers else self).plot(*chosen)

    def plot(self, *metrics: str) -> Picture:
        """Return the curves of these runs in one axis, and the flags in which they differ.

        A run that continued another one continues its curve at the saved step. A sweep is drawn as its runs. Of up to
        eight runs, the curves of the same metric on held-out data, such as "val_loss" beside "loss", are in the axis
        too.

        Args:
            *metrics: The names of curves, drawn one below the other; by default the loss, or else the first metric of
                most runs.

        Raises:
            KeyError: No run has a curve of that name.

        Example:
            >>> nbaccel.runs.plot("loss")  # doctest: +SKIP
        """
        drawn = [*self._singles()]
        known = dict.fromkeys(name for _, run in drawn for name in run.history.phase.series)
        for name in metrics:
            if name not in known:
                raise KeyError(f"no curve of these runs is called {name!r}; there is: {', '.join(known) or 'none'}")
        differ = differences({number: _choices_of(run) for number, run in drawn})
        first, *more = [self._compared(drawn, differ, name) for name in dict.fromkeys(metrics or [""])]
        line = _describe_differences(differ)
        return picture(draw_runs(first, line, more), f"{self!r}\n{line}")

    def _compared(
        self, drawn: Sequence[tuple[str, Run]], differ: Mapping[str, Mapping[str, str]], name: str
    ) -> RunComparison:
        """Return runs, given with their numbers, as rows.

        Args:
            name: The curve of each; empty for the run's own choice.
        """
        comparison = RunComparison()
        for at, (number, run) in enumerate(drawn, 1):
            words = [f"{key}={values[number]}" for key, values in differ.items() if values[number]]
            curves = run.history.phase.series
            shown = name or next(iter(run.facts.shown(list(curves))), "")
            series = curves.get(shown)
            beside = [] if series is None else held_out_beside(shown, curves)
            comparison.add(
                RunRow(
                    number=at,
                    label=f"{number}.",
                    title=" ".join([run.facts.title.removeprefix("Cell "), *words]),
                    word=run.ending.word,
                    seconds=run.seconds,
                    name="" if series is None else shown,
                    curve=self._whole_curve(run, shown) if series is not None else Line(),
                    latest=float("nan") if series is None else series.latest,
                    held_out=tuple((other, self._whole_curve(run, other)) for other in beside),
                )
            )
        return comparison


def _choices_of(run: Run) -> dict[str, str]:
    """Return the choices of a run, and in a sweep its own values, as text."""
    return {**run.origin.choices, **{name: str(value) for name, value in run.config.items()}}


def _row(run: Run) -> TableRow:
    origin = run.origin
    notes = [
        f"goes on from run {run.goes_on_from}" if run.goes_on_from else "",
        f"{len(run.runs)} runs" if run.runs else "",
        "another kernel" if origin.is_earlier else "",
    ]
    return TableRow.of(
        run.number,
        run.history,
        run.facts,
        run.ending,
        run.seconds,
        flags=origin.flags,
        seed=origin.seed,
        began=origin.began,
        notes=notes,
    )


def _as_dict(run: Run) -> dict[str, Any]:
    origin = run.origin
    return {
        "run": run.number,
        "cell": run.facts.title,
        "flags": origin.flags,
        "began": origin.began,
        "seconds": run.seconds,
        "ended": run.ending.word,
        "sentence": run.ending.sentence,
        "steps": run.history.steps,
        "goes_on_from": run.goes_on_from or None,
        "log_path": run.log_path,
        "checkpoint": run.checkpoint,
        **origin.choices,
        **run.config,
        "seed": origin.seed,
        **{name: series.latest for name, series in run.history.phase.series.items()},
    }


def _describe_differences(differ: dict[str, dict[str, str]]) -> str:
    """Return the flags in which runs differ, in one line.

    Example:
        >>> _describe_differences({"seed": {"3": "1", "5": "2"}})
        'different: seed (run 3: 1, run 5: 2)'
    """
    if not differ:
        return "the same flags"
    parts = []
    for name, values in differ.items():
        each = ", ".join(f"run {run}: {value or 'default'}" for run, value in values.items())
        parts.append(f"{name} ({each})")
    return f"different: {', '.join(parts)}"


def keep_runs(ended: EndedRuns, path: str) -> str:
    """Keep runs from now on in the file at `path`, see `Runs.keep_in`; return its notice.

    Raises:
        LaunchRefused: The file cannot be read or written.
    """
    try:
        return Runs(ended).keep_in(path)
    except OSError as error:
        raise LaunchRefused(
            f"keep-runs: {path} cannot be used ({error.strerror}); name another file, or leave it out."
        ) from None


def show_runs(ended: EndedRuns, rest: str) -> Runs | Picture:
    """Return what `%accelerate runs` shows: the table of runs, or a picture of some.

    Args:
        rest: Numbers of runs, and names of metrics, "3 5 accuracy"; without a number all runs are drawn.

    Raises:
        KeyError: No run has such a number, or such a metric.
    """
    runs, words = Runs(ended), rest.replace(",", " ").split()
    numbers = [int(word) for word in words if word.isdecimal()]
    metrics = [word for word in words if not word.isdecimal()]
    return runs.compare(*numbers, metric=metrics) if words else runs
