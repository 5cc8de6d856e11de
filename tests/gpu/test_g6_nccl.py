"""G6: two ranks by NCCL, one of which fails, dies, sleeps or runs out of memory while the other waits for it.

On two cards, or on one that NCCL takes for two machines'. NCCL's waits end otherwise than gloo's: a kernel that spins
on the card notices no peer that has left, and after an abort it is done, with half a sum and without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from environments import REPOSITORY
from gpu import launches
from gpu.conftest import PROGRAMS
from kernel.harness import RealKernel

GROUP = "G6"

pytestmark = [pytest.mark.gpu, pytest.mark.nccl2, pytest.mark.slow, pytest.mark.timeout(240)]

ENDS = ("finally", "killed", "hang")


@pytest.mark.takes(28)
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_peer_begins_anew_too_when_a_rank_runs_out_of_memory(
    program: Callable[..., Any], two_ranks: str, when: str
) -> None:
    """Its host runs ahead: it may have queued steps behind a sum that was cut short, and nothing of these is kept."""
    ends: dict[int, str] = {}
    for place, told in program("pair.py", when).items():
        assert len(told) == 2, (place, told)
        peer, cause = told
        assert (peer["fired"], cause["fired"]) == (0, 1), place
        assert peer["weights"] == cause["weights"], place
        assert (peer["sum"], cause["sum"]) == (2, 2), place
        for rank in told:
            first, last = rank["attempts"]
            assert first["raised"] or first["steps"] == 3, (place, rank)
            assert (last["raised"], last["steps"]) == ("", 3), (place, rank)
            assert ends.setdefault(last["size"], rank["weights"]) == rank["weights"], (place, "not as elsewhere")


@pytest.mark.takes(22)
def test_a_rank_that_ends_its_training_in_a_finally_ends(program: Callable[..., Any], two_ranks: str) -> None:
    found = program("pair.py", "finally", among=ENDS)
    assert found["error"].startswith("ValueError: on purpose"), found
    assert found["took_s"] < 38, found


@pytest.mark.takes(0.5)
def test_a_rank_that_is_killed_in_a_sum_ends_the_run(program: Callable[..., Any], two_ranks: str) -> None:
    found = program("pair.py", "killed", among=ENDS)
    assert "rank 1 of 2 was killed by SIGKILL" in found["error"], found
    assert found["took_s"] < 38, found


@pytest.mark.takes(0.5)
def test_a_hang_says_which_rank_holds_up_the_other(program: Callable[..., Any], two_ranks: str) -> None:
    found = program("pair.py", "hang", among=ENDS)
    assert "rank 1 seems to hold up the others" in found["error"], found
    assert "in _never_comes: time.sleep(1000)" in found["error"], found


@pytest.mark.takes(15)
def test_two_hundred_steps_with_too_little_memory_are_those_of_one_process(
    program: Callable[..., Any], two_ranks: str
) -> None:
    found = program("pair.py", "soak")
    assert min(found["ooms"]) >= 10, found
    assert found["digests"][0] == found["digests"][1], found
    assert found["off"] <= 1e-4, found


@pytest.mark.takes(30)
def test_ranks_that_stay_outlive_a_peer_that_fails_and_interrupts_reach_a_rank_that_waits_for_its_device(
    kernel: RealKernel, two_ranks: str, tell: Callable[..., None]
) -> None:
    kernel.do(f"import sys; sys.path[:0] = [{str(PROGRAMS)!r}, {str(REPOSITORY)!r}]")
    told = launches.staying(kernel, "cuda", tell=tell)
    assert all("on purpose" in error for error in told["errors"])
    assert max(told["took_s"]) < 15, told
    assert told["pulled"] == [[0.0] * 6, [1.0] * 6], told
    assert all("loss" in text for text in told["losses"]), told
    in_gather, in_loss_item = told["refused"]
    assert not in_gather, told
    assert not in_loss_item or "may hold parts of a sum" in in_loss_item, told
    in_gather, in_loss_item = told["after"]
    assert "loss" in in_gather or "out of step since Cell In[" in in_gather, told
    assert "loss" in in_loss_item, told
    interrupted = launches.interrupted(kernel, "cuda", tell=tell)
    assert interrupted["took_s"] < 12, interrupted
    assert "loss" in interrupted["anew"]


@pytest.mark.takes(20)
def test_a_label_out_of_range_is_an_error_of_the_cell_and_ends_both_ranks(
    kernel: RealKernel, two_ranks: str, tell: Callable[..., None]
) -> None:
    """torch's watchdog meets it too, and would end the rank by a signal."""
    kernel.do(f"import sys; sys.path[:0] = [{str(PROGRAMS)!r}, {str(REPOSITORY)!r}]")
    told = launches.mislabelled(kernel, "cuda", 2, tell=tell)
    assert told["class"] in ("AcceleratorError", "RuntimeError"), told
    assert "device-side assert triggered" in told["error"], told
    assert "Cell In" in told["error"], told
    assert "rank 1" in told["error"], told
    assert "SIGABRT" not in told["error"], told
    assert told["took_s"] < 30, told
