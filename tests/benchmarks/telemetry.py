"""What telemetry costs: ``make bench ROWS=telemetry``. CPU time throughout, for other programs run too.

1. A record, in the rank: the median of many.
2. Reading, in the kernel: eight ranks report 1000 losses per second each; every half second they are read, made
   into events and given to a listener that counts them. Processor time of the kernel's side, and what was lost.

What it costs a prepared step is in the rows of `rows/step.py`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from benchmarks.findings import Finding, options_of, tell
from nbaccel.base.events import Event, Listener, Loss, emit, outlet
from nbaccel.launching.ipc.ring import RingWriter, make_ring
from nbaccel.launching.ipc.telemetry import TICK_S, Rings, Telemetry, write_loss
from nbaccel.launching.rank.reporter import Reporter

_RANKS = 8
_PER_SECOND = 1000


class _Counting(Listener):
    def __init__(self) -> None:
        self.losses = 0

    def feed(self, rank: int, at: float, event: Event) -> None:
        self.losses += isinstance(event, Loss)

    def tick(self, now: float) -> None:
        pass


def record(rounds: int) -> tuple[float, float]:
    """Median microseconds of one record: into the ring alone, and as an event through the outlet."""
    fd = make_ring()
    writer, reporter = (
        RingWriter(fd),
        Reporter(RingWriter(fd), lambda event: None, lambda event: None, lambda event: None),
    )
    reporter.start()

    def median(call: Callable[[int], object]) -> float:
        times = []
        for step in range(rounds * 1000):
            before = time.perf_counter_ns()
            call(step)
            times.append(time.perf_counter_ns() - before)
        return statistics.median(times) / 1e3

    nothing = median(lambda step: None)
    with outlet(reporter):
        whole = median(lambda step: emit(Loss(0.5, step)))
    return median(lambda step: write_loss(writer, step, 0.5)) - nothing, whole - nothing


def reading(seconds: float) -> tuple[float, int, int]:
    """Share of a core that reading takes, records that were written, and records that were lost."""
    counting = _Counting()
    rings = Rings()
    telemetry = Telemetry(rings, [counting], print)
    fds = [rings.add() for _ in range(_RANKS)]
    count = int(seconds * _PER_SECOND)
    children = [_writing_child(fd, count) for fd in fds]
    began, cpu = time.monotonic(), 0.0
    while children:
        time.sleep(telemetry.due_in(time.monotonic()))
        before = time.process_time()
        telemetry.tick(time.monotonic())
        cpu += time.process_time() - before
        children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
    share = cpu / (time.monotonic() - began)
    telemetry.read(time.monotonic(), is_last=True)
    rings.close()
    for fd in fds:
        os.close(fd)
    return share, _RANKS * count, _RANKS * count - counting.losses


def _writing_child(fd: int, count: int) -> int:
    child = os.fork()
    if child == 0:
        writer, began = RingWriter(fd), time.monotonic()
        for step in range(count):
            write_loss(writer, step, 0.5)
            if step % 10 == 9:
                time.sleep(max(0.0, began + step / _PER_SECOND - time.monotonic()))
        os._exit(0)
    return child


def findings(seconds: float, rounds: int) -> Iterator[Finding]:
    share, written, lost = reading(seconds)
    what = f"reading {_RANKS} ranks, {_PER_SECOND} losses/s each, every {TICK_S} s"
    yield Finding(what, "share of a core", share * 100, "%")
    yield Finding(what, f"lost of {written}", lost, "records", at_most=0)
    ring, event = record(rounds)
    yield Finding("a record, in the rank", "in the ring", ring, "us")
    yield Finding("a record, in the rank", "as an event", event, "us")


def main() -> int:
    options = options_of(__doc__, seconds=5.0, rounds=20)
    return tell(findings(options.seconds, options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
