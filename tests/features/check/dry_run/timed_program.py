"""Programs that run by a manual clock: whole, and as a dry run. What a dry run foretells is compared with the truth.

A program is a text. It calls `work(seconds)` for what takes time, `step()` for a step of an optimizer, and iterates
over a `Loader`; `training(...)` is a training by a library.
"""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from nbaccel.features.check.dry_run import rewriting
from nbaccel.features.check.dry_run.loop_log import LoopLog
from nbaccel.features.check.dry_run.rewriting import Table
from nbaccel.features.check.forecasts.forecast import Forecast, forecast
from nbaccel.features.check.forecasts.trainer_counts import TRAINING


class Clock:
    """A clock that moves when something works."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


class Loader:
    """A loader of batches, which are their sizes; a dry run has the longest one, the middle one and the last one.

    more: further ones that the second pass of a dry run has.
    """

    def __init__(
        self,
        sizes: list[float],
        clock: Clock,
        log: LoopLog | None,
        load_s: float = 0.0,
        has_length: bool = True,
        more: int = 0,
    ) -> None:
        self.more, self.passes = more, 0
        self.sizes, self.clock, self.log, self.load_s = sizes, clock, log, load_s
        self.has_length = has_length

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError("no length")
        return len(self.sizes)

    def __iter__(self) -> Iterator[float]:
        if self.log is None:
            for size in self.sizes:
                self.clock.work(self.load_s)
                yield size
            return
        yield from self._cut(self.log)

    def _cut(self, log: LoopLog) -> Iterator[float]:
        sizes = self.sizes
        mean = sum(sizes) / len(sizes)
        begun = log.begin_pass("program", "loader", len(sizes) if self.has_length else None, mean)
        between = sorted(sizes)[len(sizes) // 2]
        self.passes += 1
        middle = [(between, "between")] * (1 + self.more * (self.passes == 2))
        chosen = [(max(sizes), "longest"), *middle, (sizes[-1], "last")]
        is_whole = len(sizes) <= len(chosen)
        try:
            for size, kind in [(size, "between") for size in sizes] if is_whole else chosen:
                self.clock.work(self.load_s)
                begun.batch(size, kind, waited_s=self.load_s)
                yield size
            begun.end(is_whole)
        finally:
            begun.end(False)


@dataclass
class DryRun:
    """A dry run that is over.  records: as the kernel reads them.  names: the variables of the program."""

    records: list[dict[str, Any]]
    table: Table
    names: dict[str, Any]
    lines: set[int] = field(default_factory=set)

    def forecast(self, noise: float = 0.0) -> Forecast:
        return forecast(self.records, self.table, noise)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.records if each["kind"] == kind]


def names_of(clock: Clock, log: LoopLog | None, load_s: float = 0.0) -> dict[str, Any]:
    """Return the names that a program finds."""

    def loader(sizes: Any, seconds: float = load_s, has_length: bool = True, more: int = 0) -> Loader:
        return Loader([1.0] * sizes if isinstance(sizes, int) else sizes, clock, log, seconds, has_length, more)

    step: Callable[[], None] = (lambda: None) if log is None else log.note_step

    def training(epochs: int, batches: Loader, facts: dict[str, Any], every_s: dict[int, float]) -> None:
        """Train as a trainer of a library does.  every_s: seconds of its other parts, which run after each epoch."""
        part = (lambda number, facts: nullcontext()) if log is None else log.part
        with part(TRAINING, {"epochs": epochs, **facts}):
            for _ in range(epochs if log is None else min(epochs, 2)):
                for _ in batches:
                    clock.work(0.1)
                    step()
                for number, seconds in every_s.items():
                    with part(number, {}):
                        clock.work(seconds)

    return {"work": clock.work, "step": step, "loader": loader, "training": training, "__name__": "program"}


def run_whole(text: str) -> float:
    """Run a program to its end, and return its seconds."""
    clock = Clock()
    began = clock.now
    exec(compile(textwrap.dedent(text), "program", "exec"), names_of(clock, None))
    return clock.now - began


def run_dry(text: str, monkeypatch: Any, marks_lines: bool = False) -> DryRun:
    """Run a program as a dry run does."""
    clock, records, reached = Clock(), [], set[int]()
    log = LoopLog(lambda record: records.append(json.loads(json.dumps(record))), clock)
    tree = ast.parse(textwrap.dedent(text))
    table = rewriting.rewrite(tree, marks_lines=marks_lines)
    monkeypatch.setattr("builtins." + rewriting.LOG, log, raising=False)
    monkeypatch.setattr("builtins." + rewriting.REACHED, reached.add, raising=False)
    names = names_of(clock, log)
    exec(compile(tree, "program", "exec"), names)
    assert log._open.top.number == -1, "something is still open"
    log.close()
    return DryRun(records, json.loads(json.dumps(table)), names, reached)
