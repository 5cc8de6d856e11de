"""Programs that resume by Accelerate's own recipe see every batch once, in the order of a run without a break."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nbaccel import Accelerator
from nbaccel.testing import run_ranks

EPOCHS, BATCHES = 3, 4


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(16.0)[:, None]


class Training:
    """A training whose batches are noted: four batches in an epoch, for each rank."""

    def __init__(self, kind: str, steps: int = 1) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=steps)
        torch.manual_seed(5)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        own = torch.Generator().manual_seed(7) if kind == "own generator" else None
        data: Any = Stream() if kind == "stream" else torch.arange(16.0)[:, None]
        size = 4 // self.accelerator.num_processes
        loader: Any = DataLoader(data, size, shuffle=kind != "stream", generator=own)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.seen: list[list[float]] = []

    def step(self, batch: Any) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.seen.append(batch.flatten().tolist())

    def run(self, begin: int = 0, skip: int | None = None, save: int = 0, folder: Any = None) -> list[list[float]]:
        """Train from epoch `begin` on, without its first `skip` batches; save after `save` of them all."""
        step = begin * BATCHES + (skip or 0)
        for epoch in range(begin, EPOCHS):
            is_first = epoch == begin and skip is not None
            active = self.accelerator.skip_first_batches(self.loader, skip) if is_first else self.loader
            for batch in active:
                self.step(batch)
                step += 1
                if step == save:
                    self.accelerator.save_state(folder)
                    self.accelerator.wait_for_everyone()
        return self.seen

    @property
    def weights(self) -> list[float]:
        return [value.item() for value in self.accelerator.unwrap_model(self.model).parameters()]


def _resumed(kind: str, save: int, letter: str, folder: str, steps: int = 1) -> list[Any]:
    """What is left after the save, in a run without a break and in the one that is resumed."""
    whole = Training(kind, steps)
    seen = whole.run(save=save, folder=folder)
    again = Training(kind, steps)
    again.accelerator.load_state(folder)
    begin, skip = divmod(save, BATCHES)
    if letter == "set_epoch":
        again.loader.set_epoch(begin)
    return [
        seen[save:],
        again.run(begin, skip if skip or letter == "none is no zero" else None),
        whole.weights,
        again.weights,
    ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["shuffled", "own generator", "stream"])
@pytest.mark.parametrize("letter", ["truth", "none is no zero", "set_epoch"])
@pytest.mark.parametrize("save", [2, 4, 8])
def test_the_recipe_trains_what_is_left(ranks: int, kind: str, letter: str, save: int, tmp_path: Path) -> None:
    for left, resumed, weights, again in run_ranks(ranks, _resumed, kind, save, letter, str(tmp_path / "saved")):
        assert resumed == left
        assert again == pytest.approx(weights, rel=1e-12)


@pytest.mark.filterwarnings("ignore:save_state inside an accumulation window")
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_epoch_that_was_saved_in_its_first_window_has_its_order_again(ranks: int, tmp_path: Path) -> None:
    def in_rank() -> tuple[Any, Any]:
        seen = Training("shuffled", 2).run(save=5, folder=tmp_path / "saved")
        again = Training("shuffled", 2)
        again.accelerator.load_state(tmp_path / "saved")
        return seen[4:], again.run(1)

    for left, resumed in run_ranks(ranks, in_rank):
        assert resumed == left


def _gone_back(save: int, times: int, folder: str) -> tuple[list[int], list[str], Any]:
    """Batches of epochs, before the first `times` of which a program goes back to a save; and what was said."""
    training = Training("shuffled")
    training.run(2, save=2 * BATCHES + save, folder=folder)
    counts = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for epoch in range(3):
            if epoch < times:
                training.accelerator.load_state(folder)
            before = len(training.seen)
            for batch in training.loader:
                training.step(batch)
            counts.append(len(training.seen) - before)
    return counts, [str(each.message) for each in said if "load_state" in str(each.message)], training.loader.iteration


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("save", [2, 4])
def test_a_program_that_goes_back_to_better_weights_has_whole_epochs(ranks: int, save: int, tmp_path: Path) -> None:
    results = run_ranks(ranks, _gone_back, save, 2, str(tmp_path / "saved"))
    for rank, (counts, said, _) in enumerate(results):
        assert counts == [BATCHES] * 3
        if save == 2 and rank == 0:
            assert len(said) == 2
            assert "2 batches into an epoch when this checkpoint was saved" in said[0]
            assert "accelerator.skip_first_batches(loader, 2)" in said[0]
        else:
            assert not said


@pytest.mark.filterwarnings("ignore:load_state")
def test_a_program_that_goes_back_may_leave_out_what_was_done(tmp_path: Path) -> None:
    def in_rank() -> tuple[Any, Any]:
        training = Training("shuffled")
        seen = list(training.run(save=6, folder=tmp_path / "saved"))
        training.accelerator.load_state(tmp_path / "saved")
        training.seen.clear()
        return seen[6:8], training.run(1, 2)[:2]

    for left, resumed in run_ranks(2, in_rank):
        assert resumed == left


def test_a_look_at_the_first_batch_is_no_training() -> None:
    """A loader that was only looked at takes the position: modules that take their shapes from a batch are common."""
    other, training = Training("shuffled"), Training("shuffled")
    running, look = iter(other.loader), iter(training.loader)
    next(running)
    next(look)
    look.close()
    training.loader.restore(other.loader.state_dict())
    assert len(list(training.loader)) == BATCHES - 1
