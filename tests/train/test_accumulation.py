"""When gradients synchronise, and that a window belongs to its loader."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.errors import NotPrepared
from nbaccel.testing import run_ranks
from nbaccel.train.step.accumulation import GradientAccumulationPlugin as Rules
from peers import toolkit


def _setup(
    steps: int = 4, batches: int = 6, rules: Rules | None = None
) -> tuple[Accelerator, torch.nn.Module, Any, Any]:
    accelerator = Accelerator(gradient_accumulation_plugin=rules or Rules(num_steps=steps))
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(torch.ones(batches, 1)), batch_size=1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def _syncs(accelerator: Accelerator, model: torch.nn.Module, loader: Any, stop_after: int | None = None) -> list[bool]:
    seen = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            seen.append(accelerator.sync_gradients)
        if len(seen) == stop_after:
            break
    return seen


def test_gradients_synchronise_every_n_batches_and_at_the_end_of_the_loader() -> None:
    accelerator, model, _, loader = _setup(4, 6)
    assert _syncs(accelerator, model, loader) == [False, False, False, True, False, True]
    assert _syncs(accelerator, model, loader) == [False, False, False, True, False, True]


def test_a_window_that_is_left_continues_in_the_next_loop() -> None:
    accelerator, model, _, loader = _setup(4, 6)
    assert _syncs(accelerator, model, loader, stop_after=2) == [False, False]
    assert accelerator.sync_gradients
    assert _syncs(accelerator, model, loader) == [False, True, False, False, False, True]


def test_a_window_that_is_left_and_whose_gradients_are_cleared_is_over() -> None:
    accelerator, model, optimizer, loader = _setup(4, 6)
    assert _syncs(accelerator, model, loader, stop_after=2) == [False, False]
    optimizer.zero_grad()
    assert _syncs(accelerator, model, loader)[:4] == [False, False, False, True]


def _left(way: str, ranks_part: bool = False) -> list[float]:
    """By how much each step moves a weight: three epochs of six batches, left in a window, whose gradients are 1."""
    accelerator, model, optimizer, loader = _setup(4, 16 * 2)
    other = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    part = accelerator.process_index * 2.0 if ranks_part else 1.0
    weight = accelerator.unwrap_model(model).weight
    moved: list[float] = []

    def step(batch: Any) -> None:
        before = weight.item()
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean() * part)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            moved.append(before - weight.item())
        if way == "another model":
            with accelerator.accumulate(other):
                accelerator.backward(other(batch).mean())

    for _ in range(3):
        if way == "islice":
            for (batch,) in itertools.islice(loader, 6):
                step(batch)
        elif way == "zip":
            for _, (batch,) in zip(range(6), loader):  # noqa: B905  # the loader is left
                step(batch)
        elif way == "next":
            held = iter(loader)
            for _ in range(6):
                step(next(held)[0])
        elif way == "evaluation":
            for number, (batch,) in enumerate(loader):
                if number == 6:
                    break
                step(batch)
            with torch.no_grad():
                list(loader)
        elif way == "no loader":
            for number, (batch,) in enumerate(loader):
                if number == 6:
                    break
                step(batch)
            for _ in range(3):
                step(torch.ones(1, 1))
        else:
            with contextlib.suppress(ZeroDivisionError):
                for number, (batch,) in enumerate(loader):
                    if number == 6:
                        raise ZeroDivisionError
                    step(batch)
    return moved


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", ["islice", "zip", "next", "evaluation", "no loader", "exception", "another model"])
def test_every_step_has_the_gradients_of_its_own_window(ranks: int, way: str) -> None:
    for moved in run_ranks(ranks, _left, way):
        assert moved == pytest.approx([1.0] * (6 if way == "no loader" else 4), abs=1e-6)


def test_gradients_of_a_window_that_was_left_are_averaged_too() -> None:
    """Rank 0 has gradients of 0 and rank 1 of 2: a step moves by their mean."""
    for moved in run_ranks(2, _left, "exception", True):
        assert moved == pytest.approx([1.0] * 4, abs=1e-6)


@pytest.mark.parametrize("own_part", [False, True])
def test_a_step_after_a_window_that_was_left_is_refused_where_ranks_differ(own_part: bool) -> None:
    def in_rank() -> str:
        accelerator, model, optimizer, loader = _setup(4, 12)
        for number, (batch,) in enumerate(loader):
            if number == 2:
                break
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean() * (1 + own_part * accelerator.process_index))
                optimizer.step()
                optimizer.zero_grad()
        try:
            optimizer.step()
        except NotPrepared as error:
            return str(error)
        return ""

    for said in run_ranks(2, in_rank):
        assert ("in a window" in said or "of a window" in said) == own_part
        assert ("optimizer.zero_grad()" in said) == own_part


def test_an_iterator_that_is_still_held_does_not_disturb_the_next_loop() -> None:
    accelerator, model, _, loader = _setup(4, 6)
    held = iter(loader)
    next(held)
    with accelerator.accumulate(model):
        pass
    assert _syncs(accelerator, model, loader) == [False, False, False, True, False, True]
    del held


def test_an_evaluation_inside_a_window_does_not_disturb_it() -> None:
    accelerator, model, _, loader = _setup(2, 4)
    evaluation = accelerator.prepare(DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=1))
    seen = []
    for _ in loader:
        with accelerator.accumulate(model):
            assert len(list(evaluation)) == 3
            seen.append(accelerator.sync_gradients)
    assert seen == [False, True, False, True]


def test_optimizer_and_scheduler_do_nothing_inside_a_window() -> None:
    accelerator, model, optimizer, loader = _setup(4, 4)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5))
    with torch.no_grad():
        model.weight.fill_(3.0)
    weights, rates = [], []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
        rates.append(scheduler.get_last_lr()[0])
    assert weights == [3.0, 3.0, 3.0, 2.0]
    assert rates == [1.0, 1.0, 1.0, 0.5]


def test_the_number_of_steps_may_change_between_windows() -> None:
    accelerator, model, _, loader = _setup(2, 6)
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_accumulation_steps == 3
    assert _syncs(accelerator, model, loader) == [False, False, True, False, False, True]


def test_zero_steps_are_refused() -> None:
    accelerator = Accelerator()
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be at least 1, got 0"):
        accelerator.gradient_accumulation_steps = 0


def test_a_second_accelerator_does_not_reset_the_first() -> None:
    accelerator, model, _, loader = _setup(3, 3)
    Accelerator(gradient_accumulation_steps=1)
    assert _syncs(accelerator, model, loader) == [False, False, True]


def test_a_plain_loop_accumulates_too() -> None:
    accelerator, model, _, _ = _setup(2, 1)
    assert _syncs(accelerator, model, [(torch.ones(1, 1),)] * 4) == [False, True, False, True]
    assert model.weight.grad.item() == pytest.approx(2.0)  # two windows of two halves


def test_accelerate_divides_by_n_outside_of_accumulate_and_so_do_we() -> None:
    accelerator, model, _, _ = _setup(4, 1)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == pytest.approx(0.25)


def test_an_exception_inside_accumulate_leaves_the_next_block_clean() -> None:
    accelerator, model, _, loader = _setup(4, 6)
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            with accelerator.accumulate(model):
                raise ZeroDivisionError
    assert accelerator._context.accumulation.depth == 0
    assert _syncs(accelerator, model, loader) == [False, False, False, True, False, True]


def test_plugin_and_number_together_are_refused() -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2 and a gradient_accumulation_plugin with"):
        Accelerator(gradient_accumulation_steps=2, gradient_accumulation_plugin=Rules(num_steps=3))


def test_the_plugin_brings_the_number_or_leaves_it_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "5")
    assert Accelerator(gradient_accumulation_plugin=Rules(num_steps=3)).gradient_accumulation_steps == 3
    assert Accelerator(gradient_accumulation_plugin=Rules()).gradient_accumulation_steps == 5
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        Rules(num_steps=0)


def _program(name: str, batches: int = 5, steps: int = 4, **rules: bool) -> tuple[list[bool], list[float], float]:
    """Two epochs in the spelling of both toolkits: where gradients synchronise, those gradients, the weight."""
    torch.manual_seed(0)
    tools = toolkit(name)
    accelerator = tools.Accelerator(
        cpu=True, gradient_accumulation_plugin=tools.GradientAccumulationPlugin(num_steps=steps, **rules)
    )
    model = torch.nn.Linear(1, 1, bias=False)
    ranks = accelerator.num_processes
    data = torch.arange(1.0, 1 + batches * ranks)[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(data), batch_size=1))
    syncs, gradients = [], []
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().sum())
                syncs.append(accelerator.sync_gradients)
                if accelerator.sync_gradients:
                    gradients.append(next(model.parameters()).grad.item())
                optimizer.step()
                optimizer.zero_grad()
    return syncs, gradients, next(model.parameters()).item()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "rules", [{}, {"sync_with_dataloader": False}, {"sync_each_batch": True}], ids=["plain", "endless", "each"]
)
def test_without_scaling_of_the_last_window_the_numbers_are_accelerates(ranks: int, rules: dict[str, bool]) -> None:
    theirs = run_ranks(ranks, lambda: _program("accelerate", **rules))
    ours = run_ranks(ranks, lambda: _program("nbaccel", scale_last_window=False, **rules))
    assert ours == theirs


def test_the_last_window_is_divided_by_its_length_unless_that_is_switched_off() -> None:
    assert _ones("scaled")[1] == [1.0, 1.0]
    assert _ones("as accelerate", scale_last_window=False)[1] == [1.0, 0.25]


def _ones(_: str, **rules: bool) -> tuple[list[bool], list[float]]:
    accelerator = Accelerator(gradient_accumulation_plugin=Rules(num_steps=4, **rules))
    model = torch.nn.Linear(1, 1, bias=False)
    loader = DataLoader(TensorDataset(torch.ones(5, 1)), batch_size=1)
    model, loader = accelerator.prepare(model, loader)
    syncs, gradients = [], []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            syncs.append(accelerator.sync_gradients)
            if accelerator.sync_gradients:
                gradients.append(model.weight.grad.item())
                model.weight.grad = None
    return syncs, gradients


def test_windows_may_run_on_into_the_next_epoch() -> None:
    accelerator, model, _, loader = _setup(4, 6, Rules(num_steps=4, sync_with_dataloader=False))
    assert _syncs(accelerator, model, loader) == [False, False, False, True, False, False]
    assert _syncs(accelerator, model, loader) == [False, True, False, False, False, True]
    assert _syncs(accelerator, model, loader, stop_after=3) == [False, False, False]
    assert _syncs(accelerator, model, loader, stop_after=1) == [True]


def test_an_accelerator_whose_windows_run_on_can_be_pickled() -> None:
    accelerator, model, _, loader = _setup(4, 6, Rules(num_steps=4, sync_with_dataloader=False))
    _syncs(accelerator, model, loader)
    accelerator, model, loader = pickle.loads(pickle.dumps((accelerator, model, loader)))
    assert _syncs(accelerator, model, loader) == [False, True, False, False, False, True]


def _gradient_inside_a_window(sync_each_batch: bool) -> float:
    accelerator = Accelerator(
        gradient_accumulation_plugin=Rules(num_steps=2, sync_each_batch=sync_each_batch), kwargs_handlers=[]
    )
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 1), 2.0 * accelerator.process_index)).sum())
        assert not accelerator.sync_gradients
    return model.module.weight.grad.item()


def test_gradients_may_be_exchanged_at_every_batch() -> None:
    assert run_ranks(2, _gradient_inside_a_window, False) == [0.0, 1.0]
    assert run_ranks(2, _gradient_inside_a_window, True) == [0.5, 0.5]


def _late_backwards() -> tuple[float, float]:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    with accelerator.no_sync(model):
        losses = [model(torch.full((1, 1), float(accelerator.process_index + step))).sum() for step in range(3)]
        for loss in losses[:2]:
            accelerator.backward(loss)
    alone = model.module.weight.grad.item()
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[2])
    return alone, model.module.weight.grad.item()


def test_a_backward_can_be_told_to_synchronise_what_no_sync_held_back() -> None:
    assert run_ranks(2, _late_backwards) == [(1.0, 4.5), (3.0, 4.5)]


def test_synchronising_later_means_nothing_in_one_process() -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 1.0


@settings(max_examples=40, deadline=None)
@given(data=st.lists(st.integers(-9, 9), min_size=1, max_size=12), steps=st.integers(1, 5), is_sized=st.booleans())
def test_every_window_has_the_mean_gradient_of_its_batches(data: list[int], steps: int, is_sized: bool) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = torch.nn.Linear(1, 1, bias=False)
    dataset: Any = TensorDataset(torch.tensor(data, dtype=torch.float32)[:, None])
    if not is_sized:
        dataset = Stream(dataset)
    model, loader = accelerator.prepare(model, DataLoader(dataset, batch_size=1))
    gradients = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[0]).sum())
            if accelerator.sync_gradients:
                gradients.append(model.weight.grad.item())
                model.weight.grad = None
    windows = [data[start : start + steps] for start in range(0, len(data), steps)]
    assert gradients == pytest.approx([sum(window) / len(window) for window in windows], abs=1e-5)


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_windows_have_their_mean_where_a_loader_has_more_batches_than_it_said(steps: int) -> None:
    class Understated(Stream):
        def __len__(self) -> int:
            return 3

    accelerator, model, optimizer, _ = _setup(steps)
    loader = accelerator.prepare(DataLoader(Understated(torch.ones(8, 1)), batch_size=1))
    before, updates = model.weight.item(), 0
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            updates += accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
    assert before - model.weight.item() == pytest.approx(updates)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def _by_sums(is_sized: bool, scales: bool, steps: int = 3, batches: int = 7) -> float:
    """Return how far a training is from one process that sees whole windows.

    The program divides its sums by what its window holds, and takes the division of `backward` back.
    """
    accelerator = Accelerator(gradient_accumulation_plugin=Rules(steps, scale_last_window=scales))
    ranks, data = accelerator.num_processes, torch.Generator().manual_seed(0)
    x = torch.randn(2 * accelerator.num_processes * batches, 3, generator=data, dtype=torch.float64)
    weights = torch.arange(1.0, len(x) + 1, dtype=torch.float64)
    model, plain = (torch.nn.Linear(3, 1, bias=False, dtype=torch.float64) for _ in range(2))
    for start in (model, plain):
        torch.nn.init.ones_(start.weight)
    rows = TensorDataset(x, weights)
    loader: Any = DataLoader(rows if is_sized else _Streamed(rows), 2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    reference, done = torch.optim.SGD(plain.parameters(), 0.01), 0
    for number, (part, weight) in enumerate(loader):
        window = slice(done, min(done + steps * 2 * ranks, len(x)))
        with accelerator.accumulate(model):
            loss = (model(part)[:, 0].square() * weight).sum() / weights[window].sum()
            accelerator.backward(loss * accelerator.gradient_accumulation_steps * ranks)
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.gradient_accumulation_steps == steps
        if (number + 1) % steps == 0 or number + 1 == batches:
            done = window.stop
            ((plain(x[window])[:, 0].square() * weights[window]).sum() / weights[window].sum()).backward()
            reference.step()
            reference.zero_grad()
    return float((accelerator.unwrap_model(model).weight - plain.weight).detach().abs().max())


class _Streamed(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[number] for number in range(len(self.rows)))


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("is_sized", [True, False])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_program_can_take_the_division_of_a_short_last_window_back(ranks: int, is_sized: bool, scales: bool) -> None:
    assert max(run_ranks(ranks, _by_sums, is_sized, scales)) < 1e-12


def test_a_window_that_was_not_read_keeps_the_mean_of_its_batches_beside_one_that_was() -> None:
    accelerator, model, _, _ = _setup(steps=4)
    loader = accelerator.prepare(DataLoader(_Streamed(TensorDataset(torch.ones(5, 1)))))
    for number, (x,) in enumerate(loader):
        with accelerator.accumulate(model):
            if number < 4:
                assert accelerator.gradient_accumulation_steps == 4
            accelerator.backward(model(x).sum())
        if accelerator.sync_gradients:
            assert model.weight.grad.item() == 1
            model.zero_grad()
