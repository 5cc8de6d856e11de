"""What ranks of an unmodified loop tell each other before a backward ends as a collective does, whatever happens."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import RankDied, launch
from nbaccel.train.distributed.process_group import process_group

pytestmark = pytest.mark.slow

SETUP = "nbaccel.train.setup:setup_rank"
LAST_RANKS_STEP = 5


def fine() -> None:
    """Nothing happens."""


def trains(fault: Callable[[], object] = fine) -> tuple[list[Tensor], bool]:
    """Return the weights, and whether the ranks have shared memory; `fault` comes over the last rank in its sixth step.

    It is before the backward, so the other ranks wait for what this rank tells.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.randn(60, 4, dtype=torch.float64)
    is_last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    shares = False
    for step, (x, y) in enumerate(DataLoader(TensorDataset(samples, samples.sum(1, keepdim=True)), 6)):
        loss = (model(x) - y).square().mean() + sum(weight.square().sum() for weight in model.parameters())
        if step == LAST_RANKS_STEP and is_last:
            fault()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if process_group.talk is not None:
            shares = process_group.talk._host._messages is not None
    return [weight.detach() for weight in model.parameters()], shares


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_ranks_of_one_machine_tell_each_other_by_shared_memory(start_method: str, world_size: int) -> None:
    expected, shares = trains()
    assert not shares
    for weights, shares in launch(trains, world_size, setup=SETUP, start_method=start_method, cpu=True).values:
        assert shares
        for mine, alone in zip(weights, expected, strict=True):
            assert torch.allclose(mine, alone, rtol=1e-12, atol=1e-12)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_with_a_child() -> None:
    """Its copies of what the rank has open live on for a while."""
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    dies()


@pytest.mark.parametrize(
    ("world_size", "fault"), [(2, dies_with_a_child), pytest.param(3, dies, marks=pytest.mark.full)]
)
def test_a_rank_that_is_killed_while_others_wait_for_it_is_named(
    start_method: str, world_size: int, fault: Callable[[], object]
) -> None:
    last = world_size - 1
    with pytest.raises(RankDied, match=rf"rank {last} of {world_size} was killed by SIGKILL") as caught:
        launch(trains, world_size, (fault,), setup=SETUP, start_method=start_method, cpu=True)
    assert (caught.value.rank, caught.value.exit_code) == (last, -signal.SIGKILL)


def raises() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("world_size", [3, pytest.param(2, marks=pytest.mark.full)])
def test_a_rank_that_raises_while_others_wait_for_it_is_what_is_told(start_method: str, world_size: int) -> None:
    with pytest.raises(ValueError, match="boom") as caught:
        launch(trains, world_size, (raises,), setup=SETUP, start_method=start_method, cpu=True)
    assert f"raised on rank {world_size - 1} of {world_size}" in caught.value.__notes__[0]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_an_interrupt_ends_ranks_that_wait_for_another_one(start_method: str, world_size: int) -> None:
    reading, writing = os.pipe()
    path = f"/proc/{os.getpid()}/fd/{writing}"  # a rank of the zygote has no copy of it

    def stays_away() -> None:
        with open(path, "wb", buffering=0) as file:
            file.write(b"!")
        time.sleep(60)

    def interrupt() -> None:
        os.read(reading, 1)
        time.sleep(0.3)  # the others are there by now, most likely; it ends in the same way if they are not
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    presser.start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(trains, world_size, (stays_away,), setup=SETUP, start_method=start_method, cpu=True)
    finally:
        os.write(writing, b"!")
        presser.join()
        os.close(reading)
        os.close(writing)
    assert time.monotonic() - began < 45, "the last rank's sleep is not waited for"
