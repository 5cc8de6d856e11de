"""G1: launches from a real kernel, whatever the notebook did before: the right start, and the numbers of the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu import launches
from gpu.launches import HISTORIES
from kernel.harness import RealKernel

GROUP = "G1"

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240)]

SOON_S = 2.0


@pytest.mark.takes(10)
@pytest.mark.parametrize("history", HISTORIES)
def test_ranks_start_as_the_notebooks_history_demands_and_train(
    kernel: RealKernel, history: str, tell: Callable[..., None]
) -> None:
    trained = launches.trained(kernel, history, "cuda", tell=tell)
    assert trained.off <= HISTORIES[history].tolerance, trained
    assert trained.start == HISTORIES[history].start, trained.text


@pytest.mark.takes(14)
def test_inline_trains_in_the_notebooks_own_process_whose_model_then_leaves_the_card_for_a_rank(
    kernel: RealKernel, tell: Callable[..., None]
) -> None:
    trained = launches.inline(kernel, "cuda", tell=tell)
    assert trained.off <= launches.TENSOR_HISTORY.tolerance, trained
    assert trained.start == "inline", trained.text
    lent = launches.lent(kernel, "cuda", tell=tell)
    assert lent["where"] == ["cuda", "cuda"], lent
    assert abs(lent["grew"] - 1) <= 1e-6, lent
    assert "on the host until the run is over: " in lent["text"], lent


@pytest.mark.takes(22)
def test_a_stop_ends_all_ranks_at_one_step_and_a_kill_leaves_nothing_on_the_card(
    kernel: RealKernel, tell: Callable[..., None]
) -> None:
    launches.begin(kernel, "cuda")
    stopped = launches.stopped(kernel, "cuda", tell=tell)
    assert len(set(stopped["steps"])) == 1, stopped
    assert stopped["took_s"] < 10, stopped
    killed = launches.killed(kernel, "cuda", tell=tell)
    assert killed["survivors"] == {}
    assert killed["left"] == []
    assert killed["back_s"] is not None, killed
    assert killed["back_s"] <= SOON_S, killed


@pytest.mark.takes(12)
def test_a_label_out_of_range_is_an_error_of_the_cell(kernel: RealKernel, tell: Callable[..., None]) -> None:
    told = launches.mislabelled(kernel, "cuda", 1, tell=tell)
    assert told["class"] in ("AcceleratorError", "RuntimeError"), told
    assert "device-side assert triggered" in told["error"], told
    assert "Cell In" in told["error"], told
