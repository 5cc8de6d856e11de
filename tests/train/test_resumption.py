"""A training that was saved in the middle of an epoch goes on as if it had never stopped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration
from trainings import Trained

EPOCHS = 3


def _run(folder: str, save_after: int | None, options: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Losses, weights and rates of a whole training; or, without `save_after`, of what is left of a saved one."""
    training = Trained.start(samples=22, batch_size=2, **options)
    if save_after is None:
        training.accelerator.load_state(folder)
    losses: list[float] = []
    while len(losses) < EPOCHS * len(training.loader):
        before = len(losses)
        for (x,) in training.loader:
            losses.append(training.batch(x))
            if len(losses) == save_after:
                training.accelerator.save_state(folder)
        if save_after is None and training.loader.state_dict()["epoch"] == EPOCHS:
            break
        assert len(losses) > before or save_after is None
    return losses, training.weights(), training.scheduler.get_last_lr()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("save_after", [1, 4, 6, 9])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_what_is_left_of_the_training_is_bit_for_bit_the_same(
    tmp_path: Path, ranks: int, save_after: int, precision: str
) -> None:
    folder = str(tmp_path / "last")
    whole = run_ranks(ranks, _run, folder, save_after, {"mixed_precision": precision})
    rest = run_ranks(ranks, _run, folder, None, {"mixed_precision": precision})
    for (losses, *end), (later, *resumed_end) in zip(whole, rest, strict=True):
        assert later == losses[save_after:]
        assert resumed_end == end


def test_what_an_optimizer_keeps_lies_in_memory_as_if_it_had_made_it_itself(tmp_path: Path) -> None:
    """Elsewhere than at multiples of 64 bytes MKL may compute other bits, on processors that are not at hand here."""
    first = Trained.start()
    first.epoch()
    first.accelerator.save_state(str(tmp_path / "last"))
    second = Trained.start()
    second.accelerator.load_state(str(tmp_path / "last"))
    kept = [value for state in second.optimizer.state.values() for value in state.values()]
    assert len(kept) == 3 * len(list(second.model.parameters()))
    assert {value.data_ptr() % 64 for value in [*kept, *second.model.parameters()]} == {0}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("save_after", [3, 6])
def test_at_the_end_of_an_accumulation_window_nothing_is_lost(tmp_path: Path, ranks: int, save_after: int) -> None:
    folder = str(tmp_path / "last")
    options = {"gradient_accumulation_steps": 3}
    whole = run_ranks(ranks, _run, folder, save_after, options)
    rest = run_ranks(ranks, _run, folder, None, options)
    for (losses, *end), (later, *resumed_end) in zip(whole, rest, strict=True):
        assert later == losses[save_after:]
        assert resumed_end == end


def _seen(folder: str, save_after: int | None) -> tuple[list[int], int]:
    """The samples that are trained on, in windows of 3 batches; those of before, once it was loaded."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(range(12), 1, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    if save_after is None:
        accelerator.load_state(folder)
    seen: list[int] = []
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x.float()[None]).sum())
            optimizer.step()
            optimizer.zero_grad()
        seen += x.tolist()
        if len(seen) == save_after:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                accelerator.save_state(folder)
            break
    return seen, accelerator._lifecycle.training().step


@pytest.mark.parametrize(("save_after", "had"), [(3, 3), (4, 3), (5, 3), (6, 6), (1, 0)])
def test_batches_of_an_open_window_are_seen_again_since_their_gradients_are_not_saved(
    tmp_path: Path, save_after: int, had: int
) -> None:
    folder = str(tmp_path / "last")
    before, step = _seen(folder, save_after)
    after, last_step = _seen(folder, None)
    assert sorted(before[:had] + after) == list(range(12))
    assert (step, last_step) == (had // 3, 4)


def test_batches_that_were_skipped_and_those_of_an_open_window_are_told_apart(tmp_path: Path) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    model, loader = accelerator.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(range(12), 1))
    for x in accelerator.skip_first_batches(loader, 3):
        with accelerator.accumulate(model):
            accelerator.backward(model(x.float()[None]).sum())
        if x.item() == 7:
            with pytest.warns(UserWarning, match=r"the gradients of its 2 batch\(es\) are not saved"):
                accelerator.save_state(tmp_path / "last")
            break
    accelerator = Accelerator(gradient_accumulation_steps=3)
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader(range(12), 1))
    accelerator.load_state(tmp_path / "last")
    assert next(iter(loader)).item() == 6


def test_a_save_inside_an_open_window_says_what_is_lost(tmp_path: Path) -> None:
    training = Trained.start(gradient_accumulation_steps=3)
    for (x,) in training.loader:
        training.batch(x)
        if not training.accelerator.sync_gradients:
            with pytest.warns(
                UserWarning, match=r"inside an accumulation window: the gradients of its [12] batch\(es\)"
            ):
                training.accelerator.save_state(tmp_path / "last")
        else:
            training.accelerator.save_state(tmp_path / "last")


def _samples(folder: str, take: int | None, seedable: bool = False) -> list[int]:
    torch.manual_seed(0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(24), 2, shuffle=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if take is None:
            accelerator.load_state(folder)
    seen: list[int] = []
    for number, x in enumerate(loader, start=1):
        seen += x.tolist()
        if number == take:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
            break
    return seen


@pytest.mark.parametrize(
    ("first", "then", "seedable"), [(2, 3, False), (3, 2, False), (1, 2, True), (2, 1, True), (3, 1, True)]
)
def test_no_sample_is_seen_twice_when_the_number_of_ranks_changes(
    tmp_path: Path, first: int, then: int, seedable: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "last")
    before = [sample for rank in run_ranks(first, _samples, folder, 2, seedable) for sample in rank]
    after = [sample for rank in run_ranks(then, _samples, folder, None, seedable) for sample in rank]
    assert "may repeat samples" not in capfd.readouterr().out
    assert len(before) == 4 * first
    assert set(before) | set(after) == set(range(24))
    filled_up = -(24 - len(before)) % (2 * then)
    assert len(before) + len(after) == 24 + filled_up


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_between_one_process_and_several_the_order_changes_and_that_is_said(
    tmp_path: Path, first: int, then: int, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "last")
    run_ranks(first, _samples, folder, 2)
    run_ranks(then, _samples, folder, None)
    said = capfd.readouterr().out
    assert said.count(f"was written by {first} process(es) and continues in {then}") == 1
    assert said.count("what is left of epoch 1 may repeat samples") == 1


class Numbers(torch.utils.data.IterableDataset[int]):
    """A stream that knows where it is."""

    def __init__(self) -> None:
        self.at = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 40:
            self.at += 1
            self.read += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize(("stop", "read"), [(4, 40), (12, 40 - 2 * (12 - 8))])
def test_a_stream_with_a_state_goes_on_by_it_from_a_few_batches_before(tmp_path: Path, stop: int, read: int) -> None:
    seen: list[int] = []
    for resumes in (False, True):
        accelerator = Accelerator()
        stream = Numbers()
        loader = accelerator.prepare(torch.utils.data.DataLoader(stream, 2))
        if resumes:
            accelerator.load_state(tmp_path / "last")
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            if not resumes and number == stop - 1:
                accelerator.save_state(tmp_path / "last")
                break
    assert seen == list(range(40))
    assert stream.read == read
    loader.load_state_dict({**loader.state_dict(), "batches": 3})  # without a state: read again from the beginning
    assert next(iter(loader)).tolist() == [6, 7]


@pytest.mark.slow
def test_with_worker_processes_the_rest_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    losses = []
    for resumes in (False, True):
        training = Trained.start(samples=24, batch_size=2)
        workers = torch.utils.data.DataLoader(training.loader.dataset, 2, shuffle=True, num_workers=1)
        accelerator = training.accelerator
        accelerator.free_memory()
        accelerator.prepare(training.model, training.optimizer, training.scheduler)
        training.loader = accelerator.prepare(workers)
        if resumes:
            accelerator.load_state(tmp_path / "last")
        mine: list[float] = []
        for (x,) in training.loader:
            mine.append(training.batch(x))
            if not resumes and len(mine) == 5:
                accelerator.save_state(tmp_path / "last")
        losses.append(mine)
    assert losses[1] == losses[0][5:]


class _Killed(Exception):
    """Stands for the end of a session."""


def _program(folder: str, save_at: tuple[int, int] | None, resumes: bool) -> tuple[float, list[Any], list[float]]:
    """A program as users write it: epochs with an evaluation each. save_at: (epoch, batch), batch -1 for its end."""
    training = Trained.start(samples=22, batch_size=2)
    accelerator = training.accelerator
    held_out = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(6, 3), 2))
    if resumes:
        accelerator.load_state(folder)
    memory = accelerator.remember(best=float("inf"), history=[])

    def save(epoch: int, batch: int) -> None:
        if (epoch, batch) == save_at:
            accelerator.save_state(folder)
            raise _Killed

    try:
        for epoch in accelerator.epochs(EPOCHS):
            for batch, (x,) in enumerate(training.loader):
                training.batch(x)
                save(epoch, batch)
            training.model.eval()
            with torch.no_grad():
                error = sum(float(training.model(x).square().mean()) for x in held_out)
            training.model.train()
            memory.history.append([epoch, error])
            memory.best = min(memory.best, error)
            save(epoch, -1)
    except _Killed:
        pass
    return memory.best, memory.history, training.weights()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("last_batch", [2, 5, -1])
@pytest.mark.parametrize("epoch", [0, 1])
def test_epochs_and_what_the_program_remembers_go_on_where_they_were(
    tmp_path: Path, ranks: int, epoch: int, last_batch: int
) -> None:
    folder = str(tmp_path / "last")
    whole = run_ranks(ranks, _program, folder, None, False)
    at = (epoch, last_batch if ranks == 2 or last_batch < 0 else 2 * last_batch)
    run_ranks(ranks, _program, folder, at, False)
    assert run_ranks(ranks, _program, folder, None, True) == whole
    assert [epoch for epoch, _ in whole[0][1]] == list(range(EPOCHS))


def test_a_second_loop_over_epochs_begins_at_the_first_one() -> None:
    accelerator = Accelerator()
    assert list(accelerator.epochs(2)) == [0, 1]
    assert list(accelerator.epochs(3)) == [0, 1, 2]


def test_a_training_that_was_over_when_it_was_saved_has_no_epoch_left(tmp_path: Path) -> None:
    first = Trained.start()
    for _ in first.accelerator.epochs(2):
        first.epoch()
    first.accelerator.save_state(tmp_path / "last")
    second = Trained.start()
    second.accelerator.load_state(tmp_path / "last")
    assert list(second.accelerator.epochs(2)) == []


def test_what_is_remembered_later_than_it_was_loaded_still_comes_from_the_checkpoint(tmp_path: Path) -> None:
    first = Trained.start()
    first.accelerator.remember(best=0.5, seen={"a": torch.ones(2)})
    first.accelerator.save_state(tmp_path / "last")
    second = Trained.start().accelerator
    second.load_state(tmp_path / "last")
    memory = second.remember(best=0.0, seen={}, patience=3)
    assert (memory.best, memory.patience) == (0.5, 3)
    assert torch.equal(memory.seen["a"], torch.ones(2))
