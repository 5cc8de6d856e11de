"""Folders that the real Accelerate wrote continue here."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.errors import CheckpointCorrupt, UntrustedPickle
from nbaccel.testing import run_ranks
from trainings import Tally, Tied

accelerate = pytest.importorskip("accelerate")


class Training:
    """The same program with either library."""

    def __init__(self, library: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.accelerator = library.Accelerator(**options)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.tally = Tally(best=3)
        self.accelerator.register_for_checkpointing(self.tally)

    def step(self) -> float:
        loss = self.model(torch.randn(4, 3)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def weights(self) -> list[float]:
        return [value for parameter in self.model.parameters() for value in parameter.flatten().tolist()]


def fresh_accelerate() -> None:
    """Accelerate keeps its state in classes; other tests may have left some."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning")  # by torch.load, from 2.15 on
@pytest.mark.parametrize("safe", [True, False])
def test_training_continues_where_accelerate_left_it(tmp_path: Path, safe: bool) -> None:
    fresh_accelerate()
    theirs = Training(accelerate, cpu=True)
    for _ in range(3):
        theirs.step()
    theirs.accelerator.save_state(tmp_path / "theirs", safe_serialization=safe)
    theirs.tally.state = {}
    expected = theirs.step(), theirs.step(), theirs.weights(), theirs.scheduler.get_last_lr()
    fresh_accelerate()
    import nbaccel

    ours = Training(nbaccel)
    ours.tally.state = {}
    ours.accelerator.load_state(tmp_path / "theirs")
    assert (ours.step(), ours.step(), ours.weights(), ours.scheduler.get_last_lr()) == expected
    assert ours.tally.state == {"best": 3}


def _saved_by_two(folder: str) -> list[float]:
    os.environ["OMP_NUM_THREADS"] = "1"  # else Accelerate warns
    theirs = Training(accelerate, cpu=True)
    theirs.step()
    theirs.accelerator.save_state(folder)
    theirs.accelerator.wait_for_everyone()
    return [*theirs.weights(), torch.rand(()).item()]


def _loaded_here(folder: str) -> list[float]:
    import nbaccel

    ours = Training(nbaccel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.accelerator.load_state(folder)
    return [*ours.weights(), torch.rand(()).item()]


def test_a_folder_of_two_ranks_continues_in_two_and_its_model_in_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "theirs")
    theirs = run_ranks(2, _saved_by_two, folder)
    assert run_ranks(2, _loaded_here, folder) == theirs
    assert _loaded_here(folder) == theirs[0]


def saved(folder: Path, **state: Any) -> None:
    fresh_accelerate()
    theirs = Training(accelerate, cpu=True)
    theirs.tally.state = state
    theirs.accelerator.save_state(folder)
    fresh_accelerate()


class Canary:
    """Sings when a pickle builds it."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["CANARY"],)


FILES = [
    ("optimizer.bin", UntrustedPickle),
    ("scheduler.bin", UntrustedPickle),
    ("custom_checkpoint_0.pkl", UntrustedPickle),
    ("scaler.pt", UntrustedPickle),
    ("random_states_0.pkl", None),
    ("model.safetensors", CheckpointCorrupt),
]


@pytest.mark.parametrize(("file", "error"), FILES, ids=[name for name, _ in FILES])
def test_a_malicious_pickle_in_any_file_never_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, error: Any
) -> None:
    import nbaccel

    folder, sung = tmp_path / "theirs", tmp_path / "sung"
    saved(folder)
    monkeypatch.setenv("CANARY", str(sung))
    torch.save({"state": Canary()}, folder / file)
    ours = Training(nbaccel)
    message = r"begin new random numbers.*random_states_0.pkl is a pickle that asks for" if error is None else file
    with pytest.warns(UserWarning, match=message) if error is None else pytest.raises(error, match=message):
        ours.accelerator.load_state(folder)
    assert not sung.exists()


def test_objects_in_a_registered_state_need_trust_and_the_message_says_so(tmp_path: Path) -> None:
    import nbaccel

    saved(tmp_path / "theirs", helper=Tally(a=1))
    ours = Training(nbaccel)
    with pytest.raises(UntrustedPickle, match=r"custom_checkpoint_0.pkl is a pickle .* load_state\(..., trust=True\)"):
        ours.accelerator.load_state(tmp_path / "theirs")
    ours.accelerator.load_state(tmp_path / "theirs", trust=True)
    assert ours.tally.state["helper"].state == {"a": 1}


@pytest.mark.parametrize("file", ["optimizer.bin", "model.safetensors", "custom_checkpoint_0.pkl"])
def test_truncated_files_are_named(tmp_path: Path, file: str) -> None:
    import nbaccel

    saved(tmp_path / "theirs")
    path = tmp_path / "theirs" / file
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointCorrupt, match=rf"{file} cannot be read"):
        Training(nbaccel).accelerator.load_state(tmp_path / "theirs")


def test_a_rank_without_random_states_begins_new_ones_and_that_is_said(tmp_path: Path) -> None:
    import nbaccel

    saved(tmp_path / "theirs")
    (tmp_path / "theirs" / "random_states_0.pkl").unlink()
    with pytest.warns(UserWarning, match=r"rank\(s\) 0 of 1 begin new .*random_states_0.pkl is missing"):
        Training(nbaccel).accelerator.load_state(tmp_path / "theirs")
    torch.save({"torch_manual_seed": 5}, tmp_path / "theirs" / "random_states_0.pkl")
    with pytest.warns(UserWarning, match=r"random_states_0.pkl cannot be used: KeyError\('random_state'\)"):
        Training(nbaccel).accelerator.load_state(tmp_path / "theirs")


def test_a_damaged_pickle_stays_damaged_with_trust(tmp_path: Path) -> None:
    import nbaccel

    saved(tmp_path / "theirs")
    (tmp_path / "theirs" / "scheduler.bin").write_bytes(b"no pickle")
    with pytest.raises(CheckpointCorrupt, match=r"scheduler.bin cannot be read"):
        Training(nbaccel).accelerator.load_state(tmp_path / "theirs", trust=True)


def test_other_counts_are_refused_as_in_folders_of_ours(tmp_path: Path) -> None:
    saved(tmp_path / "theirs")
    accelerator = Accelerator()
    with pytest.raises(RuntimeError, match=r"holds the state of 1 registered object\(s\), and 0 are registered"):
        accelerator.load_state(tmp_path / "theirs")
