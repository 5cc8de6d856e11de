"""Criteria 21 and 22: wherever memory runs out, all ranks land on one size; another error ends it on all of them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbaccel import Accelerator, NoBatchSizeFits, PeerFailed, find_executable_batch_size
from nbaccel.base.failures import Failure, Recovery, classify, recovery_of
from nbaccel.features.retry import coordinate
from nbaccel.testing import Faults, MemLimit, run_ranks
from nbaccel.train.distributed.process_group import process_group
from searches import PLACES, START, out_of_memory_everywhere, training

HALF, NEAR = START // 2, int(START * 0.9)
LANDS_ON = {place: NEAR if place in ("backward", "optimizer step") else HALF for place in PLACES}
LANDS_ON["after the step, while peers compute"] = NEAR  # the hook runs inside of the optimizer's step


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ranks"), [(2, (1,)), (2, (0, 1)), (4, (2,)), (4, (0, 3))])
def test_21_all_ranks_land_on_one_size_wherever_memory_runs_out(world_size: int, ranks: tuple[int, ...]) -> None:
    told = run_ranks(world_size, out_of_memory_everywhere, ranks, timeout_s=50)
    for place in PLACES:
        assert [rank[place][0] for rank in told] == [LANDS_ON[place]] * world_size, place
        assert len({rank[place][1] for rank in told}) == 1, f"{place}: the ranks' weights differ"
        assert [rank[place][2] for rank in told] == [int(rank in ranks) for rank in range(world_size)], place
    assert [rank["sum"] for rank in told] == [world_size] * world_size
    assert not any(rank["threads"] for rank in told)


def _within_limits_of_their_own() -> tuple[list[int], int, int]:
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        tried.append(batch_size)
        model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(batch_size, 100)).mean())
        optimizer.step()
        return batch_size

    with MemLimit(150_000 if accelerator.process_index else 1_000_000) as limit:
        size = train()
    return tried, size, limit.refusals


def test_21_the_rank_with_the_smallest_memory_decides() -> None:
    roomy, tight = run_ranks(2, _within_limits_of_their_own)
    assert roomy[:2] == tight[:2]
    assert roomy[2] == 0
    assert tight[2] == len(tight[0]) - 1 >= 1


def _another_error(error: BaseException) -> tuple[str, str, str, float]:
    accelerator = Accelerator()
    faults = Faults().raise_at("forward", error, rank=1, step=2)
    with faults:
        began = time.monotonic()
        try:
            training(accelerator, faults)()
        except Exception as raised:
            kind = classify(type(raised).__name__, str(raised)).name
            return type(raised).__name__, str(raised), kind, time.monotonic() - began
    return "", "", "", 0.0


@pytest.mark.parametrize("error", [KeyError("image"), RuntimeError("shapes do not match")], ids=["key", "runtime"])
def test_22_the_error_of_one_rank_surfaces_on_all(error: Exception) -> None:
    peer, cause = run_ranks(2, _another_error, error)
    name = type(error).__name__
    assert cause[:3] == (name, str(error), Failure.USER.name)
    assert peer[0] == PeerFailed.__name__
    assert peer[1] == (
        f"rank 1 of 2 failed in train(batch_size=16) with {name}: {error}; rank 0 was stopped with it. The traceback "
        "of rank 1 says where; the process group is over."
    )
    assert peer[2] == Failure.PEER_LOST.name  # a launcher reports the other one
    assert max(peer[3], cause[3]) < 5


def _an_error_while_the_other_is_short() -> str:
    accelerator = Accelerator()
    faults = Faults().raise_at("forward", KeyError("image"), rank=0, step=1).oom_at("forward", rank=1, step=1)
    with faults:
        try:
            training(accelerator, faults)()
        except Exception as error:
            return type(error).__name__
    return "none"


def test_22_an_error_is_not_taken_for_a_consequence_of_missing_memory() -> None:
    assert run_ranks(2, _an_error_while_the_other_is_short) == ["KeyError", "PeerFailed"]


def _fail_and_go_on(late: int, failing: tuple[int, ...], collectives: int) -> tuple[str, list[int], float]:
    """Raise an error of the program's own in some ranks, catch it outside, and exchange something afterwards."""
    accelerator = Accelerator()
    model, optimizer = _small(accelerator)

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        for _ in range(collectives):
            accelerator.backward(model(torch.ones(batch_size, 3)).mean())
            optimizer.step()
        time.sleep(0.3 * (accelerator.process_index == late))  # the other one is over first
        if accelerator.process_index in failing:
            raise RuntimeError(f"trial pruned in rank {accelerator.process_index}")
        return batch_size

    try:
        told = str(train())
    except (RuntimeError, PeerFailed) as error:
        told = str(error)
    accelerator.backward(model(torch.ones(2, 3)).mean())
    optimizer.step()
    ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    return told, ranks, sum(each.sum().item() for each in model.parameters())


def _small(accelerator: Accelerator) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    torch.set_default_dtype(torch.float64)
    return tuple(accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1)))


@pytest.mark.parametrize("collectives", [0, 2])
@pytest.mark.parametrize("late", [0, 1])
def test_22_an_error_of_all_ranks_is_each_rank_own_and_their_group_works_on(late: int, collectives: int) -> None:
    told = run_ranks(2, _fail_and_go_on, late, (0, 1), collectives)
    assert [text for text, _, _ in told] == ["trial pruned in rank 0", "trial pruned in rank 1"]
    assert [ranks for _, ranks, _ in told] == [[0, 1]] * 2
    assert told[0][2] == told[1][2]


@pytest.mark.parametrize("late", [0, 1])
def test_22_an_error_of_one_rank_beside_one_that_is_done_leaves_the_group_whole(late: int) -> None:
    done, failed = run_ranks(2, _fail_and_go_on, late, (1,), 1)
    assert failed[0] == "trial pruned in rank 1"
    assert done[0] == (
        "rank 1 of 2 failed in train(batch_size=4) with RuntimeError: trial pruned in rank 1; rank 0 was stopped with "
        "it. The traceback of rank 1 says where; the process group works on."
    )
    assert done[1:] == failed[1:]


def _nothing_fits() -> list[Any]:
    state = {"free": False}
    told: list[Any] = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> int:
        if not state["free"] and Accelerator().is_main_process:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return batch_size

    try:
        train()
    except NoBatchSizeFits as error:
        told += [str(error), error.tried]
    state["free"] = True
    return [*told, train()]


def test_24_nothing_fits_is_one_error_on_all_ranks_and_not_the_end() -> None:
    for text, tried, later in run_ranks(2, _nothing_fits):
        assert text.startswith(
            "train fits in memory at no batch size: 4, 2, 1 were tried.\n"
            "  the last error: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        )
        assert tried == (4, 2, 1)
        assert later == 4


def _in_one_another() -> tuple[Any, list[tuple[int, int]]]:
    accelerator = Accelerator()
    tried = []

    @find_executable_batch_size(starting_batch_size=8)
    def outer(batch_size: int) -> tuple[int, int]:
        @find_executable_batch_size(starting_batch_size=32)
        def inner(inner_size: int) -> int:
            tried.append((batch_size, inner_size))
            if inner_size > 16 and accelerator.process_index == 0:
                raise MemoryError
            accelerator.reduce(torch.ones(()))
            return inner_size

        if batch_size > 4 and accelerator.process_index == 1:
            raise MemoryError
        inner_size = inner()
        accelerator.reduce(torch.ones(()))
        return batch_size, inner_size

    return outer(), tried


def test_a_search_in_a_search_gives_way_to_the_outer_one() -> None:
    inside, short = run_ranks(2, _in_one_another)
    assert inside[0] == short[0] == (4, 16)
    assert short[1] == [(4, 32), (4, 16)]


def _groups_of_their_own() -> tuple[str, str]:
    accelerator = Accelerator()
    kept = dist.new_group([0, 1])

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        if accelerator.process_index:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        accelerator.reduce(torch.ones(()))

    try:
        train()
    except Exception as error:
        del kept
        return type(error).__name__, str(error)
    return "", ""


def test_groups_that_cannot_be_made_again_are_named() -> None:
    peer, short = run_ranks(2, _groups_of_their_own)
    reason = (
        "train(batch_size=4) cannot be tried again with a smaller batch in these processes: 1 process group(s) were "
        "made outside of the function (new_group, a device mesh), and only the default one can be formed again; make "
        "them inside"
    )
    assert short[0] == "OutOfMemoryError"
    assert short[1].startswith("OutOfMemoryError: CUDA out of memory.\n")
    assert reason in short[1]
    assert "Start it again with starting_batch_size=2 or less." in short[1]
    assert peer[0] == PeerFailed.__name__
    assert reason in peer[1]


def _one_rank_returns_early() -> tuple[str, str]:
    accelerator = Accelerator()

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        if accelerator.is_main_process:
            accelerator.reduce(torch.ones(()))

    try:
        train()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_22_a_rank_that_is_done_early_ends_the_wait_of_the_others() -> None:
    waiting, done = run_ranks(2, _one_rank_returns_early)
    assert waiting[0] == "CollectiveMismatch"
    assert "  rank 0: reduce sum" in waiting[1]
    assert "\n  rank 1: is done with train(batch_size=128)\n" in waiting[1]
    assert done[0] == PeerFailed.__name__


def _one_rank_does_not_come_back(patience_s: float) -> tuple[str, str]:
    coordinate._PATIENCE_S = patience_s
    accelerator = Accelerator()

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        if not accelerator.process_index:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        (search,) = process_group.recoveries
        while search._messages.failed is None:  # stuck until the other one has lost its patience
            time.sleep(0.01)

    try:
        train()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_rank_that_does_not_come_back_is_named_and_the_error_is_one_to_restart_on() -> None:
    short, late = run_ranks(2, _one_rank_does_not_come_back, 0.3)
    assert short[0] == "OutOfMemoryError"
    assert "these processes: rank 1 did not come back within 0.3 s. Start it again with start" in short[1]
    assert recovery_of(torch.OutOfMemoryError(short[1])) is Recovery.RETRY
    assert late[0] == PeerFailed.__name__
    assert late[1].startswith("rank 0 of 2 failed in train(batch_size=4) with OutOfMemoryError")
