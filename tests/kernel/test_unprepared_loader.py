"""A loader that was not prepared beside a model that was, in a real kernel: what its user sees."""

from __future__ import annotations

import re

import pytest

from kernel.harness import RealKernel, accelerate

DATA = """
import torch
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64) % 2)
loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
"""

TRAINS = """
model = torch.nn.Linear(8, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
for epoch in range(2):
    for x, y in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_an_unprepared_loader_is_named_once_at_the_line_of_its_loop(kernel: RealKernel) -> None:
    kernel.do(DATA)
    cell = kernel.do(accelerate(TRAINS))
    assert cell.status == "ok"
    said = re.findall(r"^.*was not prepared.*$", cell.text, re.M)
    assert len(said) == 1, cell.text
    assert re.match(r"Cell In\[\d+\]:5: UserWarning: the loader over TensorDataset was not prepared: ", said[0]), said
    assert "each of 2 ranks reads all 16 batches" in said[0]
    assert "`loader = accelerator.prepare(loader)`" in said[0]
    again = kernel.do(accelerate(TRAINS.replace("for epoch", "loader = accelerator.prepare(loader)\nfor epoch")))
    assert "was not prepared" not in again.text
