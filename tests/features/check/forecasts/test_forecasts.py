"""Time and memory that a check foretells, against those of the whole run: four cells of half a minute each.

The table is printed (`pytest -s`). On a machine that others use as well the ranges are wider, and may be missed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from environments import NEWEST
from kernel.harness import RealKernel, accelerate

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timed, pytest.mark.timeout(600)]

SETUP = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from nbaccel.utils import gather_object

X = torch.randn(4096, 64)
Y = (X.sum(1) > 0).long()

class Slow(Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        time.sleep(0.008)
        return X[index], Y[index]

class Texts(Dataset):
    def __len__(self):
        return 1200
    def __getitem__(self, index):
        return torch.ones(300 if index % 50 == 7 else 20 + index % 20, 32), index % 2

def padded(rows):
    texts, labels = zip(*rows)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)

def network(width, depth=2):
    inner = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *inner, nn.Linear(width, 2))

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(32, 96, batch_first=True), nn.Linear(96, 2)
    def forward(self, texts):
        return self.head(self.cells(texts)[0][:, -1])

def peak_bytes():
    return int(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]) * 1024
"""

STEP = """
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""

CELLS = {
    "bound by its loader": f"""
model = network(128)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(Slow(), 16))
for epoch in range(12):
    for x, y in loader:{STEP}
""",
    "an evaluation longer than its training": f"""
model = network(512)
loaders = DataLoader(TensorDataset(X[:640], Y[:640]), 16, shuffle=True), DataLoader(TensorDataset(X, Y), 64)
model, optimizer, loader, tests = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), *loaders)
for epoch in range(14):
    for x, y in loader:{STEP}
    right = 0
    with torch.no_grad():
        for x, y in tests:
            for _ in range(8):
                found = model(x.repeat(4, 1))
            right += accelerator.gather_for_metrics(found[: len(y)].argmax(1) == y).sum().item()
""",
    "saves": f"""
model = network(1400, 4)
loader = DataLoader(TensorDataset(X[:320], Y[:320]), 8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
for epoch in range(14):
    for x, y in loader:{STEP}
    accelerator.save_state(f'saved_{{epoch % 2}}')
""",
    "lengths that differ by ten to one": f"""
model = Reader()
loader = DataLoader(Texts(), 8, shuffle=True, collate_fn=padded)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for epoch in range(50):
    for x, y in loader:{STEP}
""",
}

LAST = "peaks = gather_object([peak_bytes()])\naccelerator.print('peaks', *peaks)\n"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKernel]:
    kernel = RealKernel(NEWEST, tmp_path_factory.mktemp("forecasts"), OMP_NUM_THREADS="1")
    try:
        kernel.do(f"%load_ext nbaccel\n{SETUP}\nimport nbaccel; nbaccel.launch(int, 1)")
        yield kernel
    finally:
        kernel.close()


def seconds(text: str) -> float:
    """Return the seconds that "7.9 s", "19 s" or "1 min 22 s" says."""
    scale = {"s": 1.0, "min": 60.0, "h": 3600.0}
    return sum(float(number) * scale[unit] for number, unit in re.findall(r"([\d.]+) (s|min|h)", text))


def megabytes(number: str, unit: str) -> float:
    return float(number) * {"kB": 1e-3, "MB": 1.0, "GB": 1e3}[unit]


def width(low: float, high: float) -> str:
    return f"+-{(high - low) / (high + low):.0%}"


@pytest.mark.parametrize("cell", CELLS)
def test_the_whole_run_is_as_foretold(kernel: RealKernel, cell: str) -> None:
    checked = kernel.run(accelerate(CELLS[cell] + LAST, flags="--check --out peaks"), timeout_s=120).succeeded()
    said = str(checked.displays[0]["text/plain"])
    assert "red: " not in said, said
    began = time.monotonic()
    whole = kernel.run(accelerate(CELLS[cell] + LAST, flags="--out peaks"), timeout_s=300).succeeded()
    truth_s = time.monotonic() - began
    low_s, high_s = map(seconds, re.search(r"the whole run takes (.+) to (.+)", said).groups())  # type: ignore[union-attr]
    found = re.search(r"memory[^:]*: (\S+)(?: (kB|MB|GB))? to (\S+) (kB|MB|GB)", said)
    assert found is not None, said
    low, high = megabytes(found[1], found[2] or found[4]), megabytes(found[3], found[4])
    truth = max(map(int, re.search(r"peaks (\d+) (\d+)", whole.text).groups())) / 1e6  # type: ignore[union-attr]
    print(f"\n{cell}: {truth_s:.1f} s, foretold {low_s:.1f} to {high_s:.1f} ({width(low_s, high_s)})", end="; ")
    print(f"{truth:.0f} MB, foretold {low:.0f} to {high:.0f} ({width(low, high)}); check {checked.seconds:.0f} s")
    assert low_s <= truth_s <= high_s, said
    assert low <= truth <= high, said
