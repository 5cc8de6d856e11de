"""Loops that prepare everything and call ``loss.backward()`` themselves: they train, and their steps are counted."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, RunStopped
from nbaccel.base.events import Event, StepEntered, outlet
from nbaccel.errors import CannotCut, NotPrepared
from nbaccel.testing import run_ranks

NOTICE = r"the loop calls loss\.backward\(\) itself"

BATCHES = 5


def _rows(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*torch.randn(count, 3, generator=generator, dtype=torch.float64).split([2, 1], dim=1))


def _model() -> Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1).double()


def _sgd(model: Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _flat(model: Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _prepared(is_shuffled: bool = False, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, **options)
    net = _model()
    loader = DataLoader(_rows(2 * BATCHES * accelerator.num_processes), 2, shuffle=is_shuffled)
    return accelerator, *accelerator.prepare(net, _sgd(net), loader)


@contextmanager
def heard() -> Iterator[list[str]]:
    """The messages that were warned of, with the file of their line."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [f"{Path(one.filename).name}: {one.message}" for one in caught]


def _steps(events: list[Event]) -> list[tuple[int, int]]:
    return [(event.step, event.substep) for event in events if isinstance(event, StepEntered)]


def _raw_epochs(is_accumulated: bool, steps: int) -> tuple[Tensor, int, list[str], list[tuple[int, int]]]:
    events: list[Event] = []
    with outlet(events.append), heard() as said:
        accelerator, model, optimizer, loader = _prepared(gradient_accumulation_steps=steps)
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model) if is_accumulated else nullcontext():
                    loss = (model(x) - y).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    return _flat(model), accelerator._context.accumulation.clock.done, said, _steps(events)


def _plain(ranks: int, batches_of_a_step: int) -> Tensor:
    """Plain PyTorch on the batches of all ranks. The gradients of a step are sums: no loss is divided."""
    model, losses = _model(), []
    optimizer = _sgd(model)
    for _ in range(2):
        for at, (x, y) in enumerate(DataLoader(_rows(2 * BATCHES * ranks), 2 * ranks)):
            losses.append((model(x) - y).square().mean())
            if len(losses) == batches_of_a_step or at + 1 == BATCHES:
                torch.stack(losses).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                losses = []
    return _flat(model)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("is_accumulated", "steps"), [(False, 1), (True, 1), (True, 2), (False, 2)])
def test_a_raw_backward_trains_as_plain_pytorch_and_its_steps_are_counted(
    ranks: int, is_accumulated: bool, steps: int
) -> None:
    window = steps if is_accumulated else 1
    of_an_epoch = -(-BATCHES // window)
    for rank, (weights, done, said, entered) in enumerate(run_ranks(ranks, _raw_epochs, is_accumulated, steps)):
        assert (weights - _plain(ranks, window)).abs().max() <= 1e-12
        assert done == 2 * of_an_epoch
        assert entered == [(step, 0) for step in range(2 * of_an_epoch)]
        assert len(said) == (rank == 0), "once in a run, by rank 0"
    first = run_ranks(1, _raw_epochs, is_accumulated, steps)[0][2][0]
    assert re.match(f"test_raw.py: {NOTICE}", first)
    assert ("gradient_accumulation_steps=2: loss.backward() does not divide the loss by 2" in first) == (steps == 2)


def _train_raw(optimizers: list[Any], model: Any, loader: Any, clear: Callable[[], Any] | None = None) -> None:
    for x, y in loader:
        (model(x) - y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        for drop in [clear] if clear else [optimizer.zero_grad for optimizer in optimizers]:
            drop()


@pytest.mark.parametrize("is_prepared", [True, False], ids=["prepared loader", "other loader"])
def test_two_optimizers_and_one_raw_backward_are_one_step(is_prepared: bool) -> None:
    accelerator = Accelerator(cpu=True)
    net = _model()
    model, one, other = accelerator.prepare(
        net, torch.optim.SGD([net.weight], lr=0.1), torch.optim.SGD([net.bias], lr=0.1)
    )
    loader: Any = DataLoader(_rows(8), 2)
    events: list[Event] = []
    with outlet(events.append), pytest.warns(UserWarning, match=NOTICE):
        _train_raw([one, other], model, accelerator.prepare(loader) if is_prepared else loader)
    assert accelerator._context.accumulation.clock.done == 4
    assert _steps(events) == [(0, 0), (1, 0), (2, 0), (3, 0)]


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_the_model_drops_are_new_ones_in_the_next_step(to_none: bool) -> None:
    accelerator, model, optimizer, loader = _prepared()
    with pytest.warns(UserWarning, match=NOTICE):
        _train_raw([optimizer], model, loader, lambda: model.zero_grad(set_to_none=to_none))
    assert accelerator._context.accumulation.clock.done == BATCHES


def test_a_second_step_with_the_same_gradients_is_no_raw_one() -> None:
    accelerator, model, optimizer, loader = _prepared()
    for x, y in loader:
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.step()
        model.zero_grad()
    assert accelerator._context.accumulation.clock.done == BATCHES


def test_a_step_without_gradients_counts_for_nothing() -> None:
    accelerator, _, optimizer, loader = _prepared()
    for _ in loader:
        optimizer.step()
    assert accelerator._context.accumulation.clock.done == 0


def test_a_closure_that_calls_backward_itself_is_counted_once_per_step() -> None:
    accelerator = Accelerator(cpu=True)
    net = _model()
    model, optimizer = accelerator.prepare(net, torch.optim.LBFGS(net.parameters(), max_iter=3))
    x, y = _rows(8).tensors

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(x) - y).square().mean()
        loss.backward()
        return loss

    with heard() as said:
        for _ in range(3):
            optimizer.step(closure)
    assert accelerator._context.accumulation.clock.done == 3
    assert len(said) == 1


def test_a_raw_backward_among_ours_is_counted_and_told() -> None:
    accelerator, model, optimizer, loader = _prepared()
    with heard() as said:
        for at, (x, y) in enumerate(loader):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss) if at % 2 else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator._context.accumulation.clock.done == BATCHES
    assert len(said) == 1


def _stopped_at_three() -> tuple[int, Tensor]:
    """A raw loop over no prepared loader; the run ends before its fourth step."""

    def stop(event: Event) -> None:
        if event == StepEntered(3, 0):
            raise RunStopped

    accelerator, model, optimizer, _ = _prepared()
    with heard(), outlet(stop), pytest.raises(RunStopped):
        _train_raw([optimizer], model, DataLoader(_rows(20), 2))
    return accelerator._context.accumulation.clock.done, _flat(model)


def test_ranks_can_be_stopped_at_the_same_step_of_a_raw_loop() -> None:
    (one, mine), (other, theirs) = run_ranks(2, _stopped_at_three)
    assert one == other == 3
    assert mine.equal(theirs)


def _unprepared_model() -> Tensor:
    accelerator = Accelerator(cpu=True)
    model = _model()
    optimizer, loader = accelerator.prepare(_sgd(model), DataLoader(_rows(8), 2))
    before = _flat(model)
    with pytest.raises(NotPrepared, match=r"every rank would train a model of its own(.|\n)*accelerator\.prepare"):
        _train_raw([optimizer], model, loader)
    return _flat(model) - before


def test_ranks_that_would_train_a_model_each_are_refused_before_a_weight_changes() -> None:
    assert all(change.abs().max() == 0 for change in run_ranks(2, _unprepared_model))


def test_an_optimizer_prepared_for_one_process_does_not_step_in_two() -> None:
    _, model, optimizer, _ = _prepared()

    def train() -> Tensor:
        before = _flat(model)
        with pytest.raises(NotPrepared, match=r"rank \d of 2: the optimizer was prepared for 1 process"):
            _train_raw([optimizer], model, DataLoader(_rows(8), 2))
        return _flat(model) - before

    assert all(change.abs().max() == 0 for change in run_ranks(2, train))


@pytest.mark.parametrize("clips", [False, True])
def test_fp16_refuses_a_loss_that_was_not_scaled_before_a_weight_changes(clips: bool) -> None:
    accelerator, model, optimizer, loader = _prepared(mixed_precision="fp16")
    before = _flat(model)
    with pytest.raises(RuntimeError, match=r"rank 0 of 1, step 0: mixed_precision='fp16'(.|\n)*accelerator\.backward"):
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert _flat(model).equal(before)


def test_fp16_takes_a_loss_that_the_program_has_scaled() -> None:
    def trained(by_hand: bool) -> Tensor:
        accelerator, model, optimizer, loader = _prepared(mixed_precision="fp16")
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            accelerator.scaler.scale(loss).backward() if by_hand else accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator._context.accumulation.clock.done == BATCHES
        return _flat(model)

    with pytest.warns(UserWarning, match=NOTICE):
        by_hand = trained(True)
    assert by_hand.equal(trained(False))


@pytest.mark.parametrize("steps", [1, 2])
def test_batches_in_parts_are_refused_before_a_weight_changes(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setenv("NBACCEL_SPLIT", "2")
    accelerator, model, optimizer, loader = _prepared(gradient_accumulation_steps=steps)
    before = _flat(model)
    with pytest.raises(CannotCut, match=r"calls loss.backward\(\) itself(.|\n)*accelerator\.backward\(loss\)"):
        for x, y in loader:
            with accelerator.accumulate(model):
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert _flat(model).equal(before)


def _with_a_scaler_of_its_own(is_prepared: bool) -> Tensor:
    """The loop as mixed precision is written by hand: its scaler calls the prepared optimizer's step."""
    accelerator = Accelerator(cpu=True)
    model, loader = _model(), DataLoader(_rows(2 * BATCHES), 2)
    optimizer, scaler = _sgd(model), torch.amp.GradScaler("cpu", init_scale=16.0)
    if is_prepared:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        scaler.scale((model(x) - y).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert accelerator._context.accumulation.clock.done == BATCHES * is_prepared
    return _flat(model)


def test_a_scaler_of_the_programs_own_steps_a_prepared_optimizer() -> None:
    with heard() as said:
        prepared = _with_a_scaler_of_its_own(True)
    assert prepared.equal(_with_a_scaler_of_its_own(False))
    assert [message.split(":")[0] for message in said] == ["test_raw.py"]


def _orders() -> list[list[float]]:
    _, model, optimizer, loader = _prepared(is_shuffled=True)
    orders = []
    with heard():
        for _ in range(3):
            orders.append([])
            for x, y in loader:
                orders[-1] += x[:, 0].tolist()
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert loader.iteration == 3
    return orders


def test_each_epoch_of_a_raw_loop_has_its_own_order() -> None:
    for orders in run_ranks(2, _orders):
        assert len({tuple(order) for order in orders}) == 3


def test_checkpoints_are_saved_by_the_steps_of_a_raw_loop(tmp_path: Path) -> None:
    accelerator, model, optimizer, loader = _prepared(checkpoint_every="2steps", checkpoint_dir=tmp_path, keep=9)
    with heard():
        _train_raw([optimizer], model, loader)
    accelerator.end_training()
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint_2", "checkpoint_4"]


def test_a_prepared_optimizer_that_was_pickled_after_raw_steps_goes_on() -> None:
    accelerator, model, optimizer, loader = _prepared()
    with heard() as said:
        _train_raw([optimizer], model, loader)
        accelerator, model, optimizer, loader = pickle.loads(pickle.dumps((accelerator, model, optimizer, loader)))
        _train_raw([optimizer], model, loader)
    assert accelerator._context.accumulation.clock.done == 2 * BATCHES
    assert len(said) == 1


def test_the_notice_stands_at_the_users_line_also_where_a_scheduler_has_wrapped_the_step() -> None:
    _, model, optimizer, loader = _prepared()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with heard() as said:
        _train_raw([optimizer], model, loader)
    assert [message.split(":")[0] for message in said] == ["test_raw.py"]
