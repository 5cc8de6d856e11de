"""What a long run costs the kernel: ``make bench ROWS=history``. From 1,000 to 1,000,000 steps, with 1, 4 and 16 ranks.

By processor time: a record, from the rank's ring to the history; a frame of the panel. By size: a frame, and the
history with all it refers to. Each is taken of one run, when it has come so far; none may grow with its steps.

Targets: 5 ms for a frame, 5 MB for the history, and 15 kB for a frame of up to four ranks, which makes 30 kB a second;
a row of the table and a line of the plot more for each rank are its size. By counts instead of times the same is in
`tests/features/panel/test_growth.py`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.findings import Finding, options_of, tell
from features.panel.longruns import STRETCH, LongRun, bytes_of

_RANKS = (1, 4, 16)
_FEW_RANKS = 4
_SAME_TIME, _SAME_SIZE = 1.5, 1.1
"""The last over the first: a time has its noise, a size the digits of larger numbers."""

_STRETCHES = 5
_FRAMES = 10


@dataclass(frozen=True, slots=True)
class State:
    """What a run costs that has come to `steps`."""

    steps: int
    record_us: float
    frame_ms: float
    frame_kb: float
    history_mb: float

    @classmethod
    def of(cls, run: LongRun, steps: int) -> State:
        """Let `run` go on until then, and see what its last steps cost."""
        run.go_on(max(0, steps - _STRETCHES * STRETCH))
        records_s = []
        while run.steps < steps:
            records = run.report()
            records_s.append(_used_s(run.read) / records)
        frames_s = [_used_s(run.frame) for _ in range(_FRAMES)]
        return cls(
            steps,
            statistics.median(records_s) * 1e6,
            statistics.median(frames_s) * 1e3,
            run.frame() / 1e3,
            bytes_of(run.history) / 1e6,
        )


def _used_s(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return time.process_time() - before


@dataclass(frozen=True, slots=True)
class Kind:
    """One column of `State`.  at_most: of each.  grows: the last over the first at most."""

    what: str
    of: Callable[[State], float]
    unit: str
    at_most: float | None = None
    grows: float | None = None

    def findings(self, ranks: int, states: list[State]) -> Iterator[Finding]:
        what = f"{self.what}, ranks: {ranks}"
        for state in states:
            yield Finding(what, f"after {state.steps:,} steps", self.of(state), self.unit, at_most=self.at_most)
        if self.grows is not None:
            grown = self.of(states[-1]) / self.of(states[0])
            yield Finding(what, "last over first", grown, "", at_most=self.grows)


def kinds(ranks: int) -> tuple[Kind, ...]:
    return (
        Kind("a record", lambda state: state.record_us, "us", grows=_SAME_TIME),
        Kind("a frame", lambda state: state.frame_ms, "ms", at_most=5.0, grows=_SAME_TIME),
        Kind(
            "bytes of a frame",
            lambda state: state.frame_kb,
            "kB",
            at_most=15.0 if ranks <= _FEW_RANKS else None,
            grows=_SAME_SIZE,
        ),
        Kind("the history", lambda state: state.history_mb, "MB", at_most=5.0),
    )


def report(most_steps: int) -> Iterator[Finding]:
    for ranks in _RANKS:
        with LongRun.of(ranks) as run:
            states = [State.of(run, 10**power) for power in range(3, 7) if 10**power <= most_steps]
        for kind in kinds(ranks):
            yield from kind.findings(ranks, states)


def main() -> int:
    options = options_of(__doc__, steps=1_000_000)
    return tell(report(options.steps), options.json)


if __name__ == "__main__":
    sys.exit(main())
