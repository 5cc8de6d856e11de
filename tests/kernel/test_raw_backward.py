"""A loop that prepares everything and calls ``loss.backward()`` itself, in a real kernel: what its user sees."""

from __future__ import annotations

import re

import pytest

from kernel.harness import RealKernel, accelerate

TRAINS = """
import time, torch
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64) % 2)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, 4, shuffle=True))
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        time.sleep(0.1)
sums = accelerator.gather(sum(p.detach().double().sum() for p in model.parameters()).reshape(1)).tolist()
"""


@pytest.mark.slow
def test_a_raw_loop_is_shown_as_a_training_and_its_steps_are_counted(kernel: RealKernel) -> None:
    cell = kernel.do(accelerate(TRAINS, flags="--out sums"))
    one, other = kernel.value("sums")
    assert one == other, "the ranks trained one model"
    assert re.search(r"^done in .*, 24 steps, ", cell.stdout, re.M), cell.stdout
    assert cell.text.count("the loop calls loss.backward() itself") == 1
    assert re.search(r"^Cell In\[\d+\]:12: UserWarning: the loop calls", cell.text, re.M), cell.text
    assert "accelerator.backward(loss) in its place does all of that" in cell.text
