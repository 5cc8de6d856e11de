"""Cells that run with marked loops, in this process, for tests."""

from __future__ import annotations

import itertools
import json
import linecache
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel.errors import CannotSave
from nbaccel.features.cell_checkpoints import random_states
from nbaccel.features.cell_checkpoints.difference import CellDifference, Restored, StoredDifference
from nbaccel.features.cell_checkpoints.frame_position import NoPosition
from nbaccel.features.cell_checkpoints.head_state import HeadState
from nbaccel.features.cell_checkpoints.loader_draws import remade
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

    def run_marked(self, cell: str, watcher: Any, going_on: GoingOn | None = None) -> MarkedCell:
        """Run a cell with marked loops."""
        with MarkedCell(self.source(cell), self.namespace, watcher, going_on, _is_cell) as found:
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


class Ended(BaseException):
    """Stands for the end of a session, in the middle of a step."""


class Refused(Exception):
    """A cell that could not be saved at any of its loops."""


class Saver:
    """Saves at each boundary where that can be, and the sentence where it cannot."""

    def __init__(self) -> None:
        self.head: HeadState | None = None
        self.position: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.difference: CellDifference | None = None
        self.refusals: list[str] = []

    def at_head(self, roots: Roots) -> None:
        self.head = HeadState(roots)

    def at_boundary(self, boundary: Boundary) -> None:
        if why := boundary.refusal():
            self.refusals.append(why)
            try:
                boundary.around()
            except NoPosition as error:
                raise Refused(str(error)) from error
            return
        assert self.head is not None
        try:
            difference = CellDifference.between(
                *(self.head, boundary.roots(), _copy),
                *(boundary.can_make, boundary.frames_at_head(), boundary.can_wait, boundary.is_read),
            )
        except CannotSave:
            if self.difference is None:
                raise
            return  # the next boundary may do, or an older save has to
        self.difference = difference
        self.position = json.loads(json.dumps(boundary.position()))
        self.states = json.loads(json.dumps(random_states.read()))


class Saved:
    """What a run left, for the one that goes on.

    Args:
        by: What saved it.
        folder: Where its difference is written, and read again.
        saver: Of the run that goes on.
    """

    def __init__(self, by: Saver, folder: Path, saver: Saver | None = None) -> None:
        assert by.difference is not None, "nothing was saved"
        folder.mkdir()
        by.difference.write(folder)
        self._stored = StoredDifference.read(folder)
        self._states = by.states
        self._restored: Restored | None = None
        self._saver = saver or Saver()
        self.has_arrived = False
        self.notes: list[str] = []
        self.position = by.position
        self.unsaved = self._stored.unsaved
        self.made = self._stored.made

    def at_head(self, roots: Roots) -> Mapping[str, Any]:
        self._saver.head = HeadState(roots)
        self._restored = self._stored.apply(self._saver.head, remade)
        self.notes = self._restored.notes
        return self._restored.names

    def fill(self, roots: Roots) -> Mapping[str, Any]:
        assert self._restored is not None
        return self._restored.fill(roots)

    def write_again(self, roots: Roots, is_last: bool) -> Mapping[str, Any]:
        assert self._restored is not None
        return self._restored.write_again(roots, is_last)

    def arrived(self) -> None:
        self.has_arrived = True
        random_states.restore(self._states)


@contextmanager
def ended_at(step: int) -> Iterator[None]:
    """Raise `Ended` when step number `step` is about to be taken; the first one is 1."""
    taken = itertools.count(1)

    def end(*_: object) -> None:
        if next(taken) == step:
            raise Ended

    handle = register_optimizer_step_pre_hook(end)
    try:
        yield
    finally:
        handle.remove()


def _copy(_: str, tensor: Tensor) -> Tensor:
    """Return a copy: the step in which a run ends has begun to change it."""
    return tensor.detach().clone()
