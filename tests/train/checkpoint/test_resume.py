"""A training that saves itself goes on after its session ended, as if nothing had happened."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.base.events import Event, Gauge, Progress, SaveAsked, SaveDue, StepEntered, outlet
from nbaccel.base.quantities import Period, Steps
from nbaccel.base.world import World
from nbaccel.display.history import History
from nbaccel.display.summary import where
from nbaccel.errors import CannotResume, RunStopped
from nbaccel.launching.ipc.control import ControlPage, StepGate
from nbaccel.testing import run_ranks
from nbaccel.train.checkpoint.autosave import schedule
from nbaccel.train.checkpoint.directory import Timeline
from nbaccel.train.checkpoint.manifest import Manifest
from nbaccel.utils import DataLoaderConfiguration
from trainings import Trained

EPOCHS = 3


def _session(folder: str, stop_at: tuple[int, int] | None, **options: Any) -> tuple[Any, ...]:
    """A program as users write it, whose session ends before the step `stop_at` (step, substep)."""

    def stop(event: Event) -> None:
        if isinstance(event, StepEntered) and (event.step, event.substep) == stop_at:
            raise RunStopped

    with outlet(stop), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random numbers that are derived in another number of ranks
        training = Trained.start(
            samples=24, batch_size=2, checkpoint_every="4steps", checkpoint_dir=folder, resume=True, **options
        )
        accelerator = training.accelerator
        memory = accelerator.remember(best=float("inf"), history=[], losses=[])
        held_out = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(8, 3), 2))
        try:
            for epoch in accelerator.epochs(EPOCHS):
                for (x,) in training.loader:
                    memory.losses.append(training.batch(x))
                training.model.eval()
                with torch.no_grad():
                    error = sum(float(training.model(x).square().mean()) for x in held_out)
                training.model.train()
                memory.history.append([epoch, error])
                memory.best = min(memory.best, error)
        except RunStopped:
            pass
        accelerator.end_training()
    return memory.best, memory.history, memory.losses, training.weights()


# Steps 0-11 are the first epoch's of one rank, 0-5 of two; evaluations are substeps of the step after them, and the
# next epoch begins behind these.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("ranks", "stop_at"),
    [(1, (3, 0)), (1, (12, 0)), (1, (12, 2)), (1, (12, 4)), (1, (24, 1)), (2, (3, 0)), (2, (6, 1)), (2, (6, 2))],
)
def test_a_session_that_is_stopped_goes_on_where_it_was(
    tmp_path: Path, ranks: int, stop_at: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    whole = run_ranks(ranks, _session, str(tmp_path / "whole"), None)
    run_ranks(ranks, _session, str(tmp_path / "parts"), stop_at)
    resumed = run_ranks(ranks, _session, str(tmp_path / "parts"), None)
    # What rank 0 remembered is what all ranks remember.
    assert [rank[:2] for rank in resumed] == [whole[0][:2]] * ranks
    assert resumed[0] == whole[0]
    assert [rank[3] for rank in resumed] == [rank[3] for rank in whole]


def _where_it_goes_on(folder: str) -> Progress:
    """What a panel shows of a rank when a resumed session is about to take its first batch."""
    seen: list[Any] = []

    def look(event: Event) -> None:
        if isinstance(event, Gauge):
            seen.append(event.read())
        elif isinstance(event, StepEntered):
            raise RunStopped

    with outlet(look), suppress(RunStopped):
        training = Trained.start(
            samples=24, batch_size=2, checkpoint_every="4steps", checkpoint_dir=folder, resume=True
        )
        training.accelerator.prepare(torch.utils.data.DataLoader(torch.ones(8, 3), 2))
        for _ in training.accelerator.epochs(EPOCHS):
            next(iter(training.loader))
    word: Progress = seen[0]
    return word


@pytest.mark.parametrize(
    ("ranks", "stop_at", "place"),
    [(1, (15, 0), "step 15, epoch 2, batch 3/12"), (2, (8, 0), "step 8, epoch 2, batch 2/6")],
)
def test_where_a_training_goes_on_is_said_as_the_panel_counts_it(
    tmp_path: Path, ranks: int, stop_at: tuple[int, int], place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Epochs from 1, and batches of one rank."""
    run_ranks(ranks, _session, str(tmp_path), stop_at)
    capfd.readouterr()
    history = History(ranks)
    for rank, word in enumerate(run_ranks(ranks, _where_it_goes_on, str(tmp_path))):
        history.feed(rank, 1.0, word)
    assert f"continuing from {tmp_path}/checkpoint_{stop_at[0]}: {place}\n" in capfd.readouterr().out
    epoch, batch, step = where(history)[:3]
    assert f"{step}, {epoch}, {batch}" == place.replace("epoch 2", "epoch 2/3")


@pytest.mark.parametrize("stop_at", [(3, 0), (6, 1), (7, 0)])
def test_every_stop_is_a_checkpoint_of_its_step_and_the_newest_three_stay(
    tmp_path: Path, stop_at: tuple[int, int]
) -> None:
    run_ranks(2, _session, str(tmp_path), stop_at)
    steps = sorted(Manifest.read(folder).step for folder in tmp_path.iterdir())
    assert steps[-1] == stop_at[0]
    run_ranks(2, _session, str(tmp_path), None)
    assert len(os.listdir(tmp_path)) == 3


def test_a_run_that_begins_anew_in_the_same_folder_keeps_its_own_checkpoints_and_those_of_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(steps: int, **options: Any) -> None:
        training = Trained.start(samples=4 * steps, checkpoint_every=2, checkpoint_dir=tmp_path, keep=2, **options)
        training.epoch()
        training.accelerator.end_training()

    run(9)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_6", "checkpoint_8"]
    assert capsys.readouterr().out == ""
    of_first = {name: Manifest.read(tmp_path / name).run for name in os.listdir(tmp_path)}
    run(9)
    second = ["checkpoint_6_2", "checkpoint_8_2"]
    assert sorted(os.listdir(tmp_path)) == sorted([*of_first, *second])
    assert {name: Manifest.read(tmp_path / name).run for name in of_first} == of_first
    said = f"{tmp_path} holds 2 checkpoint(s) of earlier runs, left as they are; this run goes on with checkpoint_2\n"
    assert capsys.readouterr().out == said
    assert Timeline(tmp_path).choose_from(tmp_path).folder.name == "checkpoint_8_2"
    run(11, resume=True)
    assert sorted(os.listdir(tmp_path)) == sorted([*of_first, "checkpoint_10", "checkpoint_8_2"])


def test_nothing_is_saved_by_itself_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Trained.start().epoch()
    assert os.listdir(tmp_path) == []


def test_a_path_to_resume_from_is_only_read(tmp_path: Path) -> None:
    first = Trained.start(checkpoint_every=2, checkpoint_dir=tmp_path / "input")
    first.epoch()
    first.accelerator.end_training()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "input").rglob("*")}
    for place in (tmp_path / "input", tmp_path / "input" / "checkpoint_2"):
        second = Trained.start(checkpoint_every=1, checkpoint_dir=tmp_path / "output", resume=place)
        second.epoch()
        second.accelerator.end_training()
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "input").rglob("*")} == before
    assert (tmp_path / "output").is_dir()


def test_a_path_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        Trained.start(resume=tmp_path)


def test_the_first_session_of_a_program_that_always_resumes_says_that_there_is_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trained.start(checkpoint_dir=tmp_path, resume=True)
    assert f"nothing to resume in {tmp_path} yet" in capsys.readouterr().out


def _saved(folder: Path, epochs: int) -> None:
    first = Trained.start()
    for _ in first.accelerator.epochs(epochs):
        first.epoch()
    first.accelerator.save_state(folder / "checkpoint_1")


def test_a_plain_range_is_refused_with_the_two_lines_that_change(tmp_path: Path) -> None:
    _saved(tmp_path, epochs=1)
    training = Trained.start(resume=tmp_path)
    with pytest.raises(CannotResume, match=r"continues in epoch 2.*\n.*accelerator\.epochs\(n\).*\n.*remember"):
        training.epoch()


def test_a_plain_range_in_its_first_epoch_needs_no_change(tmp_path: Path) -> None:
    first = Trained.start(checkpoint_every=2, checkpoint_dir=tmp_path)
    first.epoch()
    first.accelerator.end_training()
    second = Trained.start(checkpoint_dir=tmp_path, resume=True)
    assert len(second.epoch()) == 2


def test_a_program_that_prepares_other_things_is_told_what_the_checkpoint_holds(tmp_path: Path) -> None:
    _saved(tmp_path, epochs=1)
    accelerator = Accelerator(resume=tmp_path)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    held = "1 model, 1 optimizer, 1 scheduler, 0 objects, 1 loader"
    with pytest.raises(CannotResume, match=rf"checkpoint_1 holds {held}; .* 1 model, 0 optimizers"):
        accelerator.backward(model(torch.ones(1, 1)).sum())


def test_a_folder_of_accelerates_is_to_be_loaded_by_hand(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    accelerator = Accelerator(resume=tmp_path)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(CannotResume, match=r"written by Accelerate .*accelerator\.load_state\("):
        accelerator.backward(model(torch.ones(1, 1)).sum())


def test_a_program_that_prepares_nothing_is_told_so(tmp_path: Path) -> None:
    _saved(tmp_path, epochs=1)
    accelerator = Accelerator(resume=tmp_path)
    with pytest.raises(CannotResume, match=r"nothing was prepared .* accelerator\.prepare before the first step"):
        accelerator.backward(torch.nn.Linear(1, 1)(torch.ones(1, 1)).sum())


def test_a_checkpoint_is_looked_for_and_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _saved(tmp_path, epochs=1)
    verified: list[Path] = []
    verify = Manifest.verify
    monkeypatch.setattr(Manifest, "verify", lambda self, folder: (verified.append(folder), verify(self, folder))[1])
    fresh = Trained.start()
    accelerator = Accelerator(resume=tmp_path)
    for thing in (fresh.model, fresh.optimizer.optimizer, fresh.loader.loader):
        accelerator.prepare(thing)
    assert len(verified) == 1


def test_the_state_is_restored_with_the_last_thing_that_is_prepared(tmp_path: Path) -> None:
    _saved(tmp_path, epochs=1)
    torch.manual_seed(1)
    accelerator = Accelerator(resume=tmp_path)
    fresh = Trained.start()
    model, optimizer = fresh.model, fresh.optimizer.optimizer
    before = [parameter.clone() for parameter in model.parameters()]
    accelerator.prepare(model)
    accelerator.prepare(optimizer, fresh.loader.loader)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    accelerator.prepare(torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6]))
    assert not all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_things_that_are_prepared_one_by_one_are_restored_with_the_last_of_them(tmp_path: Path) -> None:
    _saved(tmp_path, epochs=1)
    fresh = Trained.start()
    optimizer = fresh.optimizer.optimizer
    accelerator = Accelerator(resume=tmp_path)
    model = accelerator.prepare_model(fresh.model)
    accelerator.prepare_optimizer(optimizer)
    accelerator.prepare_scheduler(torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6]))
    before = fresh.weights()
    loader = accelerator.prepare_data_loader(fresh.loader.loader)
    assert fresh.weights() != before
    assert list(accelerator.epochs(1)) == []
    assert (model, loader.iteration) == (fresh.model, 1)


@pytest.mark.parametrize(("ranks", "later"), [(1, 2), (2, 1), (2, 3)])
def test_another_number_of_ranks_goes_on_at_the_same_step_and_sees_the_rest_of_the_epoch(
    tmp_path: Path, ranks: int, later: int
) -> None:
    first = run_ranks(ranks, _seen, str(tmp_path), 6 // ranks, False)
    second = run_ranks(later, _seen, str(tmp_path), None, True)
    assert sorted(sample for samples, _ in first + second for sample in samples) == list(range(36))
    assert {began for _, began in second} == {6 // ranks}


def _seen(folder: str, stop_at: int | None, resumes: bool) -> tuple[list[int], int]:
    """Samples that this rank trained on in one epoch until step `stop_at`, and the step it began with."""

    def stop(event: Event) -> None:
        if isinstance(event, StepEntered) and event.step == stop_at:
            raise RunStopped

    seen: list[int] = []
    with outlet(stop), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        accelerator = Accelerator(
            checkpoint_every=100,
            checkpoint_dir=folder,
            resume=resumes,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )
        model = torch.nn.Linear(1, 1)
        loader = torch.utils.data.DataLoader(torch.arange(36.0).reshape(-1, 1), 2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
        began = accelerator._context.accumulation.clock.step
        try:
            for x in loader:
                accelerator.backward(model(x).sum())
                optimizer.step()
                seen += [int(sample) for sample in x.flatten()]
        except RunStopped:
            pass
        accelerator.end_training()
    return seen, began


def test_the_time_is_kept_by_rank_0_and_told_one_step_ahead() -> None:
    announced: list[int] = []

    def carry(event: Event) -> None:
        if isinstance(event, SaveDue):
            announced.append(event.step)
        elif isinstance(event, SaveAsked) and event.step in announced:
            event.answer()

    with outlet(carry):
        leading = schedule(Period(1e-9), World(0, 2, 0, 2))
        following = schedule(Period(1e-9), World(1, 2, 1, 2))
        asked = [(leading.is_due(step), following.is_due(step)) for step in range(1, 6)]
    assert asked == [(False, False), (True, True), (False, False), (True, True), (False, False)]
    assert announced == [2, 4, 6][: len(announced)]


def test_a_save_that_is_announced_for_the_begin_of_an_epoch_comes_at_the_next_place_for_one() -> None:
    """Where an epoch has two steps, ranks are asked before every second one: 1, 3, 5."""
    page = ControlPage.create(2)
    gates = [StepGate(page, rank) for rank in range(2)]
    leading = schedule(Period(1e-9), World(0, 2, 0, 2))
    following = schedule(Period(1e-9), World(1, 2, 1, 2))
    due = []
    for step in (1, 3, 5, 7, 9):
        with outlet(gates[1]):  # first: what rank 0 announces now is about a later step
            first = following.is_due(step)
        with outlet(gates[0]):
            due.append((leading.is_due(step), first))
    page.close()
    assert due == [(False, False), (True, True), (False, False), (True, True), (False, False)]


def test_steps_are_counted_alike_by_every_rank() -> None:
    for rank in range(2):
        kept = schedule(Steps(3), World(rank, 2, rank, 2))
        assert [step for step in range(1, 8) if kept.is_due(step)] == [3, 6]


def test_an_interval_that_ends_with_the_epoch_is_not_skipped(tmp_path: Path) -> None:
    """Between epochs nothing is saved by itself; an interval as long as an epoch would otherwise never save."""
    training = Trained.start(checkpoint_every="4steps", checkpoint_dir=str(tmp_path))
    for _ in training.accelerator.epochs(3):
        assert len(training.epoch()) == 4
    training.accelerator.end_training()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_5", "checkpoint_9"]


def _epochs_of_one_step(folder: str, count: int, is_evaluated: bool, every_step: bool = False) -> tuple[Any, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Trained.start(
            samples=8 if every_step else 4, checkpoint_every="2steps", checkpoint_dir=folder, keep=9, resume=True
        )
    held_out = training.accelerator.prepare(torch.utils.data.DataLoader(torch.ones(8, 3), 2))
    memory = training.accelerator.remember(seen=[])
    for _ in training.accelerator.epochs(count):
        for (x,) in training.loader:
            memory.seen.append(training.batch(x))
            if every_step:
                memory.seen.append(len(list(held_out)))
        if is_evaluated:
            memory.seen.append(len(list(held_out)))
    training.accelerator.end_training()
    return memory.seen, training.weights()


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_epochs_of_one_step_are_saved_where_the_next_loop_begins_and_go_on_as_if_nothing_had_happened(
    tmp_path: Path, is_evaluated: bool
) -> None:
    whole = _epochs_of_one_step(str(tmp_path / "whole"), 7, is_evaluated)
    saved = ["checkpoint_2", "checkpoint_4", "checkpoint_6"]
    assert sorted(os.listdir(tmp_path / "whole")) == saved
    for name in saved[:2]:
        (tmp_path / name).mkdir()
        (tmp_path / "whole" / name).rename(tmp_path / name / name)
        assert _epochs_of_one_step(str(tmp_path / name), 7, is_evaluated) == whole


def test_a_step_that_is_evaluated_inside_of_its_epoch_is_saved_before_the_next(tmp_path: Path) -> None:
    whole = _epochs_of_one_step(str(tmp_path / "whole"), 3, is_evaluated=False, every_step=True)
    assert sorted(os.listdir(tmp_path / "whole")) == ["checkpoint_3", "checkpoint_5"]  # not between epochs
    (tmp_path / "whole" / "checkpoint_5").rename(tmp_path / "checkpoint_5")
    assert _epochs_of_one_step(str(tmp_path / "whole"), 3, is_evaluated=False, every_step=True) == whole


def test_a_resumed_training_waits_for_its_next_interval() -> None:
    resumed = schedule(Steps(4), World())
    assert [step for step in range(11, 22) if resumed.is_due(step)] == [12, 16, 20]
