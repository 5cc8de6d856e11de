"""An object of the notebook that raises when it is asked anything stops no cell that does not ask it itself.

A `weakref.proxy` whose object is gone does so, and so do lazy objects whose import fails; their ``__class__`` and
``__dict__`` are code. Only true types, and the attributes in the object itself, are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

REFUSES = """
import torch, weakref
from torch.utils.data import DataLoader, TensorDataset
class Refuses:
    def _refuse(self, *_): raise ReferenceError("asked")
    __class__ = __dict__ = property(_refuse)
    __getattr__ = __eq__ = __hash__ = __bool__ = __len__ = __iter__ = _refuse
refuses = Refuses()
held = [refuses]
gone = weakref.proxy(set())
"""

LOOP = """
model = torch.nn.Linear(2, 1)
vars(model)["parent"] = gone  # as after `model.parent = weakref.proxy(parent)`
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, in DataLoader(TensorDataset(torch.randn(8, 2, device="cpu")), batch_size=4):
    optimizer.zero_grad()
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
many = len(held)
"""


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_objects")]


@pytest.mark.parametrize(
    "flags",
    ["-n 2", "-n 1", "-n 2 --check", "-n 2 --checkpoint-every 1steps", "-n 2 -p bf16 -a 2", "-n 2 --independent"],
)
def test_a_cell_beside_an_object_that_refuses_to_be_asked_ends_well(
    flags: str, notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook.run(REFUSES)
    cell = notebook.run(f"%%accelerate --cpu {flags}\n{LOOP}")
    assert cell.error is None, cell.error
    if "--check" not in flags.split():
        assert notebook.names["many"] == 1


@pytest.mark.parametrize("line", ["config", "memory", "why"])
def test_a_report_beside_an_object_that_refuses_to_be_asked_is_made(line: str, notebook: Any) -> None:
    notebook.run(REFUSES)
    assert notebook.run(f"%accelerate {line}").error is None
