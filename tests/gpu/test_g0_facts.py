"""G0: facts of the driver on which the choice of a start method rests. They are kept whether they are as expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

GROUP = "G0"

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(200)]

MACHINE = ("contexts", "machine")

SUCCESS, NOT_INITIALIZED = 0, 3
"""Of cuInit."""

WORDS = (
    "Cannot re-initialize CUDA",
    "autograd's threading",
    "initialization error",
    "driver initialization failed",
    "initialized",
)
"""Some of what torch says in a fork that cannot use CUDA."""


@pytest.mark.takes(7)
def test_what_the_machine_is(program: Callable[..., Any]) -> None:
    found = program("driver.py", "machine", among=MACHINE)
    assert found["cards"]
    for card in found["cards"]:
        capability = re.search(r"\((\d+), \d+\)", card)
        assert capability is not None, card
        served = [name for name in found["arch_list"] if name.startswith(f"sm_{capability[1]}")]
        assert served, f"this torch has no kernels for {card}: {found['arch_list']}"


@pytest.mark.takes(1)
def test_a_process_that_asked_nvml_has_no_uvm_and_its_forks_can_use_cuda(program: Callable[..., Any]) -> None:
    found = program("driver.py", "nvml")
    assert found["gpus"] >= 1
    assert not found["has_uvm"], found
    assert found["cuinit_in_fork"] == SUCCESS, found


@pytest.mark.takes(5)
def test_a_process_in_which_torch_counted_the_devices_is_forked(program: Callable[..., Any]) -> None:
    found = program("driver.py", "counted")
    assert found["count"] >= 1
    assert found["is_available"]
    assert found["in_a_fork"] == 2, found
    assert found["why_forks_fail"] is None, found


@pytest.mark.takes(2)
def test_a_process_that_called_cuinit_has_uvm_and_its_forks_hear_so(program: Callable[..., Any]) -> None:
    found = program("driver.py", "cuinit")
    assert found["cuinit"] == SUCCESS, found
    assert found["has_uvm"], found
    assert found["cuinit_in_fork"] == NOT_INITIALIZED, found


@pytest.mark.takes(6)
def test_a_backward_on_the_host_starts_threads_and_cuda_below_torchs_flag(program: Callable[..., Any]) -> None:
    found = program("driver.py", "backward")
    assert not found["is_initialized"], found
    assert found["autograd_threads"], found
    assert found["has_uvm"], found
    assert any(word in found["fork"]["backward"] for word in WORDS), found["fork"]


@pytest.mark.takes(6)
def test_pinned_memory_makes_cuda_below_torchs_flag(program: Callable[..., Any]) -> None:
    found = program("driver.py", "pinned")
    assert found["pin_memory"] == "done"
    assert not found["is_initialized"], found
    assert found["has_uvm"], found
    assert found["fork"]["cuinit"] == NOT_INITIALIZED, found["fork"]
    assert any(word in found["fork"]["on_device"] for word in WORDS), found["fork"]


@pytest.mark.takes(0.5)
def test_a_process_has_a_context_on_the_device_that_it_computes_on_alone(program: Callable[..., Any]) -> None:
    found = program("driver.py", "contexts", among=MACHINE)
    assert found["grew_mb"][0] > 50, found
    assert all(grew < 50 for grew in found["grew_mb"][1:]), found


@pytest.mark.nccl2
@pytest.mark.takes(14)
def test_two_ranks_can_talk_by_nccl_here(two_ranks: str, tell: Callable[..., None]) -> None:
    tell("two_ranks", two_ranks)
