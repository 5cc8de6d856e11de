"""How long a launch takes: `python tests/benchmarks/launch.py [--rounds 30]`. Prints medians in milliseconds.

Rows: an empty function in 2 ranks; the same with a process group; up to the end of the first DDP step; each under
fork and zygote, with a plain `os.fork` of two children beside them as the floor. Judge on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

from nbaccel.launch.functions import launch


def empty() -> None:
    """What a launch costs when the ranks do nothing."""


def group() -> None:
    """Join a process group."""
    import torch.distributed as dist

    dist.init_process_group("gloo")


def first_step() -> float:
    """The moment (monotonic) at which one DDP step was done."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 16)).mean().backward()
    optimizer.step()
    return time.monotonic()


def plain_fork() -> None:
    """Two children that end at once: no launcher can be faster."""
    children = []
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def total_s(function: Callable[[], object], start_method: str) -> float:
    began = time.perf_counter()
    launch(function, 2, start_method=start_method, cpu=True)
    return time.perf_counter() - began


def to_first_step_s(start_method: str) -> float:
    began = time.monotonic()
    done_at: list[float] = launch(first_step, 2, start_method=start_method, cpu=True).values
    return max(done_at) - began


def plain_fork_s() -> float:
    began = time.perf_counter()
    plain_fork()
    return time.perf_counter() - began


ROWS: dict[str, Callable[[], float]] = {
    "os.fork twice": plain_fork_s,
    **{
        f"{name}, {start}": (lambda function=function, start=start: total_s(function, start))  # type: ignore[misc]
        for start in ("fork", "zygote")
        for name, function in (("empty", empty), ("with a group", group))
    },
    **{
        f"first DDP step done, {start}": (lambda start=start: to_first_step_s(start))  # type: ignore[misc]
        for start in ("fork", "zygote")
    },
}


def measure(rounds: int) -> dict[str, list[float]]:
    """Milliseconds by row; the rows take turns, so that noise meets all of them."""
    for row in ROWS.values():
        row()
    times: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(rounds):
        for name, row in ROWS.items():
            times[name].append(row() * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    print(f"{'2 ranks, warm':32} {'median ms':>10} {'min':>8} {'max':>8}")
    for name, values in measure(parser.parse_args().rounds).items():
        print(f"{name:32} {statistics.median(values):>10.1f} {min(values):>8.1f} {max(values):>8.1f}")


if __name__ == "__main__":
    main()
