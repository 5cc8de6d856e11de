"""What `--checkpoint-every` adds to a step that nothing is saved before: counted and not timed, so no noise trips it.

They take some 25 us of a core, of a step of 20 ms a thousandth. `make bench ROWS=saves` has the time of whole steps.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from features.cell_checkpoints.marked_programs import Notebook, Watched
from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.features.cell_checkpoints.saves import CellSaves
from nbaccel.launching.tasks.cell_code import execute
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.raw_loop.single_rank import SingleRankWatch
from train.test_cost import reported

STEPS = 16
"""Steps that are counted, in the middle of an epoch."""

ABOVE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(8 * 60, 4)), 8)
"""

STEP = """
        count()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

LOOPS = {
    "for": f"for epoch in range(2):\n    for (x,) in loader:{STEP}",
    "while": f"for epoch in range(2):\n    batches = iter(loader)\n"
    f"    while (batch := next(batches, None)) is not None:\n        (x,) = batch{STEP}",
}


def counted(cell: str, every: str, folder: str) -> Counter[str]:
    """Return the calls and bytecodes of one step of a cell; without `every` nothing is saved."""
    found: Counter[str] = Counter()
    begun = 0

    def see(frame: FrameType, event: str, called: Any) -> None:
        found["Python"] += event == "call"
        found["C"] += event == "c_call"

    def trace(frame: FrameType, event: str, called: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        found["bytecodes"] += event == "opcode"
        return trace

    def count() -> None:
        nonlocal begun
        begun += 1
        above = sys._getframe(1)
        if begun == 70:  # in the second epoch: what is made once is made
            gc.disable()
            sys.setprofile(see)
        elif begun == 70 + STEPS:
            sys.setprofile(None)
            above.f_trace, above.f_trace_opcodes = trace, True
            sys.settrace(trace)
        elif begun == 70 + 2 * STEPS:
            sys.settrace(None)
            above.f_trace = None
            gc.enable()

    notebook = Notebook(ABOVE)
    notebook.namespace["count"] = count
    settings = RunSettings(checkpoint_every=every or None, checkpoint_dir=folder)
    with ExitStack() as exits:
        exits.enter_context(pytest.MonkeyPatch.context()).setattr(os, "environ", os.environ | settings.environ())
        exits.enter_context(reported())
        world = World.from_env()
        watch: Any = RawLoopTraining(world, RunSettings()) if world.is_distributed else SingleRankWatch()
        watch.begin(notebook.namespace)
        exits.callback(watch.end)
        source = notebook.source(cell)
        parts = source.compile()
        if every:
            parts = exits.enter_context(CellSaves(source, notebook.namespace, "run", {})).parts
        for part in parts:
            execute(part, notebook.namespace)
    return Counter({name: number // STEPS for name, number in found.items()})


def added(cell: str, every: str, folder: str) -> dict[str, int]:
    return dict(counted(cell, every, folder) - counted(cell, "", folder))


@pytest.mark.parametrize("every", ["10h", "100000steps"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_step_between_saves_makes_some_calls_more_than_one_without_checkpoints(
    loop: str, every: str, tmp_path: Path
) -> None:
    found = added(LOOPS[loop], every, str(tmp_path))
    assert found["Python"] <= 48
    assert found["C"] <= 24
    assert found["bytecodes"] <= 760


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_so_does_one_of_two_ranks(loop: str, tmp_path: Path) -> None:
    for found in run_ranks(2, added, LOOPS[loop], "10h", str(tmp_path)):
        assert found["Python"] <= 58
        assert found["C"] <= 36
        assert found["bytecodes"] <= 950


def test_a_place_in_a_while_is_as_large_in_a_late_epoch(tmp_path: Path) -> None:
    """Iterators of loaders that its body makes come back by their names."""
    sizes: list[int] = []
    loop = f"n = 0\nwhile n < 12:\n    n += 1\n    batches = iter(loader)\n    (x,) = next(batches){STEP}"
    notebook = Notebook(ABOVE)
    notebook.namespace["count"] = lambda: None
    notebook.run_marked(
        loop.replace("\n        ", "\n    "), Watched(lambda each: sizes.append(len(repr(each.position()))))
    )
    assert len(sizes) == 12
    assert sizes[-1] - sizes[1] < 100
