"""README's first training as a notebook's user waits for it: from sending the cell until the kernel is idle again.

Each turn builds the model anew, untimed, and compares what was trained with the plain cell's. The kernel has imported
what a training needs, and has launched ranks once; matplotlib is loaded by the first picture, in the first turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.harness import Row
from benchmarks.kernels import new_kernel
from benchmarks.party import Bout, Sample
from benchmarks.targets import OverRaw, Target

__all__ = ["rows"]

_IMPORTS = """
import torch, torch._dynamo, torch.nn.parallel, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
%load_ext nbaccel
"""

_SETUP = """
torch.manual_seed(0)
x = torch.randn(4096, {inputs}); y = (x.sum(1) > 0).long()
model = torch.nn.Sequential(torch.nn.Linear({inputs}, {hidden}), torch.nn.ReLU(), torch.nn.Linear({hidden}, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(x, y), batch_size={batch}, shuffle=True)
"""

_LOOP = """
for epoch in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
"""

_PREPARED = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)" + _LOOP.replace(
    "loss.backward()", "accelerator.backward(loss)"
)

_KEEP = "torch.save(torch.cat([each.detach().flatten() for each in model.parameters()]), 'end.pt')"

_TWO = "%%accelerate --cpu -n 2"

_CELLS = {
    "raw": _LOOP,
    "-n 1": f"%%accelerate --cpu -n 1{_LOOP}",
    "-n 1 --plain": f"%%accelerate --cpu -n 1 --plain{_LOOP}",
    "-n 2": f"{_TWO}{_LOOP}",
    "-n 2 --plain": f"{_TWO} --plain{_LOOP}",
}
_PREPARED_CELL = f"{_TWO}\n{_PREPARED}"
"""Trained otherwise: each rank has batches of its own, so its parameters are not raw's."""

_SMALL = {"inputs": 20, "hidden": 64, "batch": 32}
_LARGE = {"inputs": 1000, "hidden": 2000, "batch": 128}  # 2 M parameters

_ROUNDING = 0.05
"""fp32 over a hundred steps of AdamW, whose first ones have the size of the rate whatever a gradient's is."""


def _bout(cell: str, sizes: Mapping[str, int], *, is_compared: bool) -> Bout:
    until_closed = ExitStack()
    kernel = until_closed.enter_context(new_kernel())
    kernel.do(_IMPORTS)
    if cell.startswith("%%"):
        kernel.do(f"{_TWO}\npass")
    end = torch.zeros(1)

    def turn() -> Sample:
        nonlocal end
        kernel.do(_SETUP.format(**sizes))
        seconds = kernel.do(cell, timeout_s=120).seconds
        if is_compared:
            kernel.do(_KEEP)
            end = torch.load(kernel.folder / "end.pt")
        return Sample(seconds, 0.0)  # the kernel's processor time is not ours to read

    return Bout(turn, lambda: end, until_closed.close)


def _row(name: str, cells: Mapping[str, str], sizes: Mapping[str, int], targets: Mapping[str, float | Target]) -> Row:
    makes = {each: partial(_bout, cell, sizes, is_compared=True) for each, cell in cells.items()}
    return Row(name, makes, unit="s", turns=5, judged="wall", targets=targets, tolerance=_ROUNDING)


def _beside_prepared(sizes: Mapping[str, int]) -> Row:
    """The unmodified loop beside the prepared one with the same steps: half of each batch in either rank.

    The prepared loop as it stands has whole batches of its own in each rank, and so half as many steps.
    """
    same_steps = {**sizes, "batch": sizes["batch"] // 2}
    makes = {
        "raw": partial(_bout, _PREPARED_CELL, same_steps, is_compared=False),
        "-n 2": partial(_bout, _CELLS["-n 2"], sizes, is_compared=False),
        "prepared, half the steps": partial(_bout, _PREPARED_CELL, sizes, is_compared=False),
    }
    return Row(
        "the same, 2 M parameters; raw: prepared", makes, unit="s", turns=5, judged="wall", targets={"-n 2": 1.0}
    )


def rows() -> Sequence[Row]:
    small: dict[str, float | Target] = {"-n 1": OverRaw(0.3), "-n 2": OverRaw(1.0)}
    panel = {"raw": _CELLS["-n 1 --plain"], "-n 1": _CELLS["-n 1"]}
    return [
        _row("README's first cell", _CELLS, _SMALL, small),
        _row("its panel and picture; raw: --plain", panel, _SMALL, {"-n 1": OverRaw(0.2)}),
        _row("the same cell, 2 M parameters", _CELLS, _LARGE, {}),
        _beside_prepared(_LARGE),
    ]
