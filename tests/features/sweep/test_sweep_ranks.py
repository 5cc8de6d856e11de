"""Sweeps whose runs have several ranks: each run is a world of its own, and equals a single launch of as many ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import nbaccel
from nbaccel import Accelerator, launch
from nbaccel.base.hardware import Gpu, Survey
from nbaccel.features.sweep.sweep import sweep

_SETUP = "nbaccel.train.setup:setup_rank"


@pytest.fixture(autouse=True)
def of_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compute with one thread, as four ranks on a small machine do: then sums have one order."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trains(kind: str, accelerator: Accelerator) -> dict[str, Any]:
    """A small data-parallel training, of which rank 1 alone may come to a bad end."""
    data = torch.arange(128.0).view(16, 8) / 128
    model = torch.nn.Linear(8, 1)
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(data, 2, shuffle=True)
    )
    rank, losses = accelerator.process_index, []
    for step, batch in enumerate(batches):
        loss = (model(batch) - 1).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.log({"loss": loss})
        if (rank, step) == (1, 2):
            bad_end(kind)
    weight = accelerator.unwrap_model(model).weight.detach().clone()
    return {"rank": rank, "world": accelerator.num_processes, "losses": losses, "weight": weight}


def bad_end(kind: str) -> None:
    match kind:
        case "crash":
            raise ValueError("eleven classes")
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)


def alone() -> dict[str, Any]:
    return trains("good", Accelerator())


@pytest.mark.slow
def test_runs_of_two_ranks_equal_single_runs_and_what_ends_one_rank_ends_its_run_alone(start_method: str) -> None:
    kinds = ["good", "hang", "crash", "fine", "dies", "well"]
    runs = sweep(
        trains, kind=kinds, slots=2, gpus_per_run=2, cpu=True, seed=3, hang_timeout_s=5.0, start_method=start_method
    )
    assert [run.state.word for run in runs if run.state] == ["done", "failed", "failed", "done", "failed", "done"]
    single = launch(alone, 2, seed=3, cpu=True, setup=_SETUP, start_method=start_method)
    assert single.values[0]["losses"] != single.values[1]["losses"]
    for run in runs:
        if run.error is None:
            assert [value["rank"] for value in run.values] == [0, 1]
            for mine, other in zip(run.values, single.values, strict=True):
                assert (mine["world"], mine["losses"]) == (2, other["losses"])
                assert torch.equal(mine["weight"], other["weight"])
            assert run.curves["loss"] == single.curves["loss"]
    why = {run.config["kind"]: run.state.sentence for run in runs if run.state and run.error}
    assert why["crash"].endswith(": rank 1, ValueError: eleven classes")
    assert "rank 1, RankDied: rank 1 of 2 was killed by SIGKILL" in why["dies"]
    assert why["hang"].endswith(
        "no rank has entered a step or a collective for 6 s; rank 1 seems to hold up the others"
    )


def meets(fold: int, accelerator: Accelerator) -> list[int]:
    """Gather the fold of all ranks while another run does the same."""
    Path(f"here-{fold}-{accelerator.process_index}").touch()
    end = time.monotonic() + 30
    while len(list(Path().glob("here-*"))) < 4:
        assert time.monotonic() < end, "the other run has not begun"
        time.sleep(0.02)
    found: list[int] = []
    for _ in range(20):
        found = accelerator.gather(torch.tensor([10 * fold + accelerator.process_index])).tolist()
    return found


def test_runs_that_go_side_by_side_meet_their_own_ranks_only(start_method: str) -> None:
    runs = sweep(meets, fold=range(2), slots=2, gpus_per_run=2, cpu=True, start_method=start_method)
    assert [run.value for run in runs] == [[0, 1], [10, 11]]


def waits(fold: int, accelerator: Accelerator) -> None:
    Path(f"begun-{fold}-{accelerator.process_index}").touch()
    time.sleep(1000)


def test_an_interrupt_ends_both_ranks_of_all_runs(tmp_path: Path) -> None:
    def press_when_four_ranks_run() -> None:
        end = time.monotonic() + 30
        while len(list(tmp_path.glob("begun-*"))) < 4 and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press_when_four_ranks_run)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt, match="3 runs: 3 stopped"):
            sweep(waits, fold=range(3), slots=2, gpus_per_run=2, cpu=True)
    finally:
        thread.join()
    assert len(list(tmp_path.glob("begun-*"))) == 4


def own_cards(fold: int, accelerator: Accelerator) -> list[str]:
    seen = f"{os.environ['CUDA_VISIBLE_DEVICES']} in {accelerator.process_index} of {accelerator.num_processes}"
    return nbaccel.utils.gather_object([seen])


def test_each_run_sees_the_two_cards_of_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tuple(Gpu(number, f"GPU-{number}", "Tesla T4", 16 * 10**9, number=number) for number in range(4))
    monkeypatch.setattr(Survey, "take", classmethod(lambda cls, **asked: Survey(gpus=cards, cpu_count=8)))
    runs = sweep(own_cards, fold=range(3), gpus_per_run=2)
    seen = [run.value for run in runs]
    assert sorted(seen[:2]) == [["0,1 in 0 of 2", "0,1 in 1 of 2"], ["2,3 in 0 of 2", "2,3 in 1 of 2"]]
    assert seen[2] in seen[:2]
