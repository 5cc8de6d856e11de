"""A sharded step that ran out of memory on a device: it is repeated when all devices are done with the one before."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import devicelike
from nbaccel import Accelerator, InitProcessGroupKwargs
from nbaccel.base.aborting import is_aborted
from nbaccel.errors import PeerFailed
from nbaccel.features.retry import group_recovery
from nbaccel.features.retry.group_recovery import GroupRecovery
from nbaccel.features.sharded import fully_sharded
from nbaccel.testing import Faults, run_ranks


class _Group(devicelike.DeviceLike):
    """A group with names, which torch gives to its own backends alone; after the default one come those of shards."""

    made = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._number = _Group.made
        _Group.made += 1

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_desc(self) -> str:
        return ("default", fully_sharded._STEPS, fully_sharded._READS)[self._number % 3]


class _Device:
    """In place of an event of the device: it is done with the step before `after_s` later."""

    def __init__(self, after_s: float) -> None:
        self._done_at = time.monotonic() + after_s
        self.seen: list[tuple[bool, bool]] = []  # whether it was done, and whether the groups were aborted then

    def query(self) -> bool:
        is_done = time.monotonic() > self._done_at
        self.seen.append((is_done, is_aborted()))
        return is_done


def _sharded_step(point: str, after_s: float, steps: int = 3) -> tuple[Any, list[tuple[bool, bool]], int]:
    accelerator = Accelerator(
        cpu=True, strategy="fsdp", kwargs_handlers=[InitProcessGroupKwargs(backend=devicelike.NAME)]
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)), torch.nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    faults = Faults().oom_at(point, rank=1, step=1)
    looked: list[_Device] = []

    def begin(recovery: GroupRecovery) -> None:
        looked.append(_Device(after_s if faults.step == 1 else 0.0))
        recovery._before = looked[-1]

    rank = accelerator.process_index
    with mock.patch.object(GroupRecovery, "begin", begin), faults, faults.in_model(model[1]):
        for faults.step in range(steps):
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(faults.step))[4 * rank : 4 * rank + 4]
            accelerator.forward_backward(lambda part: model(part).square().mean(), batch)
            optimizer.step()
            optimizer.zero_grad()
    rows = {name: parameter.to_local().detach() for name, parameter in model.named_parameters()}
    return rows, [each for device in looked for each in device.seen], len(faults.fired)


def _alone_for(steps: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_a_sharded_step_is_repeated_after_the_devices_are_done_with_the_one_before(point: str) -> None:
    def run() -> Any:
        devicelike.install(_Group)
        return _sharded_step(point, after_s=0.4)

    ranks = run_ranks(2, run)
    for rank, (_, seen, fired) in enumerate(ranks):
        assert fired == rank
        assert (False, False) in seen, "no rank waited for its device"
        assert (False, True) not in seen, "aborted while the device was behind"
    for name, wanted in _alone_for(3).items():
        assert torch.allclose(torch.cat([rows[name] for rows, _, _ in ranks]), wanted, atol=1e-6), name


def test_weights_that_may_hold_half_a_sum_are_not_trained_on() -> None:
    def run() -> str:
        devicelike.install(_Group)
        group_recovery.SETTLE_S = 0.2
        with pytest.raises(PeerFailed) as caught:
            _sharded_step("forward", after_s=100.0)
        return str(caught.value)

    for said in run_ranks(2, run):
        assert "forward_backward cannot be repeated in smaller parts: the device of rank 0, 1 was not done with" in said
        assert "weights may hold half of a sum. Start again from a checkpoint" in said
