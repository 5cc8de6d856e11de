"""What a training tells whoever listens, by itself: losses, how far its loops have come, phases and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nbaccel import Accelerator
from nbaccel.base.events import Checkpoint, Event, Gauge, Loss, Phase, Progress, outlet
from nbaccel.testing import run_ranks


class _Listening:
    """An outlet that keeps what it hears, and looks at every gauge when it is asked to."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def look(self) -> list[Progress]:
        """What the gauges show that have something to show."""
        return [event for gauge in self.of(Gauge) if isinstance(event := gauge.read(), Progress)]


@pytest.fixture
def heard() -> Iterator[_Listening]:
    listening = _Listening()
    with outlet(listening.events.append):
        yield listening


def _training(batches: int = 4, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(**options)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(2 * batches * accelerator.num_processes, 1))
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))


def _epoch(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, after_each: Callable[[], None] = lambda: None
) -> list[float]:
    losses = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            after_each()
    return losses


@pytest.mark.parametrize("on_nan", ["warn", "skip", "stop"])
def test_every_backward_reports_its_loss_undivided_and_the_step_it_belongs_to(heard: _Listening, on_nan: str) -> None:
    losses = _epoch(*_training(4, gradient_accumulation_steps=2, on_nan=on_nan))
    assert [float(event.value) for event in heard.of(Loss)] == losses
    assert [event.step for event in heard.of(Loss)] == [0, 0, 1, 1]


def test_a_loss_that_is_kept_for_later_holds_no_graph(heard: _Listening) -> None:
    _epoch(*_training(1, on_nan="skip"))
    (loss,) = heard.of(Loss)
    assert isinstance(loss.value, torch.Tensor)
    assert not loss.value.requires_grad


def test_a_loop_shows_how_far_it_has_come_only_when_it_is_looked_at(heard: _Listening) -> None:
    training = _training(4, gradient_accumulation_steps=2)
    seen: list[Progress] = []
    _epoch(*training, after_each=lambda: seen.extend(heard.look()))
    assert [(progress.step, progress.batch, progress.batches) for progress in seen] == [
        (0, 1, 4),
        (1, 2, 4),
        (1, 3, 4),
        (2, 4, 4),
    ]
    assert all(progress.is_training and not progress.is_over for progress in seen)
    assert [progress.is_guess for progress in seen] == [True, False, False, False]
    assert {progress.samples for progress in seen} == {2}
    began = seen[0].began
    assert 0.0 < began < time.monotonic()
    assert heard.of(Progress) == [
        Progress(step=2, batch=4, batches=4, samples=2, is_over=True, began=began, learning_rates=(0.1,))
    ]
    assert heard.look() == []


def test_epochs_are_counted_and_their_number_is_known_where_the_program_says_it(heard: _Listening) -> None:
    training = _training(1)
    _epoch(*training)
    for _ in training[0].epochs(3):
        _epoch(*training)
    _epoch(*training)
    shown = [(progress.epoch, progress.epochs) for progress in heard.of(Progress)]
    assert shown == [(0, None), (0, 3), (1, 3), (2, 3), (4, None)]


def test_the_steps_behind_a_loop_are_told_with_it(heard: _Listening) -> None:
    training = _training(4)
    _epoch(*training)
    _epoch(*training)
    assert [(progress.first, progress.step) for progress in heard.of(Progress)] == [(0, 4), (4, 8)]


def test_a_loop_without_backward_is_shown_as_evaluation(heard: _Listening) -> None:
    accelerator, model, optimizer, loader = _training(2)
    evaluation = accelerator.prepare(DataLoader(TensorDataset(torch.ones(3, 1))))
    _epoch(accelerator, model, optimizer, loader)
    shown = []
    for _ in evaluation:  # a program may forget torch.no_grad
        shown += [(progress.is_training, progress.is_guess) for progress in heard.look()]
    with torch.no_grad():
        for _ in evaluation:
            shown += [(progress.is_training, progress.is_guess) for progress in heard.look()]
    assert shown == [(True, True)] + [(False, False)] * 5  # the first batch of a loop that trains looks like this too
    assert [progress.is_training for progress in heard.of(Progress)] == [True, False, False]


def test_an_evaluation_inside_a_training_loop_is_told_apart(heard: _Listening) -> None:
    accelerator, model, optimizer, loader = _training(2)
    evaluation = accelerator.prepare(DataLoader(TensorDataset(torch.ones(3, 1))))
    shown: list[list[tuple[int, bool]]] = []

    def evaluate() -> None:
        with torch.no_grad():
            for _ in evaluation:
                pass
            next(iter(evaluation))
        shown.append([(progress.batch, progress.is_training) for progress in heard.look()])

    _epoch(accelerator, model, optimizer, loader, after_each=evaluate)
    assert shown == [[(1, True)], [(2, True)]]
    assert [(progress.batch, progress.is_training) for progress in heard.of(Progress)] == [
        *[(3, False), (1, False)] * 2,
        (2, True),
    ]


def test_a_stream_has_no_total(heard: _Listening) -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from torch.ones(3, 1)

    accelerator = Accelerator()
    list(accelerator.prepare(DataLoader(Stream())))
    assert [(progress.batch, progress.batches) for progress in heard.of(Progress)] == [(3, None)]


def _progress_of_rank(**options: Any) -> list[tuple[int, int | None, int | None]]:
    listening = _Listening()
    with outlet(listening.events.append):
        _epoch(*_training(3, **options))
    return [(progress.batch, progress.batches, progress.samples) for progress in listening.of(Progress)]


def test_batches_and_samples_are_those_of_the_rank() -> None:
    assert run_ranks(2, _progress_of_rank) == [[(3, 3, 2)]] * 2
    assert run_ranks(2, lambda: _progress_of_rank(split_batches=True)) == [[(6, 6, 1)]] * 2


def test_a_resumed_epoch_counts_on_from_where_it_was(heard: _Listening) -> None:
    accelerator, model, optimizer, loader = _training(4)
    _epoch(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 3))
    assert [(progress.batch, progress.batches) for progress in heard.of(Progress)] == [(4, 4)]


def test_a_loop_that_is_left_says_so(heard: _Listening) -> None:
    *_, loader = _training(4)
    for _ in loader:
        break
    assert [(progress.batch, progress.is_over) for progress in heard.of(Progress)] == [(1, True)]


def test_a_phase_is_told_by_its_name(heard: _Listening) -> None:
    Accelerator().phase("fold 2")
    assert heard.of(Phase) == [Phase("fold 2")]


def test_a_checkpoint_is_told_with_its_place_its_step_and_what_it_took(heard: _Listening, tmp_path: Path) -> None:
    training = _training(2)
    _epoch(*training)
    folder = training[0].save_state(tmp_path / "last")
    (checkpoint,) = heard.of(Checkpoint)
    assert (checkpoint.path, checkpoint.step) == (folder, 2)
    assert 0 < checkpoint.seconds < 60
