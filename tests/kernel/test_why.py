"""`%accelerate why` in a real kernel: where the ranks of a hanging cell stood when the user gave up on it."""

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
