"""Course of a run so far, as plain data in bounded memory. Pure; runs in the kernel.

A `History` is fed with the reports of the ranks; panels, figures and people read it. It holds the curves by rank, the
progress, speed and memory (`Usage`) of each rank, the values that the program logged (`Rows`), and what happened during
the run. It draws nothing and knows no process.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from nbaccel.base.events import (
    Checkpoint,
    Event,
    ExchangeTime,
    ItemsDone,
    Loss,
    Memory,
    Metric,
    OutOfMemory,
    Phase,
    Progress,
    RankRestarted,
    RecordsLost,
    Restarted,
    Resumed,
    TrainingMode,
)
from nbaccel.base.quantities import duration, number, plural
from nbaccel.display.phase import LOSS, PhaseRecord
from nbaccel.display.series import Line, Series
from nbaccel.features import feature

if TYPE_CHECKING:
    from nbaccel.features.map.item_count import ItemCount

__all__ = [
    "History",
    "Mark",
    "Rows",
    "Usage",
]

_MOST_POINTS, _FEWEST_POINTS = 512, 16
_ALL_POINTS = 40_000
"""Number of points of all curves together: 40 bytes each."""
_THIN_POINTS, _ALL_THIN_POINTS, _THIN_ROWS = 256, 4096, (128, 1024)
"""The same, and numbers of rows and values, for a run that is only remembered."""
_MOST_NAMES = 200
_MOST_MARKS = 200
_SPEED_EVERY_S = 0.5
_LEAST_EXCHANGE_S = 10.0
"""Seconds of a task below which starting and ending it decide about the share, and nobody gains by another number."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One thing that happened at one moment.

    Args:
        at_s: Seconds since the run began.
        kind: "oom", "checkpoint" or "restart".
        rank: The rank that took part; None for all ranks.
        step: The step to which it belongs; None for no step.
    """

    at_s: float
    kind: str
    text: str
    rank: int | None = None
    step: int | None = None


class History:
    """The record of a run of `world_size` ranks since `began_at` on the clock that feeds it.

    Attributes:
        rows: The values that rank 0 logged, one dict per `accelerator.log`; thinned evenly if there are very many.
        phases: Parts of the run with curves of their own, oldest first; the last one is the present one.
        memory: Present use by rank; peaks are those of all attempts.
        memory_bytes: Use by rank over time.
        speed: Optimizer steps per second over time. The steps of these two series are milliseconds.
        marks: Single events (memory ran out, a checkpoint was saved), oldest first.
        attempts: Number of times that the ranks were started: one more after each restart for memory.
        items: Counts of the items of a map; None in other runs.
        resumed: The checkpoint that the first attempt went on from; None if it began anew.
        mode: How the program trains, as the ranks have reported last; None before that.
        lost: Records of the ranks that never arrived.
        seconds: The time of the latest record, since the run began.

    Example:
        >>> history = History(2)
        >>> for rank in (0, 1):
        ...     history.feed(rank, 0.5, Loss(1.0 + rank, step=0))
        >>> history.curve("loss").mean, history.curve("loss", rank=1).mean
        ((1.5,), (2.0,))
    """

    def __init__(self, world_size: int = 1, began_at: float = 0.0) -> None:
        self.world_size = world_size
        self.rows = Rows()
        self.phases = [PhaseRecord()]
        self.memory: dict[int, Usage] = {}
        self.memory_bytes = Series(256)
        self.speed = Series(256)
        self.marks: list[Mark] = []
        self.items: ItemCount | None = None
        self.seconds = 0.0
        self.resumed: Resumed | None = None
        self.mode: TrainingMode | None = None
        self._began_at = began_at
        self._lost: dict[int, int] = {}
        self._exchanges: dict[int, ExchangeTime] = {}
        self._phase_of: dict[int, int] = {}
        self.attempts = 1
        self._first_phase = 0
        self._first: int | None = None  # steps that the program had done when its first attempt began
        self._points = _MOST_POINTS
        self._speed_due_s = 0.0

    # --- feeding -----------------------------------------------------------------------------------------------

    def feed(self, rank: int, at: float, event: Event) -> None:
        """Take the `event` that happened in `rank` at `at`; each rank's in their order. Unknown kinds are ignored."""
        take = _TAKE.get(type(event))
        if take is not None:
            at_s = at - self._began_at
            if at_s > self.seconds:
                self.seconds = at_s
            take(self, rank, at_s, event)

    def tick(self, now: float) -> None:
        """Do nothing: a history shows nothing."""

    def add_mark(self, mark: Mark) -> None:
        """Add `mark`. If there are very many marks, the first and the latest hundred are kept."""
        self.marks.append(mark)
        if len(self.marks) > _MOST_MARKS:
            del self.marks[_MOST_MARKS // 2]

    def _take_mode(self, rank: int, at_s: float, event: TrainingMode) -> None:
        self.mode = event

    def _take_loss(self, rank: int, at_s: float, event: Loss) -> None:
        phase = self._phase(rank, at_s)
        if phase.loss is None:
            phase.loss = Series(self._points)
        self._add(phase.loss, rank, event.step, event.value)
        phase.count_loss(rank, event)

    def _take_metric(self, rank: int, at_s: float, event: Metric) -> None:
        if rank == 0:
            self.rows.add(event.step, event.values)
        phase = self._phase(rank, at_s)
        metrics = phase.metrics
        for name, value in event.values.items():
            if not isinstance(value, int | float):
                continue
            if name == LOSS:
                phase.compare_logged_loss(rank, value)
            series = metrics.get(name)
            if series is None:
                if len(metrics) >= _MOST_NAMES:
                    continue
                series = metrics[name] = Series(self._points)
            self._add(series, rank, event.step, value)

    def _add(self, series: Series, rank: int, step: int, value: float) -> None:
        is_new = rank not in series.last
        series.add(rank, step, value)
        if is_new:
            self._share_points()

    def _phase(self, rank: int, at_s: float) -> PhaseRecord:
        """Return the phase that `rank` was in at `at_s`.

        Ranks are read in turn, so one may already be in the next phase; and a loss computed before a phase began may
        arrive after it, because its tensor has to be waited for.
        """
        at = self._phase_of.get(rank, 0)
        while at > self._first_phase and self.phases[at].entered.get(rank, 0.0) > at_s:
            at -= 1
        return self.phases[at]

    def _share_points(self) -> None:
        """Reduce the points of each curve after one was added, so that all together stay within `_ALL_POINTS`."""
        everything = [series for phase in self.phases for series in phase.curves]
        points = max(_FEWEST_POINTS, _ALL_POINTS // sum(len(series.last) for series in everything))
        if points < self._points:
            self._points = points
            for series in everything:
                series.shrink(points)

    def _take_progress(self, rank: int, at_s: float, event: Progress) -> None:
        phase = self._phase(rank, at_s)
        phase.take(rank, at_s, event, event.began - self._began_at if event.began else None)
        if rank != phase.leader or not event.is_training:
            return
        if (at_s >= self._speed_due_s or event.is_over) and (steps_per_s := phase.steps_per_s) is not None:
            self._speed_due_s = at_s + _SPEED_EVERY_S
            self.speed.add(rank, round(at_s * 1000), steps_per_s)

    def _take_memory(self, rank: int, at_s: float, event: Memory) -> None:
        usage, before = Usage.of(event), self.memory.get(rank)
        if before is not None and before.is_device == usage.is_device and before.peak_bytes > usage.peak_bytes:
            usage = replace(usage, peak_bytes=before.peak_bytes)  # of an earlier attempt
        self.memory[rank] = usage
        self.memory_bytes.add(rank, round(at_s * 1000), usage.used_bytes)

    def _take_out_of_memory(self, rank: int, at_s: float, event: OutOfMemory) -> None:
        size = f" with {plural(event.micro_batch_size, 'sample')}" if event.micro_batch_size else ""
        then = f"; goes on with {event.next_size}" if event.next_size else ""
        self.add_mark(Mark(at_s, "oom", f"ran out of memory in {event.phase}{size}{then}", rank, event.step))

    def _take_exchange_time(self, rank: int, at_s: float, event: ExchangeTime) -> None:
        self._exchanges[rank] = event

    def _take_checkpoint(self, rank: int, at_s: float, event: Checkpoint) -> None:
        self.add_mark(Mark(at_s, "checkpoint", f"saved {event.path} in {duration(event.seconds)}", None, event.step))

    def _take_phase(self, rank: int, at_s: float, event: Phase) -> None:
        """Enter a phase, which every rank reports. The first report opens it, unless nothing was recorded before."""
        at = self._phase_of.get(rank, 0)
        here = self.phases[at]
        if rank not in here.entered and (here.is_empty or here.name == event.name):
            here.name = event.name
        else:
            at += 1
            if at == len(self.phases):
                self.phases.append(PhaseRecord(event.name, at_s))
        self.phases[at].entered[rank] = at_s
        self._phase_of[rank] = at

    def _take_lost(self, rank: int, at_s: float, event: RecordsLost) -> None:
        self._lost[rank] = event.count

    def _take_restarted(self, rank: int, at_s: float, event: Restarted) -> None:
        """Begin a new attempt. Only the last attempt counts; the curves of the earlier ones stay readable."""
        self.add_mark(Mark(at_s, "restart", event.line))
        self.rows = Rows()
        self._exchanges.clear()
        if self._first is None:
            self._first = self.phases[self._first_phase].first
        self.attempts += 1
        if not self.phases[-1].is_empty:
            self.phases[-1].name = self.phases[-1].name or f"attempt {self.attempts - 1}"
            self.phases.append(PhaseRecord(f"attempt {self.attempts}", at_s))
        self._first_phase = len(self.phases) - 1
        self._phase_of = dict.fromkeys(range(self.world_size), self._first_phase)

    def _take_items(self, rank: int, at_s: float, event: ItemsDone) -> None:
        if self.items is None:  # of `accelerator.map` in a run that does more than that
            self.items = feature("counted items of a map")()
        self.items.take(rank, at_s, event)

    def _take_rank_restarted(self, rank: int, at_s: float, event: RankRestarted) -> None:
        """Mark that one rank has a new process; the others went on."""
        self.add_mark(Mark(at_s, "restart", event.line))
        if self.items is not None:
            self.items.restart(rank)

    def _take_resumed(self, rank: int, at_s: float, event: Resumed) -> None:
        self._phase(rank, at_s).resume(rank)
        if self.attempts == 1:  # later attempts go on from checkpoints of this run
            self.resumed = self.resumed or event

    # --- reading -----------------------------------------------------------------------------------------------

    def thinned(self) -> History:
        """Return the history of a run that is over, in some 250 kB at most: coarser curves, fewer rows.

        It takes no further events. That of a run so short that nothing would become coarser is this one itself.
        """
        kept = [self.memory_bytes, self.speed, *(series for phase in self.phases for series in phase.curves)]
        if not self.rows and all(series.longest <= _FEWEST_POINTS for series in kept):
            return self
        thin = copy.copy(self)
        tracks = sum(len(series.last) for phase in self.phases for series in phase.series.values())
        points = min(_THIN_POINTS, max(_FEWEST_POINTS, _ALL_THIN_POINTS // max(1, tracks)))
        thin.phases = [phase.thinned(points) for phase in self.phases]
        thin.memory_bytes, thin.speed = self.memory_bytes.coarser(_FEWEST_POINTS), self.speed.coarser(_FEWEST_POINTS)
        thin.rows = Rows(*_THIN_ROWS)
        for row in self.rows:
            thin.rows.add(row.pop("step"), row)
        return thin

    @property
    def latest_phases(self) -> list[PhaseRecord]:
        """Return the phases of the last attempt."""
        return self.phases[self._first_phase :]

    @property
    def lost(self) -> int:
        return sum(self._lost.values())

    @property
    def phase(self) -> PhaseRecord:
        """Return the present phase."""
        return self.phases[-1]

    @property
    def names(self) -> list[str]:
        """Return the names of the curves of the present phase, in the order in which they began."""
        return list(self.phase.series)

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps that every rank has done in this run and that were not lost.

        It counts all phases of the last attempt, and earlier attempts as far as the last one continued from a
        checkpoint of this run. Steps that a checkpoint or a rank brought along from before the run do not count.
        """
        return sum(phase.steps for phase in self.phases[self._first_phase :]) + self.kept_steps

    @property
    def first_step(self) -> int:
        """Return the steps that the program had done before this run began: in persistent ranks, or in a checkpoint."""
        first = self.phases[0].first if self._first is None else self._first
        return first or 0

    @property
    def kept_steps(self) -> int:
        """Return the part of `steps` that earlier attempts did."""
        first = self.phases[self._first_phase].first
        return 0 if first is None or self._first is None else max(0, first - self._first)

    @property
    def exchange_share(self) -> float | None:
        """Return the fraction of the last attempt's time that ranks spent in exchanges, waiting included, on average.

        None after a run that was too short to tell.
        """
        told = self._exchanges.values()
        if self.world_size < 2 or len(told) < self.world_size or min(each.of_s for each in told) < _LEAST_EXCHANGE_S:
            return None
        return sum(each.seconds / each.of_s for each in told) / len(told)

    @property
    def steps_per_s(self) -> float | None:
        """Return training steps per second over 15 seconds, without evaluations, of the latest phase that has them."""
        paces = [phase.steps_per_s for phase in reversed(self.phases[self._first_phase :])]
        return next((pace for pace in paces if pace is not None), None)

    @property
    def has_curves(self) -> bool:
        """Return whether any number was reported."""
        return any(phase.series for phase in self.phases)

    def curve(self, name: str, rank: int | None = None) -> Line:
        """Return one curve of the present phase: of one rank, or the mean over ranks.

        Raises:
            KeyError: Nothing of that name was logged.
        """
        series = self.phase.series.get(name)
        if series is None:
            raise KeyError(f"no curve is called {name!r}; there is: {', '.join(self.names) or 'none yet'}")
        return series.mean() if rank is None else series.line(rank)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain lists and dicts, ready for JSON.

        Curves have "step", "mean", "min" and "max", over all ranks, and under "ranks" for each rank. Memory is in
        bytes, times are in seconds since the run began.

        Example:
            >>> History(2).to_dict()["phases"]
            [{'name': '', 'began_s': 0.0, 'steps': 0, 'curves': {}}]
        """
        return {
            "world_size": self.world_size,
            "seconds": self.seconds,
            "steps": self.steps,
            "rows": list(self.rows),
            "phases": [
                {
                    "name": phase.name,
                    "began_s": phase.began_s,
                    "steps": phase.steps,
                    "curves": {name: _curve(series) for name, series in phase.series.items()},
                }
                for phase in self.phases
            ],
            "memory": {
                rank: {**asdict(usage), **_over_time(self.memory_bytes.line(rank), "bytes", peaks=True)}
                for rank, usage in sorted(self.memory.items())
            },
            "speed": _over_time(self.speed.mean(), "steps_per_s"),
            "marks": [asdict(mark) for mark in self.marks],
            **({} if self.items is None else {"items": self.items.to_dict()}),
            "lost": self.lost,
        }

    def to_pandas(self, rank: int | None = None) -> Any:
        """Return all curves as a `pandas.DataFrame`: a row for each phase and step, a column for each name.

        Args:
            rank: The rank to read; None for the mean over ranks.

        Raises:
            ImportError: The library pandas is not installed; `to_dict` works without it.
        """
        from nbaccel.display.history_tables import table_of

        return table_of(self, rank)

    def to_csv(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        """Write all curves to a file, with a line for each phase and step; an existing file is replaced.

        Columns: "phase", its name, empty in a run without phases; "step", the optimizer step, from 0; then each curve
        under its name, empty at steps at which it has no point. A curve has at most 512 points: in a longer run a line
        stands for several steps; it names the first of them, and its numbers are their means. `rows` has every value
        that rank 0 logged.

        Args:
            rank: The rank to read; None for the mean over ranks.
        """
        from nbaccel.display.history_tables import write_csv

        write_csv(self, path, rank)

    def __repr__(self) -> str:
        curves = ", ".join(f"{name} {number(series.latest)}" for name, series in self.phase.series.items())
        return f"<History: {plural(self.steps, 'step')}, {plural(self.world_size, 'rank')}; {curves or 'no curves'}>"


_TAKE: dict[type[Event], Callable[[History, int, float, Any], None]] = {
    Checkpoint: History._take_checkpoint,
    ExchangeTime: History._take_exchange_time,
    ItemsDone: History._take_items,
    Loss: History._take_loss,
    Memory: History._take_memory,
    Metric: History._take_metric,
    OutOfMemory: History._take_out_of_memory,
    Phase: History._take_phase,
    Progress: History._take_progress,
    RankRestarted: History._take_rank_restarted,
    RecordsLost: History._take_lost,
    Restarted: History._take_restarted,
    TrainingMode: History._take_mode,
    Resumed: History._take_resumed,
}


def _curve(series: Series) -> dict[str, Any]:
    return {**_columns(series.mean()), "ranks": {rank: _columns(series.line(rank)) for rank in series.ranks}}


def _columns(line: Line) -> dict[str, list[Any]]:
    return {"step": list(line.step), "mean": list(line.mean), "min": list(line.low), "max": list(line.high)}


def _over_time(line: Line, name: str, *, peaks: bool = False) -> dict[str, list[float]]:
    return {"seconds": [step / 1000 for step in line.step], name: list(line.high if peaks else line.mean)}


_MOST_ROWS = 12_000
_MOST_VALUES = 48_000
"""Number of values beyond which rows are thinned.

A row takes 170 bytes and 32 for each value, so wide rows go first.
"""


class Rows(Sequence[dict[str, Any]]):
    """Rows of (step, values) in the order in which they were logged.

    Beyond 12,000 rows, or 48,000 values, every second row is dropped, and from then on only every second new row is
    kept; the next time every fourth, and so on. The first and the last row are always there.

    Example:
        >>> rows = Rows()
        >>> rows.add(0, {"loss": 1.0}); rows.add(1, {"loss": 0.5})
        >>> list(rows)
        [{'step': 0, 'loss': 1.0}, {'step': 1, 'loss': 0.5}]
    """

    def __init__(self, most_rows: int = _MOST_ROWS, most_values: int = _MOST_VALUES) -> None:
        self._most_rows = most_rows
        self._most_values = most_values
        self._rows: list[tuple[int, tuple[str, ...], tuple[Any, ...]]] = []
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._last: tuple[int, tuple[str, ...], tuple[Any, ...]] | None = None
        self._seen = self._values = 0
        self._stride = 1

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the newest row."""
        names = tuple(values)
        row = (step, self._names.setdefault(names, names), tuple(values.values()))
        self._last = row
        if self._seen % self._stride == 0:
            self._rows.append(row)
            self._values += len(names)
            while len(self._rows) > self._most_rows or (self._values > self._most_values and len(self._rows) > 2):
                self._thin()
        self._seen += 1

    def _thin(self) -> None:
        del self._rows[1::2]
        self._stride *= 2
        self._values = sum(len(names) for _, names, _ in self._rows)
        used = {names for _, names, _ in self._rows}
        self._names = {names: names for names in used}

    def __len__(self) -> int:
        return len(self._rows) + self._last_is_extra

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]  # IndexError as a list would raise it
        row = self._rows[at] if at < len(self._rows) else self._last
        assert row is not None
        step, names, values = row
        return {"step": step, **dict(zip(names, values, strict=True))}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a sequence of the same rows."""
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    @property
    def _last_is_extra(self) -> bool:
        return self._last is not None and (not self._rows or self._rows[-1] is not self._last)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of the memory that a rank runs out of first: its device's, or the host's for a rank without a device.

    Args:
        is_device: Whether the memory is the device's.
        used_bytes: On a device the bytes that the allocator has reserved, since others cannot have these.
        limit_bytes: Limit of the memory; 0 if unknown.
    """

    is_device: bool
    used_bytes: int
    peak_bytes: int
    limit_bytes: int

    @classmethod
    def of(cls, memory: Memory) -> Usage:
        """Return the usage of the device, or of the host for a rank without a device.

        Example:
            >>> Usage.of(Memory(host_bytes=5, host_peak_bytes=7))
            Usage(is_device=False, used_bytes=5, peak_bytes=7, limit_bytes=0)
        """
        if memory.device_bytes is None:
            used = memory.host_bytes
            return cls(False, used, max(used, memory.host_peak_bytes), memory.host_limit_bytes or 0)
        used = max(memory.device_bytes, memory.device_reserved_bytes or 0)
        return cls(True, used, max(used, memory.device_peak_bytes or 0), memory.device_limit_bytes or 0)

    @property
    def used_part(self) -> float:
        """Return the used fraction, 0 to 1; 0 if the limit is unknown."""
        return min(1.0, self.used_bytes / self.limit_bytes) if self.limit_bytes else 0.0

    @property
    def peak_part(self) -> float:
        """Return the fraction at the peak, 0 to 1; 0 if the limit is unknown."""
        return min(1.0, self.peak_bytes / self.limit_bytes) if self.limit_bytes else 0.0
