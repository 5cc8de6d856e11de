"""Programs that are text, as cells are: their common beginning, and what a real rank prints of one."""

from __future__ import annotations

import contextlib
import io
import linecache
from typing import Any

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.train.raw_loop.loop import RawLoopTraining

__all__ = ["STEP", "run_text", "said_by"]

SETUP = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(24, 6), torch.arange(24) % 3)
loader, test = DataLoader(data, 8), DataLoader(data, 8)
model = nn.Sequential(nn.Linear(6, 3)); criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step(loss):
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""

STEP = "optimizer.zero_grad(); loss.backward(); optimizer.step()"


def said_by(name: str, text: str, batches: str | None = None, **names: Any) -> str:
    """What a rank prints while it runs `text` after the common beginning, as a cell called `name`."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    watch = RawLoopTraining(World.from_env(), RunSettings(batches=batches))
    with contextlib.redirect_stdout(io.StringIO()) as written:
        watch.begin(namespace)
        try:
            run_text(name, SETUP + text, namespace)
            watch.end()
        finally:
            watch.stop()
    return written.getvalue()


def run_text(name: str, source: str, namespace: dict[str, Any]) -> None:
    """Run `source` as a cell called `name`, whose lines can be read."""
    file = f"<cell {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), namespace)
