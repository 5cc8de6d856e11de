"""`notebook_launcher` with one process in a real kernel: seen, stopped and failing as a beginner meets it."""

from __future__ import annotations

import re
import time

import pytest

from kernel.harness import RealKernel, accelerate

TRAIN = """
import time, torch
from nbaccel import Accelerator, notebook_launcher

model, done = torch.nn.Linear(4, 1), []

def train(steps, fails_at=None):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    print("begins")
    for step in range(steps):
        with accelerator.accumulate(prepared):
            loss = prepared(torch.ones(2, 4)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss})
        done.append(step)
        time.sleep(0.05)
        if step == fails_at:
            raise ValueError("11 classes")
    return model
"""
LINE = (
    "in this process, as in Accelerate: no restart for memory, no watch for hangs, no clean kernel; "
    "launch(train, num_processes=1) has them\n"
)


@pytest.mark.slow
def test_a_function_in_place_is_shown_fails_and_is_stopped_in_the_cell_that_called_it(kernel: RealKernel) -> None:
    kernel.do(TRAIN)
    cell = kernel.do("same = notebook_launcher(train, (25,), num_processes=1) is model")
    assert (cell.printed, cell.stderr) == (f"{LINE}begins\n", "")
    assert cell.panels == 1
    assert len([frame for frame in cell.frames if "text/html" in frame]) >= 2
    assert sorted(cell.panel) == ["image/png", "text/plain"]
    assert kernel.value("[same, len(done)]") == [True, 25]

    error = kernel.run("notebook_launcher(train, (5, 2), num_processes=1)").failed("ValueError")
    assert re.search(r"---> \d+ +raise ValueError", error.text)
    assert "nbaccel/" not in error.text

    kernel.do("done.clear()")
    running = kernel.begin("notebook_launcher(train, (5000,), num_processes=1)")
    running.until_text("begins")
    time.sleep(0.3)  # into the steps
    kernel.interrupt()
    stopped = running.end(timeout_s=20).failed("KeyboardInterrupt")
    steps = kernel.value("len(done)")
    assert stopped.evalue == f"the run was interrupted, and stopped before step {steps}"
    assert kernel.do(accelerate("print(len(done))", "auto", n=1)).printed == f"{steps}\n"
