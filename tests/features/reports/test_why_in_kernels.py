"""`%accelerate why` in a real kernel: after an interrupt, and after a function that was launched."""

from __future__ import annotations

import re

import pytest

from kernel.harness import RealKernel, accelerate

HANGS = """
def train():
    print("begun")
    turns = 0
    while accelerator.process_index == 1:
        turns += 1
    accelerator.wait_for_everyone()
train()
"""


@pytest.mark.slow
def test_after_an_interrupt_every_rank_says_where_it_hung(kernel: RealKernel, start: str) -> None:
    running = kernel.begin(accelerate(HANGS, start))
    running.until(lambda cell: cell.text.count("begun") >= 1)
    kernel.interrupt()
    number = running.end().number
    told = kernel.do("%accelerate why").text
    assert told.startswith(f"Cell In[{number}] stopped: KeyboardInterrupt"), told
    assert re.search(rf"rank 1: was interrupted at Cell In\[{number}\], line [56], in train", told), told
    assert f"rank 0: was interrupted at Cell In[{number}], line 7, in train: accelerator.wait_for_everyone()" in told
    assert "turns  int = " in told


LAUNCHED = """
def train(rows):
    accelerator = nbaccel.Accelerator(cpu=True)
    labels = torch.zeros(rows + accelerator.process_index, dtype=torch.long)
    torch.nn.functional.cross_entropy(torch.randn(8, 10), labels)
    accelerator.wait_for_everyone()

nbaccel.notebook_launcher(train, (8,), num_processes=2)
"""


def test_a_function_that_was_launched_is_explained_too(kernel: RealKernel) -> None:
    kernel.run(LAUNCHED).failed("ValueError")
    told = kernel.do("%accelerate why").text.splitlines()
    assert told[0].startswith("train(8) failed on rank 1 of 2: ValueError: Expected input batch_size (8)")
    (suspect,) = [line for line in told[:10] if ": labels " in line]
    assert suspect.startswith("  rank 1: labels int64 (9,) on cpu, 72 B | rank 0: labels int64 (8,) on cpu, 64 B | ")
    kernel.run("nbaccel.launch(train, 1, args=(9,), cpu=True, start_method='inline')").failed("ValueError")
    told = kernel.do("%accelerate why").text.splitlines()
    assert told[0].startswith("train(9) failed on rank 0 of 1: ValueError: Expected input batch_size (8)")
    assert any("labels  int64 (9,) on cpu" in line for line in told)
    kernel.do("nbaccel.launch(int, 1, cpu=True, start_method='inline')")
    assert kernel.do("%accelerate why").text.startswith("nothing to explain")
