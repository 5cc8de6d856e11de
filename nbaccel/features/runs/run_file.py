"""RunFile: a file beside the notebook that keeps its runs, one line of JSON each. Runs in the kernel.

Lines are appended as a whole, also by several kernels at once; nothing that was written is changed. Each kernel reads
the lines that others have added since it last looked. A line holds numbers, texts and paths: of each curve the mean
over ranks, at 200 points at most.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nbaccel.base.events import Progress, Resumed
from nbaccel.display.course import StepCount
from nbaccel.display.history import History, Mark, Usage
from nbaccel.display.phase import PhaseRecord
from nbaccel.display.series import Line, Series
from nbaccel.display.summary import RunFacts, RunState
from nbaccel.launching.run import Run, RunOrigin

__all__ = ["RunFile"]

_VERSION = 1
_MOST_LINES = 1_000
_POINTS = 200
_DIGITS = 7
_MOST_CHARACTERS = 10_000
"""Longest JSON of a value that is kept."""


_State = tuple[int, int, int, int]
"""What differs after a file was changed: device and number, which are its own, size, time of the change."""

_NO_FILE: _State = (0, 0, 0, 0)


class RunFile:
    """The file at `path`, which need not exist yet; it knows which of its lines it has written or returned.

    >>> RunFile("/nowhere/runs.jsonl").read()
    ([], 0)
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._known: Counter[bytes] = Counter()  # digests of the lines that were written or returned by this object
        self._ahead: Counter[bytes] = Counter()  # of these, lines behind `_end`: others have written before them
        self._end = 0  # of the part of the file that is known
        self._state = _NO_FILE  # of the file when all of it was known

    def append(self, run: Run) -> None:
        """Append a run, as a whole line even if another kernel appends at the same time.

        Raises:
            OSError: The file cannot be written.
        """
        line = json.dumps(_record(run), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(fd, fcntl.LOCK_EX)  # without locks a short line is written whole even so
            before = _state_of(fd)
            size = before[2]
            cut = bool(size) and os.pread(fd, 1, size - 1) != b"\n"  # by a full disk or a kill
            rest = b"\n" + line if cut else line
            while rest:
                rest = rest[os.write(fd, rest) :]
            self._note_written(_digest(line), before, _state_of(fd), cut)
        finally:
            os.close(fd)

    def _note_written(self, digest: bytes, before: _State, after: _State, cut: bool) -> None:
        self._known[digest] += 1
        if (before == self._state and not cut) or not before[2]:
            self._end, self._state = after[2], after
        else:
            self._ahead[digest] += 1

    def read(self) -> tuple[list[Run], int]:
        """Return the runs that this object has neither written nor returned yet, and the number of damaged lines.

        They come oldest first, the latest 1,000 at most. A file that has not changed is not opened.

        Raises:
            OSError: The file exists and cannot be read.
        """
        try:
            if _state_of(self.path) == self._state:
                return [], 0
            with open(self.path, "rb") as file:
                _lock(file.fileno(), fcntl.LOCK_SH)
                state = _state_of(file.fileno())
                goes_on = state[:2] == self._state[:2] and state[2] > self._end
                if not goes_on:  # written anew, by an editor or git: only what is not known is new
                    self._ahead, self._end = self._known.copy(), 0
                file.seek(self._end)
                new = deque(self._new_lines(file), _MOST_LINES)
                self._state = state if self._end == state[2] else _NO_FILE
        except FileNotFoundError:
            return [], 0
        runs, damaged = [], 0
        for line in new:
            try:
                runs.append(_run(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError):  # cut short, or not written by this class
                damaged += 1
        return runs, damaged

    def _new_lines(self, file: Iterable[bytes]) -> Iterator[bytes]:
        for line in file:
            if not line.endswith(b"\n"):  # cut short: the next append ends it
                return
            self._end += len(line)
            if not self._is_known(line):
                yield line

    def _is_known(self, line: bytes) -> bool:
        """Return whether a line was written or returned before; each time that it was counts once."""
        digest = _digest(line)
        if self._ahead[digest]:
            self._ahead[digest] -= 1
            return True
        self._known[digest] += 1
        return False


def _lock(fd: int, kind: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, kind)


def _state_of(file: int | str) -> _State:
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).digest()[:16]


def _record(run: Run) -> dict[str, Any]:
    history, origin, ending = run.history, run.origin, run.ending
    return {
        "version": _VERSION,
        "cell": run.facts.title,
        "began": origin.began,
        "seconds": run.seconds,
        "word": ending.word,
        "sentence": ending.sentence,
        "flags": origin.flags,
        "choices": dict(origin.choices),
        "seed": origin.seed,
        "config": _plain(run.config) or {},
        "setting": run.facts.setting_of(history),
        "devices": list(run.facts.devices),
        "plots": list(run.facts.plots),
        "start": [run.start_method, run.start_reason],
        "log_path": run.log_path,
        "checkpoint": run.checkpoint,
        "stopped": run.stopped,
        "restarts": list(run.restarts),
        "error": "" if run.error is None else f"{type(run.error).__name__}: {run.error}"[:_MOST_CHARACTERS],
        "value": _plain(run.values[0]) if run.values else None,
        "history": _history_record(history),
        "runs": [_record(part) for part in run.runs],
    }


def _history_record(history: History) -> dict[str, Any]:
    return {
        "world_size": history.world_size,
        "seconds": history.seconds,
        "attempts": history.attempts,
        "first_step": history.first_step,
        "kept_steps": history.kept_steps,
        "resumed": None if history.resumed is None else [history.resumed.path, history.resumed.step],
        "marks": [[mark.at_s, mark.kind, mark.text, mark.rank, mark.step] for mark in history.marks],
        "memory": {
            rank: [usage.is_device, usage.used_bytes, usage.peak_bytes, usage.limit_bytes]
            for rank, usage in history.memory.items()
        },
        "phases": [
            {
                "name": phase.name,
                "began_s": phase.began_s,
                "steps": phase.steps,
                "training": _training_record(phase.training),
                "curves": {name: _curve_record(series) for name, series in phase.series.items()},
            }
            for phase in history.latest_phases
        ],
    }


def _training_record(training: Progress | None) -> list[Any] | None:
    """Return the position at which a training ended."""
    if training is None:
        return None
    return [training.epoch, training.epochs, training.batch, training.batches, training.samples]


def _curve_record(series: Series) -> dict[str, Any]:
    line = series.coarser(_POINTS).mean()
    record = {
        "step": list(line.step),
        "mean": _rounded(line.mean),
        "last": _rounded([series.latest])[0],
        "last_step": max(series.newest.values(), default=0),
    }
    if line.low != line.mean or line.high != line.mean:
        record |= {"low": _rounded(line.low), "high": _rounded(line.high)}
    return record


def _rounded(values: Sequence[float]) -> list[float | None]:
    """Return values in seven digits; None for those that JSON cannot write."""
    return [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in values]


def _plain(value: Any) -> Any:
    """Return a value that JSON returns unchanged and that is short, else None."""
    try:
        text = json.dumps(value, allow_nan=False)
        return value if len(text) <= _MOST_CHARACTERS and json.loads(text) == value else None
    except (TypeError, ValueError, RecursionError):
        return None


def _run(record: Mapping[str, Any]) -> Run:
    method, reason = record["start"]
    history = _history(record["history"])
    return Run(
        values=[record["value"]],
        history=history,
        error=RuntimeError(record["error"]) if record["error"] else None,
        start_method=method,
        start_reason=reason,
        log_path=record["log_path"],
        seconds=float(record["seconds"]),
        restarts=list(record["restarts"]),
        stopped=record["stopped"],
        checkpoint=record["checkpoint"],
        facts=RunFacts(record["cell"], record["setting"], tuple(record["devices"]), tuple(record["plots"])),
        state=RunState(record["word"], record["sentence"]),
        origin=RunOrigin(record["flags"], dict(record["choices"]), record["seed"], float(record["began"]), True),
        config=dict(record["config"]),
        runs=[_run(part) for part in record["runs"]],
    )


def _history(record: Mapping[str, Any]) -> History:
    history = History(int(record["world_size"]))
    history.seconds, history.attempts = float(record["seconds"]), int(record["attempts"])
    history.resumed = None if record["resumed"] is None else Resumed(*record["resumed"])
    history.marks = [Mark(*mark) for mark in record["marks"]]
    history.memory = {int(rank): Usage(*usage) for rank, usage in record["memory"].items()}
    first, kept = int(record["first_step"]), int(record["kept_steps"])
    history.phases = []
    for phase in record["phases"]:
        steps = int(phase["steps"]) + kept
        history.phases.append(_phase(phase, first, steps))
        first, kept = first + steps, 0
    return history


def _phase(record: Mapping[str, Any], first: int, steps: int) -> PhaseRecord:
    phase = PhaseRecord(record["name"], float(record["began_s"]))
    phase.metrics = {name: _series(curve) for name, curve in record["curves"].items()}
    progress = Progress(step=first + steps, first=first)
    if record["training"] is not None:
        epoch, epochs, batch, batches, samples = record["training"]
        training = replace(progress, epoch=epoch, epochs=epochs, batch=batch, batches=batches, samples=samples)
        phase.take(0, 0.0, training, None)
    elif steps:
        phase.counts[0] = StepCount()
        phase.counts[0].take(progress)
    return phase


def _series(record: Mapping[str, Any]) -> Series:
    mean = tuple(map(float, record["mean"]))
    low, high = (tuple(map(float, record.get(edge, mean))) for edge in ("low", "high"))
    last = math.nan if record["last"] is None else float(record["last"])
    return Series.of(Line(tuple(record["step"]), mean, low, high), last, int(record["last_step"]))
