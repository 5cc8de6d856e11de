"""G2: one process on a card: no batch is lost between streams, nothing is read early, and a step does not wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

GROUP = "G2"

BATCHES = ("opaque", "refilled", "slow_consumer", "epochs")
VALUES = ("readings", "saves")

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.takes(10)
def test_a_batch_that_nobody_can_look_into_holds_what_it_held_on_the_host(program: Callable[..., Any]) -> None:
    found = program("one_process.py", "opaque", among=BATCHES)
    assert found["batches"] == 64
    assert found["wrong"] == 0, found


@pytest.mark.takes(0.5)
def test_forty_short_epochs_keep_no_more_memory_than_two(program: Callable[..., Any]) -> None:
    found = program("one_process.py", "epochs", among=BATCHES)
    assert found["growth"] <= 2 * found["batch_bytes"], found


@pytest.mark.takes(0.5)
def test_a_loader_may_fill_its_one_pinned_buffer_again(program: Callable[..., Any]) -> None:
    found = program("one_process.py", "refilled", among=BATCHES)
    assert found["arrived"] == found["expected"]


@pytest.mark.takes(0.5)
def test_a_slow_program_has_three_batches_at_most(program: Callable[..., Any]) -> None:
    found = program("one_process.py", "slow_consumer", among=BATCHES)
    assert found["arrived"] == found["expected"]
    assert found["peak"] <= 3.5, found


@pytest.mark.takes(9)
def test_values_are_read_as_they_were_when_they_were_logged(program: Callable[..., Any]) -> None:
    assert program("one_process.py", "readings", among=VALUES)["wrong"] == []


@pytest.mark.takes(0.5)
def test_a_save_in_the_background_is_the_state_of_its_moment(program: Callable[..., Any]) -> None:
    found = program("one_process.py", "saves", among=VALUES)
    assert found["tensors"] >= 24
    assert found["wrong"] == 0, found


@pytest.mark.takes(7)
def test_every_precision_trains_as_plain_torch_does(program: Callable[..., Any]) -> None:
    off = program("one_process.py", "precisions")
    assert len(off) == 5
    assert max(off.values()) <= 1e-6, off


MOST_WAITS = {
    "raw, no": 0,
    "raw, bf16": 0,
    "raw, fp16": 1,  # of the scaler, which asks whether a gradient was infinite
    "prepared, no": 0,
    "prepared, bf16": 0,
    "prepared, fp16": 1,
    "prepared, clipped": 0,
    "forward_backward": 0,
    "forward_backward in 2 parts": 0,
}


@pytest.mark.takes(8)
def test_a_step_waits_for_the_device_as_rarely_as_plain_torch(program: Callable[..., Any]) -> None:
    waits = program("one_process.py", "waits")
    assert waits == {name: min(most, waits[name]) for name, most in MOST_WAITS.items()}
