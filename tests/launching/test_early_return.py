"""A rank that returned, or failed, while its peers wait for it: they are told, soon, and by name."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from nbaccel import Accelerator, CollectiveMismatch, PartialState, launch


def _leaves_before_a_gather() -> None:
    import torch

    accelerator = Accelerator()
    accelerator.gather(torch.ones(1))
    if not accelerator.is_last_process:
        accelerator.gather({"loss": torch.ones(2)})


def _leaves_after_many_calls() -> None:
    accelerator = Accelerator()
    for _ in range(20):
        accelerator.wait_for_everyone()
    if not accelerator.is_last_process:
        accelerator.check_trigger()


def _never_joins() -> None:
    from nbaccel.base.world import World

    if not World.from_env().is_last_process:
        PartialState()


def _leaves_before_prepare() -> None:
    import torch

    accelerator = Accelerator()
    if not accelerator.is_last_process:
        accelerator.prepare(torch.nn.Linear(2, 1))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("program", "call"),
    [
        (_leaves_before_a_gather, "gather {loss: float32[2]} (call 2 of this process group)"),
        (_leaves_after_many_calls, "check_trigger (call 21 of this process group)"),
        (_leaves_before_prepare, "prepare Linear of 2 parameters (call 1 of this process group)"),
        (_never_joins, "forming the process group"),
    ],
)
def test_a_rank_that_waits_for_one_that_returned_hears_of_it_within_two_seconds(
    program: Callable[[], None], call: str, start_method: str
) -> None:
    launch(PartialState, 2, cpu=True, start_method=start_method)  # imports are paid
    began = time.monotonic()
    with pytest.raises(CollectiveMismatch) as caught:
        launch(program, 2, cpu=True, start_method=start_method)
    assert time.monotonic() - began < 30  # the wait of the group would take minutes
    message = str(caught.value)
    assert f"  rank 0: {call}\n  rank 1: has finished, and will not come" in message
    assert "only some ranks take" in message


def test_all_that_wait_hear_of_it() -> None:
    run = launch(_leaves_before_a_gather, 3, cpu=True, check=False)
    assert isinstance(run.error, CollectiveMismatch)
    assert "rank 2: has finished" in str(run.error)


def _finishes_first() -> bool:
    accelerator = Accelerator()
    if accelerator.is_main_process:
        with accelerator.main_process_first():
            time.sleep(1.2)  # while the other one waits
    else:
        with accelerator.main_process_first():
            pass
    return True


def test_a_rank_that_is_only_slow_is_waited_for() -> None:
    assert launch(_finishes_first, 2, cpu=True).values == [True, True]


def _fails_first() -> None:
    state = PartialState()
    with state.main_process_first():
        if state.is_main_process:
            raise OSError("no such dataset")


def test_the_main_process_is_blamed_for_its_failure_and_not_those_that_waited_for_it() -> None:
    for _ in range(3):
        with pytest.raises(OSError, match="no such dataset") as caught:
            launch(_fails_first, 3, cpu=True)
        assert "rank 0 of 3" in caught.value.__notes__[0]
