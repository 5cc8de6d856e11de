"""find_executable_batch_size: seconds from an attempt that ran out of memory to the next one, and where it lands.

    make bench ROWS=executable

First by place and number of ranks: from the error on the last rank to the moment when the slowest rank begins the next
attempt. That holds waking the peers, cleaning up (a garbage collection), agreeing, and forming the group again. Then,
for a model under a `MemLimit`: attempts, and the size they end at, for our rule and, by the same decorator, for
Accelerate's (x 0.9). Accelerate's own decorator is in `planner.py` and `rows/recovery.py`.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain

import torch
import torch._dynamo  # before gc.freeze: every rank's first DDP imports it

from benchmarks.findings import Finding, options_of, tell
from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.testing import Faults, MemLimit, run_ranks
from searches import PLACES, training

WORLD_SIZES = (2, 4)
WIDTH = 256


class _Stamped(Faults):
    """Remembers when its program began an attempt, and when it went wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[float] = []
        self.failed_at = 0.0

    def at(self, point: str, value: object = None) -> object:
        if point == "beginning":
            self.began.append(time.monotonic())  # one clock for all processes of a machine
        try:
            return super().at(point, value)
        except torch.OutOfMemoryError:
            self.failed_at = time.monotonic()
            raise


def recoveries(repetitions: int) -> dict[str, list[tuple[float, float]]]:
    """In a rank: when its attempt failed (0 where it did not), and when the next one began; by place."""
    accelerator = Accelerator()
    times: dict[str, list[tuple[float, float]]] = {}
    for place, point in PLACES.items():
        for _ in range(repetitions):
            faults = _Stamped()
            faults.oom_at(
                point, rank=accelerator.num_processes - 1, **({} if point in ("beginning", "end") else {"step": 1})
            )
            with faults:
                training(accelerator, faults)()
            times.setdefault(place, []).append((faults.failed_at, faults.began[1]))
    return times


def seconds(repetitions: int) -> Iterator[Finding]:
    for world_size in WORLD_SIZES:
        told = run_ranks(world_size, recoveries, repetitions, timeout_s=300)
        what = f"from the error to the next attempt of the slowest of {world_size} ranks, median of {repetitions}"
        for place in PLACES:
            rounds = zip(*(rank[place] for rank in told), strict=True)
            took = [max(began for _, began in each) - max(failed for failed, _ in each) for each in rounds]
            yield Finding(what, place, statistics.median(took) * 1e3, "ms")


def attempts(start: int, limit_bytes: int, reduce: Callable[[dict[str, int]], Callable[[], int]] | None) -> list[int]:
    """The sizes that are tried until a step of a small model fits into `limit_bytes`."""
    tried: list[int] = []
    state = {"size": start}

    @find_executable_batch_size(
        starting_batch_size=start, reduce_batch_size_fn=None if reduce is None else reduce(state)
    )
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(4)]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(batch_size, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with MemLimit(limit_bytes):
        train()
    return tried


def largest(limit_bytes: int) -> int:
    """The largest size that fits, by bisection."""
    low, high = 0, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(attempts(middle, limit_bytes, None)) == 1 else (low, middle)
    return low


def nine_tenths(state: dict[str, int]) -> Callable[[], int]:
    """Accelerate 1.15's own rule."""

    def reduce() -> int:
        state["size"] = int(state["size"] * 0.9)
        return state["size"]

    return reduce


def sizes() -> Iterator[Finding]:
    for megabytes in (6, 8, 16):
        fits = largest(megabytes * 1_000_000)
        for start in (128, 1024, 4096):
            what = f"model in {megabytes} MB, {fits} samples fit, beginning at {start}"
            for who, reduce in (("nbaccel", None), ("Accelerate's rule, x 0.9", nine_tenths)):
                tried = attempts(start, megabytes * 1_000_000, reduce)
                yield Finding(what, f"{who}: attempts", len(tried), "")
                yield Finding(what, f"{who}: ends at", tried[-1] / fits * 100, "% of what fits")


def main() -> int:
    options = options_of(__doc__, repetitions=5)
    gc.freeze()  # as the launcher does before it forks
    torch.set_num_threads(1)
    return tell(chain(seconds(options.repetitions), sizes()), options.json)


if __name__ == "__main__":
    sys.exit(main())
