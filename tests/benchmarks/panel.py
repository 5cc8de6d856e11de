"""What following a run costs: ``make bench ROWS=panel``. A real kernel, two ranks that train, CPU time.

Turns with the panel and turns with ``--plain`` alternate, the same number of steps each; all panel turns together take
at least a minute by default. Of each turn: CPU time of the ranks in their training loop, which says what the panel
costs the training; CPU time of the kernel, and what it sent, between the first and the last frame of the run. The start
of a run and the picture at its end are counted apart: they do not grow with its length.

Targets: two updates a second, 30 kB/s, 3 % of a core, and 2 % of the ranks' time. Other programs change what a step
costs by more than that, so turns are short and many, and the last target is missed only where the median of their
ratios lies above it by more than twice its standard error.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.findings import Finding, options_of, tell
from environments import NEWEST
from kernel.harness import Cell, RealKernel

_UPDATES_PER_S, _BYTES_PER_S, _SHARE, _SLOWDOWN = 2.0, 30_000, 0.03, 0.02

_TRIAL_STEPS = 500

_TRAINS = """
%%accelerate --cpu -n 2 --seed 1 -o cpu_s {flags}
import resource, torch
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(4096, 256), torch.randint(10, (4096,)))
loader = torch.utils.data.DataLoader(data, batch_size=64)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

def used():
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime + now.ru_stime

steps = 0
while steps < {steps}:
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({{"loss": loss, "lr": 0.01}})
        steps += 1
        if steps == 20:
            began = used()
cpu_s = accelerator.gather(torch.tensor([used() - began], dtype=torch.float64)).tolist()
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One run.

    ranks_s: CPU time of both ranks in their loop.  kernel_s, whole_s: of the kernel between the first and the last
    frame, and from the cell's beginning to its end.  seconds, cell_s: how long these two took.
    updates, nbytes: messages between the first and the last frame, and their size.
    """

    ranks_s: float
    kernel_s: float
    whole_s: float
    seconds: float
    cell_s: float
    updates: int
    nbytes: int


def turn(kernel: RealKernel, steps: int, flags: str) -> Turn:
    """Train so many steps in two ranks, in a cell with these flags."""
    process = psutil.Process(kernel.pid)

    def used() -> float:
        times = process.cpu_times()
        return times.user + times.system

    marks: list[tuple[float, float, int]] = []  # when a frame came, the kernel's CPU time then, frames so far

    def watch(cell: Cell) -> bool:
        if len(cell.frames) > (marks[-1][2] if marks else 0):
            marks.append((time.monotonic(), used(), len(cell.frames)))
        return "brought back" in cell.stdout

    began, began_s = time.monotonic(), used()
    running = kernel.begin(_TRAINS.format(flags=flags, steps=steps))
    running.until(watch, timeout_s=600)
    cell = running.end(timeout_s=60).succeeded()
    whole_s, cell_s = used() - began_s, time.monotonic() - began
    ranks_s = sum(kernel.value("cpu_s"))
    live = marks[:-1]  # what comes when the loop is over is the end of the panel
    if len(live) < 2:
        return Turn(ranks_s, 0.0, whole_s, 0.0, cell_s, 0, 0)
    (first_at, first_s, first), (last_at, last_s, last) = live[0], live[-1]
    nbytes = sum(len(json.dumps(frame)) for frame in cell.frames[first:last])
    return Turn(ranks_s, last_s - first_s, whole_s, last_at - first_at, cell_s, last - first, nbytes)


def findings(panel: list[Turn], plain: list[Turn]) -> Iterator[Finding]:
    """What turns with the panel cost beside turns without, as many of each."""
    seconds = sum(one.seconds for one in panel)
    live = f"between first and last frame, {len(panel)} turns, {seconds:.0f} s"
    updates, nbytes = sum(one.updates for one in panel) / seconds, sum(one.nbytes for one in panel) / seconds
    yield Finding(live, "updates of the panel", updates, "/s", at_most=_UPDATES_PER_S * 1.01)
    yield Finding(live, "what they send", nbytes / 1000, "kB/s", at_most=_BYTES_PER_S / 1000)
    share = sum(one.kernel_s for one in panel) / seconds
    yield Finding(live, "the kernel, of a core", share * 100, "%", at_most=_SHARE * 100)
    rest = "the kernel's CPU time beside that, per run"
    yield Finding(rest, "with the panel", statistics.median(one.whole_s - one.kernel_s for one in panel), "s")
    yield Finding(rest, "--plain, in all", statistics.median(one.whole_s for one in plain), "s")
    ratios = [a.ranks_s / b.ranks_s for a, b in zip(panel, plain, strict=True)]
    slowdown = statistics.median(ratios) - 1
    error = 1.25 * statistics.stdev(ratios) / math.sqrt(len(ratios))  # of a median
    what = "CPU time of the ranks over --plain"
    yield Finding(what, "median of the turns", slowdown * 100, "%")
    yield Finding(what, "less twice its standard error", (slowdown - 2 * error) * 100, "%", at_most=_SLOWDOWN * 100)


def main() -> int:
    options = options_of(__doc__, turns=12, seconds=8.0)  # of training in a turn, about
    with tempfile.TemporaryDirectory() as folder:
        kernel = RealKernel(NEWEST, Path(folder))
        try:
            kernel.do("%load_ext nbaccel")
            turn(kernel, 100, "--plain")  # the first run of a kernel imports torch
            trial = turn(kernel, _TRIAL_STEPS, "--plain")
            steps = round(_TRIAL_STEPS * options.seconds / trial.cell_s)
            panel, plain = [], []
            for at in range(options.turns):
                kinds = [(panel, ""), (plain, "--plain")]
                for turns, flags in kinds if at % 2 else kinds[::-1]:
                    turns.append(turn(kernel, steps, flags))
        finally:
            kernel.close()
    return tell(findings(panel, plain), options.json)


if __name__ == "__main__":
    sys.exit(main())
