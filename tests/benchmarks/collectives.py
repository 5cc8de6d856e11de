"""What our gather and reduce cost over torch's own: 1 KiB, two gloo ranks, in turns. Run it as a script.

    python tests/benchmarks/collectives.py

Each turn makes twenty calls of every kind in random order; what is printed is the median over the turns of the
ratio to raw torch in the same turn. "raw again" is the noise: a ratio is only worse than raw by what exceeds it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from nbaccel import Accelerator
from nbaccel.testing import run_ranks

TURNS = 250
CALLS = 20
FLOATS = 256
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def measure() -> dict[str, tuple[float, float]]:
    """For each kind: microseconds a call, and the ratio to raw."""
    accelerator = Accelerator()
    mine = torch.ones(FLOATS)

    def raw_gather() -> None:
        all_gather(mine.new_empty(2 * FLOATS), mine)

    def raw_reduce() -> None:
        dist.all_reduce(mine.clone())

    kinds: dict[str, Callable[[], object]] = {
        "raw gather": raw_gather,
        "raw gather again": raw_gather,
        "gather": lambda: accelerator.gather(mine),
        "raw reduce": raw_reduce,
        "raw reduce again": raw_reduce,
        "reduce": lambda: accelerator.reduce(mine),
    }
    for _ in range(CALLS):
        accelerator.gather(mine)  # the first calls are compared between the ranks
    order = random.Random(0)
    names = list(kinds)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(TURNS):
        order.shuffle(names)
        for name in names:
            call = kinds[name]
            dist.barrier()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - began) / CALLS * 1e6)
    return {name: (statistics.median(taken), _ratio(taken, times[_raw(name)])) for name, taken in times.items()}


def _raw(name: str) -> str:
    return f"raw {name.removeprefix('raw ').removesuffix(' again')}"


def _ratio(taken: list[float], raw: list[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(taken, raw, strict=True))


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {FLOATS * 4} bytes, {TURNS} turns of {CALLS} calls")
    for name, (microseconds, ratio) in run_ranks(2, measure)[0].items():
        print(f"{name:18} {microseconds:8.1f} us  {ratio:6.3f} x raw")
