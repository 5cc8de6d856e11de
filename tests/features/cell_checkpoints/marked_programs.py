"""Cells that run with marked loops, in this process, for tests."""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbaccel.features.cell_checkpoints.marked_cell import Boundary, GoingOn, MarkedCell, Roots
from nbaccel.launching.tasks.cell_code import CellSource, execute

ABOVE = """
import torch, torch.nn as nn, torch.nn.functional as F, copy, random, math, functools, itertools
import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split
torch.manual_seed(0); random.seed(0); np.random.seed(0)
def net(i=8, o=4):
    return nn.Sequential(nn.Linear(i, 16), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(16), nn.Linear(16, o))
X, Y = torch.randn(60, 8), torch.randint(0, 4, (60,))
train_set, val_set = random_split(TensorDataset(X, Y), [48, 12])
class Noisy(Dataset):
    def __len__(s): return 48
    def __getitem__(s, i):
        x, y = train_set[i]
        return x + 0.1 * torch.randn(8) * random.random() * np.random.rand(), y
loader, val_loader = DataLoader(Noisy(), 8, shuffle=True), DataLoader(val_set, 6)
def step(model, opt, x, y):
    opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()
    return loss.item()
"""
"""A first cell: data whose samples are drawn from three generators, and loaders of them."""


class Watched:
    """A watcher that keeps what it is told.

    Args:
        on_boundary: Called with each boundary.
    """

    def __init__(self, on_boundary: Callable[[Boundary], None] = lambda boundary: None) -> None:
        self.heads: list[Roots] = []
        self.boundaries = 0
        self._on_boundary = on_boundary

    def at_head(self, roots: Roots) -> None:
        self.heads.append(roots)

    def at_boundary(self, boundary: Boundary) -> None:
        self.boundaries += 1
        self._on_boundary(boundary)


class Notebook:
    """A kernel: cells run in one namespace, each under a name of its own.

    Args:
        above: Cells that run plainly.
    """

    def __init__(self, *above: str) -> None:
        self.namespace: dict[str, Any] = types.ModuleType("__main__").__dict__
        self._count = 0
        for cell in above:
            self.run(cell)

    def run(self, cell: str) -> None:
        """Run a cell as it is."""
        for part in self.source(cell).compile():
            execute(part, self.namespace)

    @contextmanager
    def marked(self, cell: str, watcher: Any, going_on: GoingOn | None = None) -> Iterator[MarkedCell]:
        """Give a cell marked loops while entered."""
        with MarkedCell(self.source(cell), self.namespace, watcher, going_on, _is_cell) as found:
            yield found

    def run_marked(self, cell: str, watcher: Any, going_on: GoingOn | None = None) -> MarkedCell:
        """Run a cell with marked loops."""
        with self.marked(cell, watcher, going_on) as found:
            for part in found.parts:
                execute(part, self.namespace)
        return found

    def source(self, cell: str) -> CellSource:
        """Return a cell with a name, under which tracebacks find its text."""
        self._count += 1
        name = f"Cell In[{self._count}]"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        return CellSource(cell, name)


def _is_cell(name: str) -> bool:
    """Return whether a file is a cell: here files of tests seem to be the user's."""
    return name.startswith("Cell In")
