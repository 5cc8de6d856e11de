"""Batches in parts: the same training as with whole ones, for every loop that goes through the Accelerator."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from nbaccel import Accelerator
from nbaccel.base.events import Event, LoopEntered, StepEntered, outlet
from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import CannotCut
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration
from nbaccel.train.oom.microbatch.slicing import BatchPart
from nbaccel.train.oom.split_batches import SplitWindow

SAMPLES = 37


def _rows(count: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, generator=generator), torch.arange(count) / 10


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return zip(*_rows(), strict=True)


def _indexed(batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*_rows()), batch_size, shuffle=True)


def _batches_of_their_own() -> DataLoader[Any]:
    x, y = _rows()
    return DataLoader([(x[at : at + 6 + at % 3], y[at : at + 6 + at % 3]) for at in range(0, 24, 6)], batch_size=None)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "indexed": _indexed,
    "odd": lambda: _indexed(7),
    "four batches": lambda: _indexed(12),
    "stream": lambda: DataLoader(_Stream(), 8),
    "batch_size=None": _batches_of_their_own,
}


@dataclass
class Loop:
    """One training: what is varied, and what comes of it.

    split: parts of each batch.  schedule: "prepared", "unprepared" or "by hand" (a prepared one that follows calls).
    """

    split: int = 1
    loader: str = "indexed"
    accumulate: int = 1
    is_plain: bool = False
    schedule: str = "unprepared"
    epochs: int = 2
    configuration: DataLoaderConfiguration | None = None
    precision: str = "no"

    def run(self) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in RunSettings(split=self.split).environ().items():
                patch.setenv(name, value)
            return self._train()

    def _train(self) -> dict[str, Any]:
        torch.manual_seed(0)
        accelerator = Accelerator(
            gradient_accumulation_steps=self.accumulate,
            step_scheduler_with_optimizer=self.schedule != "by hand",
            dataloader_config=self.configuration,
        )
        net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        adam = torch.optim.AdamW(net.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(net, adam, LOADERS[self.loader]())
        try:
            steps = len(loader) * self.epochs
        except TypeError:
            steps = 10
        scheduler: Any = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.1, total_iters=2 * steps)  # moves of two ranks
        if self.schedule != "unprepared":
            scheduler = accelerator.prepare(scheduler)
        rates: list[float] = []
        adam.register_step_pre_hook(lambda *_: rates.append(adam.param_groups[0]["lr"]))
        seen: list[float] = []
        bodies = 0
        for epoch in range(self.epochs):
            for x, y in loader:
                bodies += 1
                if self.is_plain:
                    self._step(accelerator, model, optimizer, scheduler, x, y)
                else:
                    with accelerator.accumulate(model):
                        self._step(accelerator, model, optimizer, scheduler, x, y)
                if epoch == 0:
                    seen += accelerator.gather_for_metrics(y).tolist()
        weights = [parameter.detach().double().flatten() for parameter in net.parameters()]
        return {"weights": torch.cat(weights), "seen": sorted(seen), "bodies": bodies, "rates": rates}

    def _step(self, accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, x: Any, y: Any) -> None:
        accelerator.backward((model(x)[:, 0] - y).square().mean())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def assert_same_training(ranks: int, whole: Loop, cut: Loop) -> list[dict[str, Any]]:
    expected, found = run_ranks(ranks, whole.run), run_ranks(ranks, cut.run)
    for one, other in zip(expected, found, strict=True):
        assert (one["weights"] - other["weights"]).abs().max() <= 1e-6
        assert other["seen"] == one["seen"]
        assert other["rates"] == one["rates"]
        assert found[0]["weights"].equal(other["weights"])
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("is_plain", [False, True], ids=["accumulate", "plain"])
@pytest.mark.parametrize("split", [2, 4])
def test_parts_train_what_whole_batches_train(ranks: int, is_plain: bool, split: int) -> None:
    found = assert_same_training(ranks, Loop(is_plain=is_plain), Loop(split, is_plain=is_plain))
    assert found[0]["seen"] == pytest.approx([at / 10 for at in range(SAMPLES)])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("loader", ["odd", "stream", "batch_size=None"])
def test_parts_train_the_same_whatever_the_loader_is(ranks: int, loader: str) -> None:
    assert_same_training(ranks, Loop(loader=loader), Loop(2, loader=loader))


@pytest.mark.parametrize(
    "configuration",
    [
        DataLoaderConfiguration(dispatch_batches=True),
        DataLoaderConfiguration(split_batches=True),
    ],
    ids=["dispatch", "split"],
)
def test_parts_train_the_same_however_batches_are_dealt(configuration: DataLoaderConfiguration) -> None:
    assert_same_training(2, Loop(configuration=configuration), Loop(2, configuration=configuration))


def test_ranks_with_batches_of_different_sizes_meet_in_every_part() -> None:
    """The last batch of rank 1 is a single sample, which is handed out as often as rank 0's parts."""
    whole = Loop(loader="four batches", configuration=DataLoaderConfiguration(even_batches=False))
    found = assert_same_training(2, whole, replace(whole, split=2))
    assert [one["bodies"] for one in found] == [8, 8]


@pytest.mark.parametrize("ranks", [1, 2])
def test_accumulate_counts_batches_and_not_parts(ranks: int) -> None:
    """The last window is short: its losses are divided by what it has, the batch that closes it included."""
    whole = Loop(accumulate=3, schedule="prepared")
    assert_same_training(ranks, whole, replace(whole, split=2))


def test_a_stream_whose_last_window_turns_out_short_is_divided_by_its_length() -> None:
    whole = Loop(accumulate=4, loader="stream", schedule="prepared")
    assert_same_training(1, whole, replace(whole, split=2))


@pytest.mark.parametrize("schedule", ["prepared", "by hand"])
def test_prepared_schedulers_move_with_the_last_part(schedule: str) -> None:
    assert_same_training(2, Loop(schedule=schedule), Loop(2, schedule=schedule))


def _prepared(split: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    monkeypatch.setenv("NBACCEL_SPLIT", str(split))
    accelerator = Accelerator(**options)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), _indexed())


def test_what_the_user_asks_for_keeps_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _, _, loader = _prepared(4, monkeypatch, gradient_accumulation_steps=3)
    assert (len(loader), accelerator.gradient_accumulation_steps, loader.total_batch_size) == (5, 3, 8)


def test_only_the_last_part_synchronises_and_enters_no_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    with outlet(events.append):
        accelerator, model, optimizer, loader = _prepared(2, monkeypatch)
        syncs = []
        for x, _ in loader:
            with accelerator.accumulate(model):
                syncs.append(accelerator.sync_gradients)
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
    assert syncs == [False, True] * 4 + [False, True]
    assert [event.step for event in events if isinstance(event, StepEntered)] == list(range(5))


def test_an_evaluation_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    training = _prepared(2, monkeypatch)
    _, model, _, loader = training
    assert len(list(loader)) == 10
    with torch.no_grad():
        assert len(list(loader)) == 5
    model.eval()
    assert len(list(loader)) == 5


def test_a_checkpoint_between_parts_has_not_seen_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer, loader = _prepared(2, monkeypatch)
    had = []
    for x, _ in loader:
        had.append(accelerator._context.prepared.loader_states(accelerator._context.accumulation.window)[0]["batches"])
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert had == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_a_loop_that_is_left_leaves_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer, loader = _prepared(2, monkeypatch)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)
    for _ in loader:
        break
    assert type(scheduler) is torch.optim.lr_scheduler.ConstantLR
    assert accelerator.sync_gradients
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()


@dataclass
class _Left:
    """A loop that is left in the middle of its second batch, or of its second window, and one over all batches.

    rounds: of the first loop's body, where batches come in two parts.
    """

    rounds: int
    accumulate: int = 1

    def run(self, split: int) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NBACCEL_SPLIT", str(split))
            torch.manual_seed(0)
            accelerator = Accelerator(gradient_accumulation_steps=self.accumulate)
            net = torch.nn.Linear(3, 1)
            model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), _indexed(4))
            for rounds in (self.rounds if split == 2 else self.rounds // 2, None):
                for x, _ in islice(loader, rounds):
                    with accelerator.accumulate(model):
                        accelerator.backward(model(x).square().mean())
                        optimizer.step()
                        optimizer.zero_grad()
            return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("left", [_Left(2), _Left(3), _Left(5, accumulate=2)])
def test_a_batch_in_whose_middle_a_loop_is_left_trains_nothing(left: _Left, ranks: int) -> None:
    """Its `zero_grad` would have come with the last part."""
    whole, cut = run_ranks(ranks, left.run, 1)[0], run_ranks(ranks, left.run, 2)[0]
    assert (whole - cut).abs().max() <= 1e-6


def _loop(accelerator: Any, model: Any, optimizer: Any, loader: Any, backward: Any, clear: Any = None) -> None:
    for x, _ in loader:
        backward(model(x).sum())
        optimizer.step()
        (clear or optimizer.zero_grad)()


def test_a_backward_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = _prepared(2, monkeypatch)
    with pytest.raises(CannotCut, match=r"samples 4 to 8 of 8(.|\n)*calls loss.backward\(\) itself(.|\n)*"):
        _loop(*training, torch.Tensor.backward)


def test_an_optimizer_that_is_not_prepared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, _, loader = _prepared(2, monkeypatch)
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(CannotCut, match=r"this Adam is not prepared, so it steps after every part"):
        _loop(accelerator, model, adam, loader, accelerator.backward)


def test_gradients_that_the_loop_drops_between_parts_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer, loader = _prepared(2, monkeypatch)
    with pytest.raises(CannotCut, match=r"the gradients of the first parts are gone(.|\n)*optimizer\.zero_grad\(\)"):
        _loop(accelerator, model, optimizer, loader, accelerator.backward, model.zero_grad)


def test_a_norm_that_is_clipped_between_parts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer, loader = _prepared(2, monkeypatch)

    def backward(loss: torch.Tensor) -> None:
        accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with pytest.raises(CannotCut, match=r"changed meanwhile(.|\n)*accelerator\.clip_grad_norm_"):
        _loop(accelerator, model, optimizer, loader, backward)


@pytest.mark.parametrize("batches", [2, 3])
def test_a_loop_that_accumulates_by_hand_is_refused(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    accelerator, model, optimizer, loader = _prepared(2, monkeypatch)
    with pytest.raises(CannotCut, match=r"decides by itself in which(.|\n)*with accelerator\.accumulate\(model\):"):
        for at, (x, _) in enumerate(loader):
            accelerator.backward(model(x).sum() / batches)
            if (at + 1) % batches == 0:
                optimizer.step()
                optimizer.zero_grad()


def test_a_loop_with_several_steps_per_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As adversarial trainings have them: the second model would learn from what the first one was."""
    accelerator, model, optimizer, loader = _prepared(2, monkeypatch)
    with pytest.raises(CannotCut, match=r"takes several steps for each batch(.|\n)*accelerator\.forward_backward\("):
        for x, _ in loader:
            for _ in range(2):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()


def test_an_optimizer_with_a_closure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBACCEL_SPLIT", "2")
    accelerator = Accelerator()
    net = torch.nn.Linear(3, 1)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.LBFGS(net.parameters()), _indexed())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 3)).square().mean()
        accelerator.backward(loss)
        return loss

    with pytest.raises(CannotCut, match=r"computes its losses itself \(a closure\)"):
        for _ in loader:
            optimizer.step(closure)


def test_several_backwards_for_one_step_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(split: int) -> torch.Tensor:
        torch.manual_seed(0)
        monkeypatch.setenv("NBACCEL_SPLIT", str(split))
        accelerator = Accelerator()
        net = torch.nn.Linear(3, 1)
        model, optimizer, loader = accelerator.prepare(net, torch.optim.Adam(net.parameters()), _indexed())
        for x, y in loader:
            accelerator.backward((model(x)[:, 0] - y).square().mean())
            accelerator.backward(model(x).abs().mean())
            optimizer.step()
            optimizer.zero_grad()
        return net.weight.detach()

    assert (trained(1) - trained(3)).abs().max() <= 1e-6


def _zipped(split: int) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBACCEL_SPLIT", str(split))
        torch.manual_seed(0)
        accelerator = Accelerator()
        net = torch.nn.Linear(3, 1)
        adam = torch.optim.Adam(net.parameters(), lr=0.1)
        model, optimizer, first, second = accelerator.prepare(net, adam, _indexed(), _indexed())
        for (x, y), (other, _) in zip(first, second, strict=True):
            loss = (model(x)[:, 0] - y).square().mean() + (model(x) - model(other).detach()).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return net.weight.detach()


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_loaders_that_are_zipped_come_in_step(ranks: int) -> None:
    whole, cut = run_ranks(ranks, _zipped, 1), run_ranks(ranks, _zipped, 2)
    for one, other in zip(whole, cut, strict=True):
        assert (one - other).abs().max() <= 1e-6
        assert cut[0].equal(other)


def test_what_was_prepared_in_the_kernel_is_cut_in_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, _, loader = _prepared(1, monkeypatch)

    def bodies() -> int:
        os.environ |= World(launch_id="a run").environ() | {"NBACCEL_SPLIT": "2"}
        with accelerator.accumulate(model):
            pass
        return len(list(loader))

    assert len(list(loader)) == 5
    assert run_ranks(1, bodies) == [10]


def _loops(events: list[Event]) -> list[LoopEntered]:
    return [event for event in events if isinstance(event, LoopEntered)]


@pytest.mark.parametrize("split", [1, 2])
def test_a_loop_says_what_there_is_to_cut(monkeypatch: pytest.MonkeyPatch, split: int) -> None:
    events: list[Event] = []
    with outlet(events.append):
        *_, loader = _prepared(split, monkeypatch, gradient_accumulation_steps=3)
        next(iter(loader))
    assert _loops(events)[0] == LoopEntered(8, split, 3, "", ["1"])


def test_a_loop_says_why_nothing_can_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    with outlet(events.append):
        *_, loader = _prepared(8, monkeypatch)
        next(iter(loader))
        with torch.no_grad():
            next(iter(loader))
        next(iter(Accelerator().prepare(_indexed())))
    said = [loop.obstacle for loop in _loops(events)]
    assert said[0] == "its batches, or the parts of them, are single samples already"
    assert "the loop does not train, and an evaluation is not cut (give its loader a smaller batch_size)" in said
    assert said[-1] == "no optimizer is prepared, so none would wait for the last part of a batch"


def test_the_loop_in_which_an_error_was_raised_is_the_last_one_that_is_told() -> None:
    """The training loop after a look at the evaluation; the evaluation where it fails itself."""

    def last_told(fails_in_evaluation: bool) -> str:
        events: list[Event] = []
        accelerator = Accelerator()
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, _indexed(), _indexed(2))
        with outlet(events.append), pytest.raises(ZeroDivisionError):
            for at, (x, _) in enumerate(loader):
                if at:
                    raise ZeroDivisionError
                accelerator.backward(model(x).sum())
                optimizer.step()
                for _ in held_out:
                    if fails_in_evaluation:
                        raise ZeroDivisionError
                    break
        return str(_loops(events)[-1].samples)

    assert (last_told(False), last_told(True)) == ("8", "2")


def test_a_repeated_part_weighs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _, _, loader = _prepared(2, monkeypatch)
    window = SplitWindow(loader, 1, accelerator._context.accumulation.rules)
    window.take(BatchPart(None, 0, 1, 1, is_first=False, is_repeated=True))
    assert window.weighed(1, in_accumulate=True) == math.inf
