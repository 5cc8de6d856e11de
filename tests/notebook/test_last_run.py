"""What the kernel keeps of a cell's run: `nbaccel.last_run`, which holds no object of the notebook's."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import Any

import pytest

from nbaccel.launching.run import Run

pytestmark = pytest.mark.slow

MAKES = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.ones(8, 4)
"""
TRAINS = """
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(3):
    loss = model(data).sum()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"acc": step / 4})
"""
ALLOWED = {f"collections.{kind}" for kind in ("Counter", "deque")} | {
    "array.array",
    "nbaccel.base.events.ExchangeTime",
    "nbaccel.base.events.Progress",
    "nbaccel.base.events.TrainingMode",
    "nbaccel.launching.run.Run",
    "nbaccel.launching.run.RunOrigin",
}
ENDS = {
    "done": "(model, loss)",
    "failed": "def fails(rows):\n    raise ValueError(f'{len(rows)} rows')\nfails(data)",
    "stopped": "import time\ntime.sleep(60)",
}


def last_run(notebook: Any) -> Run:
    run = notebook.session.launcher.last_run
    assert run is not None
    return run


def forget(notebook: Any) -> None:
    """Let go of all that the notebook, and IPython, would keep."""
    notebook.shell.reset(new_session=False)
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    notebook.shell.InteractiveTB.tb = notebook.shell.InteractiveTB.evalue = None
    notebook.shell.last_execution_result = None
    gc.collect()


def held_by(run: Run) -> set[str]:
    """The kinds of what `run` keeps alive, without the code of classes, functions and modules."""
    found: set[str] = set()
    seen, todo = {id(run)}, [run]
    while todo:
        for part in gc.get_referents(todo.pop()):
            if id(part) not in seen and not isinstance(part, type | types.ModuleType | types.FunctionType):
                seen.add(id(part))
                todo.append(part)
                found.add(f"{type(part).__module__}.{type(part).__qualname__}")
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("end", ENDS)
def test_the_run_of_a_cell_keeps_nothing_of_it_alive(notebook: Any, end: str) -> None:
    notebook.run(MAKES)
    refs = {name: weakref.ref(notebook.names[name]) for name in ("model", "optimizer", "data")}
    flags = "--timeout 2" if end == "stopped" else ""
    cell = notebook.run(f"%%accelerate -n 2 --cpu {flags}\n{TRAINS}{ENDS[end]}\n")
    kinds = {"done": type(None), "failed": ValueError, "stopped": TimeoutError}
    assert type(cell.error) is kinds[end], cell.stdout
    run = last_run(notebook)
    assert {kind for kind in held_by(run) if not kind.startswith(("builtins.", "nbaccel.display."))} <= ALLOWED
    assert not {"builtins.frame", "builtins.traceback", "builtins.function"} & held_by(run)
    del cell
    forget(notebook)
    assert {name: ref() for name, ref in refs.items()} == dict.fromkeys(refs)
    assert run.values == [None, None]
    assert type(run.error) is kinds[end]
    assert list(run.curves) == ["loss", "acc"]
    assert run.curves["acc"].mean == (0.0, 0.25, 0.5)
    assert run.text.startswith(f"{run.facts.title}: {end} ")
    assert "3 steps" in run.text


def test_inline_and_staying_ranks_leave_a_run_too_and_a_refused_cell_leaves_that_before_it(notebook: Any) -> None:
    notebook.run(MAKES)
    notebook.run(f"%%accelerate --start inline\n{TRAINS}{{'loss': 0.5}}\n")
    here = last_run(notebook)
    assert (here.value, here.start_method, list(here.curves)) == ({"loss": 0.5}, "inline", ["loss", "acc"])
    notebook.run("%%accelerate --out nothing_of_that_name\npass\n")
    assert last_run(notebook) is here
    notebook.run("%accelerate start -n 2 --cpu")
    try:
        assert last_run(notebook) is here
        notebook.run("%%accelerate --only 1\naccelerator.log({'acc': 0.5})\n[7]\n")
        stayed = last_run(notebook)
        assert stayed.values == [None, [7]]
        assert notebook.run("%accelerate last").stdout.splitlines()[-1].startswith(f"{stayed.facts.title}: ")
    finally:
        notebook.run("%accelerate stop")


def test_last_says_that_there_was_none(planned: Any) -> None:
    assert planned.run("%accelerate last").stdout == "this kernel has not run anything in ranks yet\n"
