"""Programs that resume by Accelerate's own recipe see every batch once, in the order of a run without a break."""

from __future__ import annotations

import itertools
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


class ShuffledStream(IterableDataset[Any]):
    """Draws its order with its first sample."""

    def __iter__(self) -> Iterator[Any]:
        yield from torch.randperm(16).float()[:, None]


class Training:
    """A training whose batches are noted: four batches in an epoch, for each rank."""

    def __init__(self, kind: str, steps: int = 1) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=steps)
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(1, 1))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        own = torch.Generator().manual_seed(7) if kind == "own generator" else None
        streams: dict[str, Any] = {"stream": Stream, "shuffled stream": ShuffledStream}
        data: Any = streams[kind]() if kind in streams else torch.arange(16.0)[:, None]
        size = 4 // self.accelerator.num_processes
        loader: Any = DataLoader(data, size, shuffle=kind not in streams, generator=own)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.seen: list[list[float]] = []

    def step(self, batch: Any) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.seen.append(batch.flatten().tolist())

    def save(self, folder: Any) -> None:
        self.accelerator.save_state(folder)
        self.accelerator.wait_for_everyone()

    def run(self, begin: int = 0, skip: int | None = None, save: Any = (), folder: Any = None) -> list[list[float]]:
        """Train from epoch `begin` on, without its first `skip` batches; save after those numbers of them all."""
        step = begin * BATCHES + (skip or 0)
        for epoch in range(begin, EPOCHS):
            is_first = epoch == begin and skip is not None
            active = self.accelerator.skip_first_batches(self.loader, skip) if is_first else self.loader
            for batch in active:
                self.step(batch)
                step += 1
                if step in save:
                    self.save(f"{folder}/{step}")
            if f"{epoch} is over" in save:
                self.save(f"{folder}/{epoch} is over")
        return self.seen

    def weights(self) -> list[float]:
        return [value.item() for value in self.accelerator.unwrap_model(self.model).parameters()]


def _resumed_by_recipe(kind: str, folder: str) -> dict[Any, tuple[Any, Any]]:
    """What was left after each save in the whole run, and what a program that resumes there sees; with weights."""
    saves = (2, 4, 8)
    whole = Training(kind)
    seen = whole.run(save=saves, folder=folder)
    found = {}
    for save, letter in itertools.product(saves, ("truth", "none is no zero", "set_epoch", "epochs are registered")):
        again = Training(kind)
        again.accelerator.load_state(f"{folder}/{save}")
        begin, skip = divmod(save, BATCHES)
        if letter == "set_epoch":
            again.loader.set_epoch(begin)
        elif letter == "epochs are registered":  # with the number of the batch in them: the last one is a whole epoch
            begin, skip = divmod(save - 1, BATCHES)
            skip += 1
            if kind == "stream":  # without a length nobody knows that it is whole
                continue
        rest = again.run(begin, skip if skip or letter != "truth" else None)
        found[save, letter] = (seen[save:], whole.weights()), (rest, again.weights())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["shuffled", "own generator", "stream"])
def test_the_recipe_trains_what_is_left(ranks: int, kind: str, tmp_path: Path) -> None:
    for found in run_ranks(ranks, _resumed_by_recipe, kind, str(tmp_path)):
        assert {case: resumed for case, (_, resumed) in found.items()} == {
            case: whole for case, (whole, _) in found.items()
        }


def _resumed_by_position(kind: str, folder: str) -> dict[Any, tuple[Any, Any]]:
    """As above, of programs that leave the position to the loader, and ask it for the epoch or name one."""
    saves = (2, 4, "0 is over")
    whole = Training(kind)
    seen = whole.run(save=saves, folder=folder)
    found = {}
    for save, letter in itertools.product(saves, ("loader.iteration", "set_epoch")):
        again = Training(kind)
        again.accelerator.load_state(f"{folder}/{save}")
        begin = again.loader.iteration
        if letter == "set_epoch" and save == 4:
            begin = 0  # the epoch that is over
        for epoch in range(begin, EPOCHS):
            if letter == "set_epoch":
                again.loader.set_epoch(epoch)
            for batch in again.loader:
                again.step(batch)
        had = save if isinstance(save, int) else BATCHES
        found[save, letter] = (seen[had:], whole.weights()), (again.seen, again.weights())
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["shuffled", "own generator", "stream"])
def test_a_loader_continues_in_the_epoch_that_it_names_and_in_the_one_that_the_program_names(
    ranks: int, kind: str, tmp_path: Path
) -> None:
    for found in run_ranks(ranks, _resumed_by_position, kind, str(tmp_path)):
        assert {case: resumed for case, (_, resumed) in found.items()} == {
            case: whole for case, (whole, _) in found.items()
        }


@pytest.mark.filterwarnings("ignore:save_state inside an accumulation window")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["shuffled", "own generator", "shuffled stream"])
def test_an_epoch_that_was_saved_in_its_first_window_has_its_order_again(ranks: int, kind: str, tmp_path: Path) -> None:
    def in_rank() -> tuple[Any, Any]:
        seen = Training(kind, 2).run(save=[5], folder=tmp_path)
        again = Training(kind, 2)
        again.accelerator.load_state(tmp_path / "5")
        return seen[4:8], again.run(1)[:4]  # the window that was open draws its dropout again

    for left, resumed in run_ranks(ranks, in_rank):
        assert resumed == left


def _gone_back(folder: str) -> list[tuple[list[int], list[str], bool]]:
    """Batches of three epochs, before the first two of which a program goes back to a save; and what was said."""
    found = []
    for save in (2, 4):
        training = Training("shuffled")
        seen = list(training.run(2, save=[2 * BATCHES + save], folder=folder))
        counts, begun = [], []
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for epoch in range(3):
                if epoch < 2:
                    training.accelerator.load_state(f"{folder}/{2 * BATCHES + save}")
                training.seen.clear()
                for batch in training.loader:
                    training.step(batch)
                begun.append(list(training.seen))
                counts.append(len(training.seen))
        texts = [str(each.message) for each in said if "load_state" in str(each.message)]
        found.append((counts, texts, begun[0] == begun[1] and (begun[0] == seen) is (save == 2)))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_that_goes_back_to_better_weights_has_whole_epochs(ranks: int, tmp_path: Path) -> None:
    results = run_ranks(ranks, _gone_back, str(tmp_path))
    for rank, (inside, at_end) in enumerate(results):
        assert inside[0] == at_end[0] == [BATCHES] * 3
        assert inside[2]
        assert at_end[2]
        assert not at_end[1]
        assert len(inside[1]) == (2 if rank == 0 else 0)
        if rank == 0:
            assert "was 2 batches into epoch 0 (0-based) when this checkpoint was saved" in inside[1][0]
            assert "accelerator.skip_first_batches(loader, 2)" in inside[1][0]


@pytest.mark.filterwarnings("ignore:load_state")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_that_goes_back_may_leave_out_what_was_done(ranks: int, tmp_path: Path) -> None:
    def in_rank() -> tuple[Any, Any]:
        training = Training("shuffled")
        seen, weights = list(training.run(save=[6], folder=tmp_path)), training.weights()
        training.accelerator.load_state(tmp_path / "6")
        training.seen.clear()
        return (seen[6:], weights), (training.run(1, 2), training.weights())

    for left, resumed in run_ranks(ranks, in_rank):
        assert resumed == left


def test_a_program_that_goes_back_inside_of_a_loop_ends_that_loop_first() -> None:
    training, other = Training("shuffled"), Training("shuffled")
    next(iter(other.loader))
    running = iter(other.loader)
    next(running)
    state = other.loader.state_dict()
    for number, batch in enumerate(training.loader):
        training.step(batch)
        if number == 1:
            with pytest.warns(UserWarning, match="was 1 batches into epoch 0"):
                training.loader.restore(state)
    assert len(training.seen) == BATCHES
    assert [len(list(training.loader)) for _ in range(2)] == [BATCHES] * 2


def test_a_program_that_names_its_epochs_goes_back_to_whole_ones(tmp_path: Path) -> None:
    """`Accelerator.epochs` saves an epoch that is over as that one, since its evaluation may be left."""
    training = Training("shuffled")
    counts = []
    for epoch in training.accelerator.epochs(4):
        before = len(training.seen)
        for number, batch in enumerate(training.loader):
            training.step(batch)
            if (epoch, number) == (1, BATCHES - 1):
                training.save(tmp_path / "best")
        counts.append(len(training.seen) - before)
        if epoch == 2:
            training.accelerator.load_state(tmp_path / "best")
    assert counts == [BATCHES] * 4


def test_a_look_at_the_first_batch_is_no_training() -> None:
    """A loader that was only looked at takes the position: modules that take their shapes from a batch are common."""
    other, training = Training("shuffled"), Training("shuffled")
    running, look = iter(other.loader), iter(training.loader)
    next(running)
    next(look)
    look.close()
    training.loader.restore(other.loader.state_dict())
    assert len(list(training.loader)) == BATCHES - 1
