"""Process groups that a program has ended are kept, where torch's destructor could wait for ever."""

from __future__ import annotations

import os
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

from nbaccel import Accelerator, find_executable_batch_size, launch
from nbaccel.launching.rank import process_setup


class Group:
    """Something that a weak reference can watch."""


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_setup, "_kept", [])


def _ended(version: str, backend: str) -> tuple[Any, Any]:
    """A group after the program has ended it, and what torch then has for the default one."""
    default: list[Any] = [Group()]
    world = SimpleNamespace(pg_map={default[0]: (backend, None)})
    c10d = SimpleNamespace(torch=SimpleNamespace(__version__=TorchVersion(version)), _world=world)
    c10d._update_default_pg = lambda group: default.__setitem__(0, group)
    for change in process_setup.ended_groups_kept(c10d):
        change()
    watched = weakref.ref(default[0])
    c10d._update_default_pg(None)  # as destroy_process_group() does
    world.pg_map.clear()
    return watched(), default[0]


@pytest.mark.parametrize(
    ("version", "backend"),
    [("2.6.0", "nccl"), ("2.7.1+cu126", "gloo"), ("2.8.0", "gloo"), ("2.13.0+cpu", "cpu:gloo,cuda:nccl")],
)
def test_a_group_whose_destructor_could_hang_is_kept(version: str, backend: str) -> None:
    group, default = _ended(version, backend)
    assert isinstance(group, Group)
    assert default is None, "and torch does what it does"


@pytest.mark.parametrize("version", ["2.8.0", "2.10.0", "2.13.0+cpu"])
def test_other_groups_end_with_their_last_reference(version: str) -> None:
    assert _ended(version, "nccl") == (None, None)


@pytest.mark.parametrize(("version", "is_let_go"), [("2.6.0", False), ("2.13.0+cpu", True)])
def test_a_kept_group_is_let_go_when_the_next_one_has_ended(version: str, is_let_go: bool) -> None:
    first, second = Group(), Group()
    world = SimpleNamespace(pg_map={first: ("gloo", None)})
    c10d = SimpleNamespace(torch=SimpleNamespace(__version__=TorchVersion(version)), _world=world)
    c10d._update_default_pg = lambda group: None
    for change in process_setup.ended_groups_kept(c10d):
        change()
    c10d._update_default_pg(None)
    watched = weakref.ref(first)
    world.pg_map = {second: ("gloo", None)}
    c10d._update_default_pg(second)
    del first
    assert watched() is not None
    c10d._update_default_pg(None)
    assert (watched() is None) is is_let_go


def _threads_of_attempts() -> list[int]:
    """How many threads the process has when each attempt begins."""
    found: list[int] = []
    time.sleep(0.5)  # a rank's thread that samples its memory begins after a quarter of a second

    @find_executable_batch_size(starting_batch_size=32)
    def train(batch_size: int) -> None:
        accelerator = Accelerator()
        found.append(len(os.listdir("/proc/self/task")))
        model = nn.Linear(8, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        accelerator.backward(model(torch.ones(2, 8)).mean())
        optimizer.step()
        if batch_size > 2 and accelerator.process_index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    train()
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.8", reason="all groups are kept there")
def test_attempts_that_ran_out_of_memory_leave_the_threads_of_one_group_at_most() -> None:
    for found in launch(_threads_of_attempts, 2, cpu=True, hang_timeout_s=60).values:
        assert len(found) == 5
        assert max(found[2:]) <= found[1], found


def _leave_a_model_behind() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(8, 1))
    model(torch.ones(2, 8)).mean().backward()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_function_returns_that_leaves_a_model_behind_when_it_ends_its_group() -> None:
    """Eight times, for the destructor of the model's reducer hung one time in three."""
    for _ in range(8):
        assert launch(_leave_a_model_behind, 2, cpu=True, hang_timeout_s=60).values == [None, None]
