"""find_executable_batch_size in programs that meet by a TCP store, under torchrun and without it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbaccel import find_executable_batch_size
from nbaccel.testing import run_ranks


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _meet_by_tcp(port: int) -> tuple[list[int], int]:
    """Rank 0 serves the store, so that it has connections to its peers which must not be cut."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tried = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > 1 and rank == batch_size % 4 // 2:  # the server first, then the other one
            raise torch.OutOfMemoryError("CUDA out of memory.")
        dist.all_reduce(torch.ones(()))

    train()
    total = torch.ones(())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return tried, int(total)


def test_21_a_group_of_the_program_is_formed_again_by_its_own_tcp_store() -> None:
    assert run_ranks(2, _meet_by_tcp, _free_port()) == [([4, 2, 1], 2)] * 2


_SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from nbaccel import find_executable_batch_size

dist.init_process_group("gloo")
tried = []

@find_executable_batch_size(starting_batch_size=16)
def train(batch_size):
    tried.append(batch_size)
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        loss = model(torch.randn(batch_size, 8)).square().mean()
        if step == 1 and batch_size > 8 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return batch_size

size = train()
total = torch.ones(())
dist.all_reduce(total)
print(f"size {size} tried {tried} total {int(total)}\\n", end="", flush=True)
dist.destroy_process_group()
os._exit(0)
"""
"""It leaves without the interpreter's finalization: gloo's thread may still hold the last tensor that was reduced, and
when it lets go of it after Python began to finalize, it ends in ``terminate called without an active exception``: with
torch 2.13 and Python 3.11 one exit in 16 of this program without nbaccel, on a busy machine."""


@pytest.mark.full
@pytest.mark.slow
def test_21_under_torchrun_a_program_of_plain_torch_lands_on_one_size(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environ: dict[str, Any] = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("size 8 tried [16, 8] total 2") == 2, done.stdout
