"""Out of memory on any rank, anywhere in a step: nobody hangs, nobody differs, and the numbers are as without it."""

from __future__ import annotations

import gc
import math
import random
import time
from typing import Any

import pytest
import torch

from base.test_memory_limit import ONE_DNN, Fails
from nbaccel import Accelerator
from nbaccel.base import memory_limit
from nbaccel.base.events import Event, Loss, OutOfMemory, outlet
from nbaccel.base.memory_limit import MemoryLimit
from nbaccel.errors import PeerFailed
from nbaccel.features.micro_batches.task import MicroBatch, Shortage as NoRoom
from nbaccel.testing import MemLimit, run_ranks
from shortages import Collected, Shortage, Training, batch_of, labelled, relative_error, whole_gradients

RECOVERY_S = 2.0

EVERYBODY = tuple(range(4))

SHORTAGES = {
    "forward on one rank": Shortage("forward", 9, (1,)),
    "forward on all ranks": Shortage("forward", 9, EVERYBODY),
    "forward of the last micro-batch": Shortage("forward", 3, (1,), call=3),
    "backward before gradients are sent": Shortage("backward", 9, (1,)),
    "backward on all ranks": Shortage("backward", 5, EVERYBODY),
    "backward of the last micro-batch": Shortage("backward", 3, (1,), call=3),
    "nowhere": None,
}
"""In the first step, when no shape is proven and nothing is sent early."""

LATER = {
    "one rank": Shortage("backward", 20, (1,)),
    "two ranks": Shortage("backward", 20, (1, 2)),
    "all ranks": Shortage("backward", 20, EVERYBODY),
}
"""In a step whose shapes are proven, so that gradients are sent while the backward runs."""


def _gradients(steps: list[tuple[Shortage | None, int]], micro_batch_size: int | None = None) -> dict[str, Any]:
    """One step after the other, of so many samples; the last one's gradients, and what it took."""
    training = Training.start("SGD", lr=0.0)
    seen: list[Event] = []
    with outlet(seen.append):
        for number, (shortage, count) in enumerate(steps):
            training.optimizer.zero_grad()
            training.net.shortage, training.net.forwards = shortage, []
            start = time.monotonic()
            training.accelerator.forward_backward(
                training.loss, batch_of(count, number, training.net.rank), labelled, micro_batch_size=micro_batch_size
            )
            seconds = time.monotonic() - start
    return {
        "gradients": training.gradients(),
        "forwards": training.net.forwards,
        "seconds": seconds,
        "shortages": [event for event in seen if isinstance(event, OutOfMemory)],
    }


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", SHORTAGES)
def test_c07_gradients_are_those_of_the_whole_batch_wherever_memory_ran_out(name: str, world_size: int) -> None:
    limited = 10 if "last micro-batch" in name else None
    ranks = run_ranks(world_size, _gradients, [(SHORTAGES[name], 37)], limited)
    expected = whole_gradients([batch_of(37, 0, rank) for rank in range(world_size)])
    for rank in ranks:
        assert relative_error(rank["gradients"], expected) <= 1e-12
        assert all(map(torch.equal, rank["gradients"], ranks[0]["gradients"]))
        assert rank["seconds"] <= RECOVERY_S
    assert bool(ranks[1]["shortages"]) is (SHORTAGES[name] is not None)


@pytest.mark.parametrize(("name", "world_size"), [("one rank", 2), ("all ranks", 2), ("two ranks", 4), ("one rank", 4)])
def test_c07_after_gradients_were_sent_all_ranks_repeat_and_none_steps(name: str, world_size: int) -> None:
    ranks = run_ranks(world_size, _gradients, [(None, 37), (LATER[name], 37)])
    expected = whole_gradients([batch_of(37, 1, rank) for rank in range(world_size)])
    for number, rank in enumerate(ranks):
        assert relative_error(rank["gradients"], expected) <= 1e-12
        assert all(map(torch.equal, rank["gradients"], ranks[0]["gradients"]))
        assert rank["seconds"] <= RECOVERY_S
        assert rank["forwards"] == ([37, 19, 18] if number in LATER[name].ranks else [37, 37])


def test_c10_peers_of_a_rank_that_repeats_alone_run_nothing_again() -> None:
    first, second = run_ranks(2, _gradients, [(Shortage("backward", 9, (1,)), 37)])
    assert first["forwards"] == [37]
    assert first["shortages"] == []
    assert second["forwards"] == [37, 19, 10, 5, 5, 5, 5, 5, 4, 4, 4]
    assert [(event.phase, event.micro_batch_size, event.next_size) for event in second["shortages"]] == [
        ("backward", 37, 19),
        ("backward", 19, 10),
        ("backward", 10, 5),
    ]


def _counted(steps: list[tuple[Shortage | None, int]]) -> list[dict[str, int]]:
    """The collectives of each step but the first, in which the ranks meet."""
    training = Training.start("SGD", lr=0.0)
    training.step(batch_of(5, 99, training.net.rank))
    counts = []
    for number, (shortage, count) in enumerate(steps):
        with Collected() as collected:
            training.step(batch_of(count, number, training.net.rank), shortage)
        counts.append(dict(collected.calls))
    return counts


def test_c09_every_step_takes_the_same_collectives_and_a_poisoned_one_takes_them_twice() -> None:
    steps = [
        (None, 20),
        (None, 20),
        (Shortage("forward", 30, (0,)), 37),
        (Shortage("backward", 30, (1,)), 40),
        (None, 37),
        (Shortage("backward", 4, (1,)), 18),
    ]
    first, second = run_ranks(2, _counted, steps)
    assert first == second
    clean = first[0]
    assert list(clean) == ["allreduce_"]
    assert clean["allreduce_"] >= 3
    assert first[:5] == [clean] * 5
    assert first[5] == {"allreduce_": 2 * clean["allreduce_"]}


def _unfit(phase: str, accumulation: int) -> tuple[str, str, float, bool]:
    training = Training.start(gradient_accumulation_steps=accumulation)
    training.step(batch_of(5, 0, training.net.rank))
    if accumulation == 2:
        training.step(batch_of(5, 0, training.net.rank))
    before = training.weights()
    start = time.monotonic()
    seen: list[Event] = []
    with outlet(seen.append):
        for _ in range(accumulation - 1):
            loss = training.step(batch_of(8, 1, training.net.rank), Shortage(phase, 0, (1,)))
            assert math.isnan(loss) is (training.net.rank == 1)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            training.step(batch_of(8, 1, training.net.rank), Shortage(phase, 0, (1,)))
    assert not any(math.isnan(event.value) for event in seen if isinstance(event, Loss))
    seconds = time.monotonic() - start
    unchanged = torch.equal(before, training.weights())
    for _ in range(accumulation):
        training.step(batch_of(8, 2, training.net.rank))
    assert not torch.equal(before, training.weights())
    if training.net.rank == 1:  # the last size is tried once more after a thorough collection
        sizes = [event.next_size for event in seen if isinstance(event, OutOfMemory)]
        assert sizes[-3:] == [1, 1, 0]
    return type(caught.value).__name__, str(caught.value), seconds, unchanged


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_c11_where_a_single_sample_does_not_fit_all_ranks_raise_the_same_error(phase: str, accumulation: int) -> None:
    ranks = run_ranks(2, _unfit, phase, accumulation)
    assert ranks[0][:2] == ranks[1][:2]
    kind, message, _, _ = ranks[0]
    assert kind == "OutOfMemoryError"
    assert "rank 1 of 2 cannot run forward and backward on 1 sample" in message
    assert f"in step {1}" in message
    assert "gradient_checkpointing" in message
    assert all(seconds < 15 and unchanged for _, _, seconds, unchanged in ranks)


def test_garbage_goes_before_the_smallest_micro_batch_is_given_up() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(64, 64))
    batch = torch.ones(1, 64)
    with MemLimit() as limit:
        accelerator.forward_backward(lambda x: model(x).square().mean(), batch)
        cycle = [torch.zeros(10_000)]
        cycle.append(cycle)  # type: ignore[arg-type]
        gc.collect()  # so that it is old
        del cycle
        limit.limit_bytes = limit.live_bytes + 12_000  # the gradient of the weights takes 16,384
        loss = accelerator.forward_backward(lambda x: model(x).square().mean(), batch)
    assert limit.refusals
    assert loss.isfinite()


def _user_error(when: str) -> tuple[str, str, float, float]:
    training = Training.start()
    rank = training.net.rank
    training.step(batch_of(9, 0, rank))
    before = training.weights()

    def loss(batch: Any) -> torch.Tensor:
        if rank == 1 and when == "forward":
            raise KeyError("user bug")
        value = training.loss(batch)
        if rank == 1 and when == "backward":
            value.register_hook(lambda gradient: {}["user bug"])
        return value

    def measure(batch: Any) -> float:
        return {}["user bug"] if rank == 1 and when == "weight" else labelled(batch)

    training.net.shortage = None
    start = time.monotonic()
    with pytest.raises((KeyError, PeerFailed)) as caught:
        training.accelerator.forward_backward(loss, batch_of(9, 1, rank), measure)
    seconds = time.monotonic() - start
    assert torch.equal(before, training.weights())
    training.step(batch_of(9, 2, rank))
    return type(caught.value).__name__, str(caught.value), seconds, float(training.weights().sum())


@pytest.mark.parametrize("when", ["forward", "backward", "weight"])
def test_c07_an_error_of_the_program_surfaces_on_all_ranks_in_the_same_step(when: str) -> None:
    first, second = run_ranks(2, _user_error, when)
    assert second[:2] == ("KeyError", "'user bug'")
    assert first[0] == "PeerFailed"
    assert "rank 1 of 2 failed in step 1" in first[1]
    assert "rank 0 of 2 had no part in it" in first[1]
    assert max(first[2], second[2]) < RECOVERY_S
    assert first[3] == second[3]


def _soaked(steps: int, seed: int, with_faults: bool) -> tuple[list[bytes], torch.Tensor, int]:
    """Random shortages of random ranks in batches of random sizes: the weights after every step."""
    training = Training.start(lr=1e-3)
    rank, world_size = training.net.rank, training.accelerator.num_processes
    drawn = random.Random(seed)  # the same on all ranks
    seen: list[Event] = []
    weights = []
    with outlet(seen.append):
        for number in range(steps):
            ranks = tuple(rank for rank in range(world_size) if drawn.random() < 0.4)
            shortage = Shortage(
                drawn.choice(["forward", "backward", "backward"]), drawn.choice([1, 2, 5, 9, 15]), ranks
            )
            counts = [drawn.randint(1, 24) for _ in range(world_size)]
            training.step(batch_of(counts[rank], number, rank), shortage if with_faults else None, weight=labelled)
            weights.append(training.weights().numpy().tobytes())
            if number % 10 == 9:
                training.accelerator._recovery.sizes.start_at(10**6 + number)  # forget what did not fit
    return weights, training.weights(), sum(isinstance(event, OutOfMemory) for event in seen)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "steps"), [(2, 200), (4, 50)])
def test_c07_two_hundred_steps_of_random_shortages_end_where_sound_ones_do(world_size: int, steps: int) -> None:
    faulty = run_ranks(world_size, _soaked, steps, 5, True)
    sound = run_ranks(world_size, _soaked, steps, 5, False)
    for weights, _, shortages in faulty:
        assert weights == faulty[0][0]
        assert shortages > steps / 8
    assert (faulty[0][1] - sound[0][1]).abs().max() < 1e-10


def take_part(fails: Fails) -> bool:
    return isinstance(MicroBatch(fails, None, lambda: 1.0, 1.0, lambda loss: loss, lambda: None).run(), NoRoom)


@pytest.mark.parametrize("text", ONE_DNN)
def test_a_part_is_tried_again_where_memory_was_nearly_full_and_nowhere_else(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "host_limit", lambda: MemoryLimit(99, 100))
    assert take_part(Fails(text))
    monkeypatch.setattr(memory_limit, "host_limit", lambda: MemoryLimit(50, 100))
    with pytest.raises(RuntimeError, match=text):
        take_part(Fails(text))
