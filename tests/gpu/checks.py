"""Cells with `--check` and `--speed` in a real kernel: what `test_g10_checks` runs, and its rehearsal.

Drives kernels, and touches no device in its own process. On ``cpu`` the same cells run on the host, with less to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gpu import launches
from gpu.facts import fact
from gpu.launches import HISTORIES, SHARE, TENSOR_HISTORY
from kernel.harness import Cell, RealKernel

__all__ = ["STARTS", "checked", "compared", "short", "tried"]

_CELL_S = 70.0
_UNITS = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}

STARTS = {"fork": HISTORIES["clean"], "zygote": TENSOR_HISTORY}
"""What the notebook did before, by the way in which ranks then start on a card."""

_WIDE = """
from pathlib import Path
width, batch = (4096, 1024) if device == "cuda" else (128, 64)
rows = torch.randn(10 * batch, width)
wide_loader = DataLoader(TensorDataset(rows), batch_size=batch, shuffle=True)
wide = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
stepper = torch.optim.SGD(wide.parameters(), lr=1e-6, momentum=0.9)
losses = []
"""

_TRAINS = """
wide.to(device)
for epoch in range(4):
    for (a,) in wide_loader:
        a = a.to(device)
        stepper.zero_grad()
        loss = wide(a).square().mean()
        loss.backward()
        stepper.step()
    losses.append(loss.item())  # only here the program waits for the device
Path("touched.txt").write_text("touched")
torch.save(losses, "losses.pt")
peak = torch.cuda.max_memory_reserved() if device == "cuda" else 0
"""


def checked(kernel: RealKernel, start: str, device: str, tell: Callable[..., None] = fact) -> dict[str, Any]:
    """Check a loop that prepares nothing, and then run it.

    report: its text.  memory: the range that it names, and the device's whole.  peak: that of the run.
    parts: percents of a batch.  before, after: the state of the notebook around the check.  files: what is new then.
    """
    launches.begin(kernel, device, STARTS[start])
    kernel.do(_WIDE, _CELL_S)
    before, files = _state(kernel), _files(kernel)
    cell = kernel.do(f"{launches.line(device, '--check --out peak')}\n{_TRAINS}", _CELL_S)
    report = _shown(cell)
    found = {
        "report": report,
        "memory": _memory(report),
        "parts": _parts(report),
        "before": before,
        "after": _state(kernel),
        "files": sorted(_files(kernel) - files),
    }
    tell("check_s", round(cell.seconds, 2), "s")
    kernel.do(f"{launches.line(device, '--out peak')}\n{_TRAINS}", _CELL_S)
    found["peak"] = kernel.value("peak")
    for name in ("memory", "peak", "parts"):
        tell(name, found[name])
    return found


def _state(kernel: RealKernel) -> list[Any]:
    """What a check leaves alone: whether the notebook uses the device, and what for; its variables."""
    return list(
        kernel.value(
            "[torch.cuda.is_initialized(), torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0,"
            " wide[0].weight.device.type, wide[0].weight.double().sum().item(), losses, len(stepper.state),"
            " float((on_device + 1).sum()) if 'on_device' in globals() else 0, 'peak' in globals()]"
        )
    )


def _files(kernel: RealKernel) -> set[str]:
    return {path.name for path in kernel.folder.iterdir()}


_TEXTS = """
from torch.utils.data import Dataset
total = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 10**9

class Texts(Dataset):
    def __len__(self):
        return 300
    def __getitem__(self, index):
        return torch.ones(900 if index == 123 else 10 + index % 20, 6)

def padded(texts):
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)

def attention(length):
    if device == "cuda":
        return torch.empty(length * (total // 600), dtype=torch.uint8, device=device)
    if length > 600:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.40 GiB.")
"""

_LONGEST = """
model.to(device)
for epoch in range(20):
    for texts in DataLoader(Texts(), 16, shuffle=True, collate_fn=padded):
        texts = texts.to(device)
        scores = attention(texts.shape[1])
        model(texts).mean().backward()
        optimizer.step()
        del scores
print("the last line")
"""


def short(kernel: RealKernel, device: str, tell: Callable[..., None] = fact) -> dict[str, Any]:
    """Check a loop that only its longest batch does not leave enough memory for, in one rank."""
    launches.begin(kernel, device)
    kernel.do(_TEXTS, _CELL_S)
    cell = kernel.do(f"{launches.line(device, '--check', ranks=1)}\n{_LONGEST}", _CELL_S)
    red = [line for line in _shown(cell).splitlines() if line.startswith("red: ")]
    tell("short_s", round(cell.seconds, 2), "s")
    tell("red", red)
    return {"red": red, "report": _shown(cell)}


_PREPARED = """
own = DataLoader(TensorDataset(x, y), batch_size=8)
net, stepper, batches = accelerator.prepare(model, optimizer, own)
for a, b in batches:
    loss = nn.functional.mse_loss(net(a), b)
    accelerator.backward(loss)
    stepper.step()
    stepper.zero_grad()
"""


def compared(kernel: RealKernel, device: str, tell: Callable[..., None] = fact) -> dict[str, Any]:
    """Check a prepared loop in full: two runs, and the gradients of two ranks beside those of one process."""
    launches.begin(kernel, device)
    kernel.do(SHARE)
    cell = kernel.do(f"{launches.line(device, '--check full --seed 7', ranks=2)}\n{_PREPARED}", _CELL_S)
    report = _shown(cell)
    lines = [line for line in report.splitlines() if "gradients" in line or "two runs" in line]
    tell("full_s", round(cell.seconds, 2), "s")
    tell("compared", lines)
    return {"report": report, "lines": lines}


_PICTURES = """
whole_batches = TensorDataset(torch.randn(256, 32, 3, 32, 32), torch.randint(10, (256, 32)))
pictures = DataLoader(whole_batches, batch_size=None)  # workers and larger batches have nothing to do

class Net(nn.Sequential):
    def forward(self, pictures):  # torch compiles a forward of the program's own
        return super().forward(pictures)

layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3)]
net = Net(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
adam = torch.optim.Adam(net.parameters(), lr=1e-3)
"""

_CLASSIFIES = """
prepared, steps, batches = accelerator.prepare(net, adam, pictures)
for epoch in range(1000):
    for a, b in batches:
        loss = nn.functional.cross_entropy(prepared(a), b)
        accelerator.backward(loss)
        steps.step()
        steps.zero_grad()
"""


def tried(kernel: RealKernel, device: str, budget: str, tell: Callable[..., None] = fact) -> dict[str, list[str]]:
    """Try what makes a training of pictures faster: of each change, by name, the other columns of its row."""
    launches.begin(kernel, device)
    kernel.do(_PICTURES, _CELL_S)
    cell = kernel.do(f"{launches.line(device, f'--speed {budget}', ranks=1)}\n{_CLASSIFIES}", _CELL_S)
    table, *_ = re.split(r"^(?=nothing|.* as fast, by$)", _shown(cell), flags=re.M)
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()[1:]]
    found = {row[0]: row[1:] for row in rows if len(row) > 1}
    tell("speed_s", round(cell.seconds, 2), "s")
    for name, columns in found.items():
        tell(name, columns)
    return found


def _shown(cell: Cell) -> str:
    (shown,) = cell.displays
    return str(shown["text/plain"])


def _memory(report: str) -> list[float] | None:
    """The bytes of the memory line: the least, the most, and those of the device; None without one of a device."""
    found = re.search(
        r"memory[^:]*: (\S+ \w+) to (\S+ \w+)(?: in the largest rank)? of (\S+ \w+) on the device", report
    )
    return None if found is None else [_bytes(text) for text in found.groups()]


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * _UNITS[unit]


def _parts(report: str) -> dict[str, int]:
    """The percents of a batch, by part."""
    found = re.search(r"a batch takes [^:]*: (.*)", report)
    assert found, report
    return {name: int(percent) for name, percent in re.findall(r"([a-z ]+?) (\d+)%", found[1].replace(", ", ","))}
