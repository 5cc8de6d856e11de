"""A notebook does not grow by the runs that are over, however they ended: memory, open files, threads, time.

A small version of it is in `make test`; `make soak` has the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from environments import NEWEST
from kernel.harness import RealKernel, accelerate

MAKES = """
get_ipython().history_manager.enabled = False  # at every fork IPython ends its thread, with a file, and begins another
import os, re, resource, torch
from torch.utils.data import DataLoader, TensorDataset
from nbaccel.testing import MemLimit

x = torch.randn(256, 8)
net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
data = TensorDataset(x, x.sum(1, keepdim=True))

def cpu_seconds():
    # The clock of os.times ticks every 10 ms, which is 7 % of the shortest cell.
    return sum(sum(resource.getrusage(whose)[:2]) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

def held():
    # Pages of libraries are left out: they are private as long as nobody else on the machine has loaded them.
    private = re.search(r"Private_Dirty:\\s+(\\d+)", open("/proc/self/smaps_rollup").read())
    return [int(private[1]) / 1024, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]
"""

TRAINS = """
model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.01), DataLoader(data, {batch}))
with MemLimit({limit} if accelerator.is_last_process else None):
    for a, b in loader:
        accelerator.backward(((model(a) - b) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
        {then}
"""


def trains(start: str) -> str:
    return accelerate(TRAINS.format(batch=16, limit=None, then=""), start)


CELLS = {
    "training": trains("fork"),
    "training by the zygote": trains("zygote"),
    "failing": accelerate(TRAINS.format(batch=16, limit=None, then="if float(a.sum()) < 1e9: 1 / 0"), "fork"),
    "recovering": accelerate(TRAINS.format(batch=64, limit=60_000, then=""), "fork"),
}

MOST_MIB = 0.2
"""Of private memory, for each cell."""

MOST_SLOWER = 1.1
"""The CPU seconds of the last cells over those of the first."""


@dataclass(frozen=True)
class Held:
    """What a kernel holds: MiB of private memory, open files, threads."""

    mib: float
    files: int
    threads: int


class Notebook:
    """A kernel of its own in which cells run; what each kind of them costs."""

    def __init__(self, folder: Path) -> None:
        self.kernel = RealKernel(NEWEST, folder)
        self.kernel.do(f"%load_ext nbaccel\n{MAKES}")

    def run(self, kind: str) -> float:
        """Run a cell of this kind; the CPU seconds that it took in the kernel and in ranks that are its children.

        A clock would also count what else the machine does.
        """
        began = self.kernel.value("cpu_seconds()")
        cell = self.kernel.run(CELLS[kind])
        if kind == "failing":
            cell.failed("ZeroDivisionError")
        else:
            cell.succeeded()
        assert ("started again with" in cell.text) is (kind == "recovering"), cell.text
        return float(self.kernel.value("cpu_seconds()") - began)

    def held(self) -> Held:
        return Held(*self.kernel.value("held()"))

    def held_by_cells(self) -> Held:
        """The least after each of two rounds of cells: a picture that the collector has not come to is no growth."""
        found = []
        for kind in [*CELLS] * 2:
            self.run(kind)
            found.append(self.held())
        return min(found, key=lambda held: held.mib)


PICTURE_MIB = 7
"""Of a figure to which the collector comes sooner or later. What is lost for good with each cell comes 24 times."""


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.kernel.close()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_cells_that_are_over_leave_no_memory_no_file_and_no_thread_in_the_kernel(notebook: Notebook) -> None:
    for kind in CELLS:
        notebook.run(kind)
    before = notebook.held_by_cells()
    for kind in [*CELLS] * 3:
        notebook.run(kind)
    after = notebook.held_by_cells()
    assert after.mib - before.mib <= MOST_MIB * 6 * len(CELLS) + PICTURE_MIB
    assert (after.files, after.threads) == (before.files, before.threads)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "count"), [("training", 200), ("training by the zygote", 60), ("failing", 60), ("recovering", 60)]
)
def test_hundreds_of_cells_cost_no_more_than_the_first(
    notebook: Notebook, kind: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(10):
        notebook.run(kind)
    before = notebook.held()
    seconds = [notebook.run(kind) for _ in range(count)]
    after = notebook.held()
    grown, part = (after.mib - before.mib) / count, count // 4
    first = median(seconds[:part])
    if median(seconds[-part:]) > MOST_SLOWER * first:
        # The machine's noise reaches a tenth. It comes and goes; what grows is twice as much after as many cells again.
        seconds += [notebook.run(kind) for _ in range(count)]
    last = median(seconds[-part:])
    with capsys.disabled():
        costs = f"{first:.3f} CPU seconds at first and {last:.3f} after {len(seconds)} cells"
        print(f"\n{kind}: {grown:+.3f} MiB a cell, {costs}")
    assert grown <= MOST_MIB
    assert (after.files, after.threads) == (before.files, before.threads)
    assert last <= MOST_SLOWER * first
