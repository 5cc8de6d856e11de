"""`%%accelerate --speed` in a real kernel: planted bottlenecks are found, and the lines that it shows remove them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from environments import NEWEST
from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]

SETUP = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
X = torch.randn(4096, 20)
Y = (X.sum(1) > 0).long()

class Slow(Dataset):
    def __len__(self):
        return 3200
    def __getitem__(self, index):
        time.sleep(0.002)
        return X[index], Y[index]
"""

SMALL = """
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""

WIDE = """
model = nn.Sequential(nn.Linear(20, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""

LOOP = """
began, seen = time.perf_counter(), 0
for epoch in range({epochs}):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(y)
        if seen >= {samples}:
            break
    if seen >= {samples}:
        break
seconds = time.perf_counter() - began
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    kernel = RealKernel(NEWEST, tmp_path_factory.mktemp("speed"))
    try:
        kernel.do("%load_ext nbaccel" + SETUP + "\nimport nbaccel; nbaccel.launch(int, 1)")  # the reaper runs now
        yield kernel
    finally:
        kernel.close()


def report(kernel: RealKernel, budget: str = "60s", body: str = "", ranks: int = 2) -> str:
    """Return the report on a training of many epochs."""
    code = accelerate(body or LOOP.format(epochs=1000, samples=10**9), n=ranks, flags=f"--speed {budget}")
    (shown,) = kernel.run(code, 120.0).succeeded().displays
    assert "text/html" in shown
    return str(shown["text/plain"])


def pasted(said: str) -> list[str]:
    """Return the statements to paste."""
    return [match[1] for match in re.finditer(r"^  Cell In\[\d+\], line \d+: (.*?)(?:  # .*)?$", said, re.M)]


def seconds(kernel: RealKernel, samples: int) -> float:
    """Return the seconds in which one rank trains on so many samples."""
    kernel.run(accelerate(LOOP.format(epochs=100, samples=samples), n=1, flags="--out seconds")).succeeded()
    return float(kernel.value("seconds"))


def test_of_a_cell_that_fails_nothing_is_said_to_be_tried(kernel: RealKernel) -> None:
    cell = kernel.run(accelerate("score = 1 / 0", flags="--speed 20s"))
    cell.failed("ZeroDivisionError")
    assert "trying" not in str(cell.displays[-1]["text/plain"])


BOTTLENECKS = {
    "a slow loader": (f"{SMALL}loader = DataLoader(Slow(), batch_size=32, shuffle=True)", "num_workers=", 1280),
    "tiny batches": (
        f"{SMALL}loader = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True)",
        "batch_size=16",
        2048,
    ),
    "workers that take longer to start than to work": (
        f"{SMALL}loader = DataLoader(TensorDataset(X, Y), batch_size=512, shuffle=True, num_workers=4)",
        r"shuffle=True, (num_workers=0|num_workers=4, persistent_workers=True)\)",  # one is as good as the other
        3 * 4096,
    ),
}


@pytest.mark.parametrize("bottleneck", BOTTLENECKS)
def test_the_lines_that_are_shown_remove_a_bottleneck(kernel: RealKernel, bottleneck: str) -> None:
    made, word, samples = BOTTLENECKS[bottleneck]
    kernel.do(made)
    said = report(kernel, ranks=1)  # with more, one rank may be what helps
    lines = pasted(said)
    assert re.search(word, "\n".join(lines)), said
    before = seconds(kernel, samples)
    kernel.do(textwrap.dedent(made))
    for line in lines:
        kernel.do(line)
    after = seconds(kernel, samples)
    assert before >= 1.5 * after, f"{before:.2f} s before, {after:.2f} s after\n{said}"


def test_where_nothing_helps_it_says_so(kernel: RealKernel) -> None:
    kernel.do(f"{WIDE}loader = DataLoader(TensorDataset(X, Y), batch_size=512, shuffle=True)")
    said = report(kernel, "60s", ranks=1)
    assert "\nnothing helps" in said, said
    assert not pasted(said)


def test_nothing_is_touched(kernel: RealKernel, tmp_path: Path) -> None:
    kernel.do(f"import os; os.chdir({str(tmp_path)!r})\n{SMALL}loader = DataLoader(TensorDataset(X, Y), 32)")
    kernel.do("before = {name: value.clone() for name, value in model.state_dict().items()}")
    body = f"torch.save(1, 'one.pt')\n!touch two\n{LOOP.format(epochs=1000, samples=10**9)}"
    report(kernel, "10s", body)
    kernel.do(
        "assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())\n"
        "assert loader.num_workers == 0 and loader.batch_size == 32 and 'seen' not in globals()"
    )
    assert [path.name for path in tmp_path.iterdir() if path.name != ".nbaccel"] == []


def test_an_interrupt_shows_what_is_known_until_then(kernel: RealKernel) -> None:
    kernel.do(f"{SMALL}loader = DataLoader(TensorDataset(X, Y), 32)")
    execution = kernel.begin(accelerate(LOOP.format(epochs=1000, samples=10**9), flags="--speed 60s"))
    execution.until(lambda cell: cell.displays and "samples/s" in cell.displays[-1]["text/plain"])
    kernel.interrupt()
    cell = execution.end()
    assert "the trials were interrupted; nothing was changed." in cell.failed("KeyboardInterrupt").evalue
    assert cell.displays[-1]["text/plain"].endswith("\ninterrupted")


def test_a_cell_that_does_not_train_is_refused(kernel: RealKernel) -> None:
    error = kernel.run(accelerate("sum(range(10))", flags="--speed 10s")).failed("LaunchRefused")
    assert "could not be measured (too few steps)" in error.evalue


def test_an_error_of_the_cell_is_its_own(kernel: RealKernel) -> None:
    error = kernel.run(accelerate("print(histroy)", flags="--speed 10s")).failed("NameError")
    assert "histroy" in error.evalue
