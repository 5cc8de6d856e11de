"""A check reports flags that have no effect above the loop, in the words of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.usefixtures("few_objects")]

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
OF_A_LIBRARY = f"""
library = {{"__name__": "lightning.fabric.example"}}
exec("def train(model, optimizer, loader):" + {LOOP!r}.replace(chr(10), chr(10) + "    "), library)
library["train"](model, optimizer, loader)
"""
"""The loop, as a function of a library that has checkpoints of its own."""


def test_a_check_reports_flags_without_an_effect_and_those_that_are_refused(
    notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook.run(SETUP)
    cell = notebook.run(f"%%accelerate -n 2 --check -p bf16 -a 4 --checkpoint-every 1steps\n{OF_A_LIBRARY}")
    assert cell.error is None
    refused = "red: the run would end before its first step: --checkpoint-every 1steps has no effect above Lightning's"
    assert refused in cell.stdout
    cell = notebook.run(f"%%accelerate -n 2 --check -p bf16 --strategy fsdp\n{LOOP}")
    assert "yellow: --strategy fsdp has no effect above an unmodified loop: the loop prepares nothing" in cell.stdout
    assert "-p bf16 has no effect" not in cell.stdout
    prepares = f"model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n{LOOP}"
    assert "no effect" not in notebook.run(f"%%accelerate -n 2 --check -p bf16\n{prepares}").stdout
