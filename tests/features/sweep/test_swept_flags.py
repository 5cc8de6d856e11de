"""Flags that have no effect above the loop of a sweep are refused in each of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SETUP = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.ones(8, 2), batch_size=4)
"""
LOOP = """
for x in loader:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
"""


def test_each_run_of_a_sweep_is_refused_a_flag_that_would_lose_work(
    notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook.run(SETUP)
    cell = notebook.run(f"%%accelerate --sweep lr=0.1,0.2 --out model --checkpoint-every 1steps\n{LOOP}")
    assert "no effect above an unmodified loop" in cell.stdout + str(cell.error)
