"""A run as the kernel sees it: what ranks leave in their rings becomes history and panel. For its test and benchmark.

The ranks are not there: this process writes what they would, so that a million steps take seconds.
"""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from nbaccel.base.events import Memory, Metric, Progress
from nbaccel.display.history import History
from nbaccel.features.panel.panel import Panel
from nbaccel.launching.ipc.ring import RingWriter
from nbaccel.launching.ipc.telemetry import Rings, Telemetry, write_event, write_loss

STRETCH = 1000
"""Steps between two readings, and steps that a measurement is of; a ring holds eight times as many records."""

_STEPS_PER_S = 100.0


class LongRun:
    """A training of `ranks` with a loss in every step, three numbers logged by rank 0 in every tenth, and the rest.

    steps: done so far.
    """

    def __init__(self, ranks: int, writers: list[RingWriter], telemetry: Telemetry, history: History) -> None:
        self.steps = 0
        self.history = history
        self._ranks = ranks
        self._writers = writers
        self._telemetry = telemetry
        self._panel = Panel(history)

    @classmethod
    @contextmanager
    def of(cls, ranks: int) -> Iterator[LongRun]:
        rings, history = Rings(), History(ranks)
        fds = [rings.add() for _ in range(ranks)]
        writers = [RingWriter(fd) for fd in fds]
        complaints: list[str] = []
        try:
            yield cls(ranks, writers, Telemetry(rings, [history], complaints.append), history)
            if complaints or history.lost:
                raise AssertionError(f"{history.lost} records were lost; {complaints}")
        finally:
            for writer in writers:
                writer.close()
            for fd in fds:
                os.close(fd)
            rings.close()

    def report(self) -> int:
        """The ranks do `STRETCH` steps; how many records they leave."""
        records = 0
        for step in range(self.steps, self.steps + STRETCH):
            at = step / _STEPS_PER_S
            for rank, writer in enumerate(self._writers):
                write_loss(writer, step, 1.0 / (step + 1) + rank / 100, at)
                records += 1
            if step % 10 == 0:
                write_event(self._writers[0], Metric({"lr": 1e-3, "acc": step / 1e7, "norm": 1.0}, step), at)
                records += 1
            if step % 50 == 0:
                for writer in self._writers:
                    write_event(writer, Progress(step + 1, step + 1, 10_000_000), at)
                    write_event(writer, Memory(4 * 10**8 + step, 5 * 10**8 + step, 24 * 10**9), at)
                    records += 2
        self.steps += STRETCH
        return records

    def read(self) -> None:
        """The kernel reads them, and makes them into events and history."""
        self._telemetry.read(self.steps / _STEPS_PER_S)

    def frame(self) -> int:
        """One picture, as half a second brings; its bytes."""
        bundle = self._panel.bundle(self.steps / _STEPS_PER_S)
        return sum(len(text.encode()) for text in bundle.values())

    def go_on(self, until: int) -> None:
        while self.steps < until:
            self.report()
            self.read()


def bytes_of(thing: object) -> int:
    """What `thing` and all it refers to take; classes, functions and modules are everybody's."""
    seen: dict[int, object] = {}
    found: list[object] = [thing]
    shared = type | types.FunctionType | types.ModuleType
    for at in count():
        if at == len(found):
            break
        one = found[at]
        if id(one) in seen or isinstance(one, shared):
            continue
        seen[id(one)] = one
        found.extend(gc.get_referents(one))
    return sum(map(sys.getsizeof, seen.values()))
