"""What enters a loss from outside of its batch is the same in all ranks, or the loop does not train on parts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel.base.settings import STATES, RunSettings
from nbaccel.base.world import World
from nbaccel.errors import NotPrepared
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.raw_loop.outside_values import OutsideUses, OutsideValue, of_parts, tensors_in

ROWS = 16
STEPS = 12

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of what the model makes of the inputs, of the targets, and of the samples' numbers."""


def _data() -> TensorDataset:
    x = torch.randn(ROWS * 6, 5, generator=torch.Generator().manual_seed(1)) + torch.arange(ROWS * 6)[:, None] % 16 / 8
    return TensorDataset(x, x.sum(1).sin(), torch.arange(len(x)))


def _fit(loss_of: Loss, model: nn.Module | None = None, epochs: int = 2) -> list[float]:
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Linear(5, 1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(epochs):
        for x, t, index in DataLoader(_data(), batch_size=ROWS, shuffle=True):
            loss = loss_of(model(x).squeeze(1), t, index)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [each for parameter in model.parameters() for each in parameter.flatten().tolist()]


# States that a loop makes of its batches ------------------------------------------------------------------------------


def moving_baseline() -> list[float]:
    baseline = 0.0

    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        nonlocal baseline
        each = (t - baseline) * out
        baseline = 0.9 * baseline + 0.1 * (t * 3).mean().item()
        return each.mean() + out.square().mean()

    return _fit(loss)


class _Normalises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(5, 1), torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x - self.mean)
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return out


def attribute_of_a_module() -> list[float]:
    return _fit(lambda out, t, index: F.mse_loss(out, t), _Normalises())


def bank_of_predictions() -> list[float]:
    bank = torch.zeros(ROWS * 6)

    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        each = F.mse_loss(out, t) + F.mse_loss(out, bank[index])
        bank[index] = out.detach()
        return each

    return _fit(loss)


def list_of_weights() -> list[float]:
    weights = [1.0, 1.0]

    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        kinds = (t > 0).long()
        each = (out - t).square()
        loss = (torch.tensor(weights)[kinds] * each).mean()
        for kind in range(2):
            if bool((kinds == kind).any()):
                weights[kind] = 0.7 * weights[kind] + 0.3 * each[kinds == kind].mean().item()
        return loss

    return _fit(loss)


def running_limit() -> list[float]:
    limit = None

    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        nonlocal limit
        each = (out - t).square()
        loss = each.clamp(max=1e9 if limit is None else 1.1 * limit).mean()
        mean = each.detach().mean().item()
        limit = mean if limit is None else 0.8 * limit + 0.2 * mean
        return loss

    return _fit(loss)


def loss_over_its_average() -> list[float]:
    average = 1.0

    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        nonlocal average
        each = F.mse_loss(out, t)
        loss = each / average
        average = 0.5 * average + 0.5 * each.detach().item()
        return loss

    return _fit(loss)


def counts_by_numpy() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        kinds = (t > 0).long()
        counts = torch.from_numpy(np.bincount(kinds.numpy(), minlength=2) + 1)
        return ((out - t).square() / counts[kinds]).mean()

    return _fit(loss)


def counts_that_were_numbers() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        kinds = (t > 0).long()
        counts = torch.tensor([1 + int((kinds == kind).sum()) for kind in range(2)])
        return ((out - t).square() / counts[kinds]).mean()

    return _fit(loss)


def times_a_count() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        count = int((t > 0.2).sum())
        return ((out - t).square() * count).mean()

    return _fit(loss)


def over_their_counts() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        high = t > -0.2
        count, each = high.sum().item(), (out - t).square()
        return (each * high / count).sum() + (each * ~high / (len(t) - count + 1)).sum()

    return _fit(loss)


def over_a_limit_by_numpy() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        limit = int(np.median(index.numpy()))
        return (out - t).square()[index > limit].sum() / ROWS

    return _fit(loss)


def each_over_the_number_of_samples() -> list[float]:
    return _fit(lambda out, t, index: ((out - t).square() / len(t)).sum())


def memory_after_some_steps() -> list[float]:
    memory: list[Tensor] = []

    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        each = F.mse_loss(out, t)
        if len(memory) > 3:
            each = each + 0.1 * (out[:, None] - torch.cat(memory[-4:])).square().mean()
        memory.append(out.detach()[:3])
        return each

    return _fit(loss)


def memory_that_is_written_before_it_is_used() -> list[float]:
    memory = torch.zeros(64)

    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        high = out.detach()[t > 0]
        memory[: len(high)] = high
        return F.mse_loss(out, t) + 0.1 * (out[:, None] - memory).square().mean()

    return _fit(loss)


def _fit_on_two(
    other: Callable[[], Iterator[Any]] | None, step: Callable[[nn.Module, Any, Any], Tensor], rounds: int = 16
) -> list[float]:
    """Train by losses of two batches each, the second one of `other`, or of the same loader."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = _forever(DataLoader(_data(), batch_size=ROWS, shuffle=True))
    others = batches if other is None else other()
    for _ in range(rounds):
        optimizer.zero_grad()
        step(model, batches, others).backward()
        optimizer.step()
    return [each for parameter in model.parameters() for each in parameter.flatten().tolist()]


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class _Baseline:
    """A running mean of the first of two batches, used before the second one is taken."""

    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, model: nn.Module, batches: Any, others: Any) -> Tensor:
        x, t, _ = next(batches)
        first = F.mse_loss(model(x).squeeze(1) - self.mean, t)
        self.mean = 0.9 * self.mean + 0.1 * x.mean().item()
        x, t, _ = next(others)
        return first + F.mse_loss(model(x).squeeze(1), t)


def mean_of_the_first_of_two_batches() -> list[float]:
    return _fit_on_two(None, _Baseline())


def mean_of_the_first_of_two_loaders() -> list[float]:
    return _fit_on_two(lambda: _forever(DataLoader(_data(), batch_size=8)), _Baseline())


def mean_of_the_first_of_unequal_loaders() -> list[float]:
    short = TensorDataset(*(tensor[:40] for tensor in _data().tensors))
    return _fit_on_two(lambda: _forever(DataLoader(short, batch_size=8, shuffle=True)), _Baseline())


def mean_of_the_first_beside_a_new_iterator_each_time() -> list[float]:
    loader = DataLoader(_data(), batch_size=8, shuffle=True)
    return _fit_on_two(lambda: (next(iter(loader)) for _ in range(16)), _Baseline())


def mean_of_a_batch_by_two_losses() -> list[float]:
    torch.manual_seed(0)
    maker, judge, mean = nn.Linear(3, 5), nn.Linear(5, 1), 0.0
    of_maker, of_judge = torch.optim.SGD(maker.parameters(), lr=0.1), torch.optim.SGD(judge.parameters(), lr=0.1)
    for _ in range(2):
        for x, *_ in DataLoader(_data(), batch_size=ROWS):
            of_judge.zero_grad()
            (F.softplus(-judge(x)).mean() + F.softplus(judge(maker(x[:, :3]).detach())).mean()).backward()
            of_judge.step()
            of_maker.zero_grad()
            (F.softplus(-judge(maker(x[:, :3]))) + mean).mean().mul(1 + 0.1 * mean).backward()
            of_maker.step()
            mean = 0.9 * mean + 0.1 * x.mean().item()
    return [each for model in (maker, judge) for p in model.parameters() for each in p.flatten().tolist()]


STATEFUL = [
    moving_baseline, attribute_of_a_module, bank_of_predictions, list_of_weights, running_limit, loss_over_its_average,
    counts_by_numpy, counts_that_were_numbers, times_a_count, over_their_counts, over_a_limit_by_numpy,
    each_over_the_number_of_samples, memory_after_some_steps, memory_that_is_written_before_it_is_used,
    mean_of_the_first_of_two_batches,
    mean_of_the_first_of_two_loaders, mean_of_the_first_of_unequal_loaders,
    mean_of_the_first_beside_a_new_iterator_each_time, mean_of_a_batch_by_two_losses,
]  # fmt: skip


# Samples that a loop collects -----------------------------------------------------------------------------------------


def _collect() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer, xs, ts = torch.optim.SGD(model.parameters(), lr=0.05), [], []
    for x, t, _ in DataLoader(_data(), batch_size=ROWS):
        optimizer.zero_grad()
        F.mse_loss(model(x).squeeze(1), t).backward()
        optimizer.step()
        xs.append(x[:2])
        ts.append(t[:2])
    return model, optimizer, torch.cat(xs), torch.cat(ts)


def _go_on(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> list[float]:
    for x, t in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x).squeeze(1), t).backward()
        optimizer.step()
    return [each for parameter in model.parameters() for each in parameter.flatten().tolist()]


def collected_samples() -> list[float]:
    model, optimizer, xs, ts = _collect()
    return _go_on(model, optimizer, [(xs, ts)] * 3)


def loader_of_collected_samples() -> list[float]:
    model, optimizer, xs, ts = _collect()
    return _go_on(model, optimizer, DataLoader(TensorDataset(xs, ts), batch_size=4))


def hardest_of_collected_samples() -> list[float]:
    model, optimizer, xs, ts = _collect()
    hardest = (model(xs).squeeze(1) - ts).abs().topk(4).indices
    return _go_on(model, optimizer, [(xs[hardest], ts[hardest])])


def labels_of_a_model() -> list[float]:
    model, optimizer, xs, _ = _collect()
    labels = model(xs).detach().squeeze(1).round()
    return _go_on(model, optimizer, [(xs, labels)])


COLLECTING = [collected_samples, loader_of_collected_samples, hardest_of_collected_samples, labels_of_a_model]


# What only looks like it ----------------------------------------------------------------------------------------------


def mixed_by_random() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        share = random.betavariate(2.0, 2.0)
        return share * F.mse_loss(out, t) + (1 - share) * F.mse_loss(out, 0.3 * t)

    return _fit(loss)


def share_of_the_samples() -> list[float]:
    return _fit(lambda out, t, index: (out - t).square().mean() * (len(t) / 96))


def tables_by_sample() -> list[float]:
    table = torch.linspace(0.5, 1.5, ROWS * 6)

    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        weights = torch.tensor([int(each) for each in index]) / 96 + 0.5
        return (table[index] * weights * (out - t).square()).mean()

    return _fit(loss)


def average_of_the_whole_loss() -> list[float]:
    torch.manual_seed(0)
    model, average = nn.Linear(5, 1), 1.0
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.05), 0.0
    scratch, right = torch.zeros(64), 0.0
    for _ in range(2):
        for x, t, _ in DataLoader(_data(), batch_size=ROWS):
            scratch[: len(t)].copy_(t)
            loss = (1 + 0.1 * average) * F.mse_loss(model(x).squeeze(1), scratch[: len(t)].clone())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average = 0.9 * average + 0.1 * loss.item()
            right += (model(x).squeeze(1) - t).abs().mean().item()  # which is printed, and of a part
            seen += len(t)
    assert math.isfinite(right / seen)
    return [each for parameter in model.parameters() for each in parameter.flatten().tolist()]


def sizes_of_the_part() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        size = torch.tensor([len(t), 2 * len(t)])
        return (out - t * (size[1] / size[0])).square().mean()

    return _fit(loss)


def counts_beside_it() -> list[float]:
    right = 0

    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        nonlocal right
        right += int(((out > 0) == (t > 0)).sum()) + sum(index.tolist())
        longest = int(index.max()) + 1
        mask = (torch.arange(longest) == index[:, None]) * 2
        positive = t > -0.9
        each = (out - t).square() * mask.sum(1) / 3
        return each.mean() * (len(t) / 96) + each[positive].sum() / float(positive.sum())

    return _fit(loss)


def a_number_for_each_sample() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        pairs = torch.stack([out - t, out * t], 1)
        each = [pairs[at] / (1 + number % 5) * (0.3 + number % 7) for at, number in enumerate(index.tolist())]
        return torch.stack(each).square().mean()

    return _fit(loss, epochs=3)


def fetched_ahead() -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def ahead() -> Iterator[Any]:
        held = None
        for x, t, _ in DataLoader(_data(), batch_size=ROWS):
            if held is not None:
                yield held
            held = x * 1.0, t
        yield held

    for _ in range(3):
        for x, t in ahead():
            optimizer.zero_grad()
            F.mse_loss(model(x).squeeze(1), t).backward()
            optimizer.step()
    return [each for parameter in model.parameters() for each in parameter.flatten().tolist()]


def two_batches_for_each_loss() -> list[float]:
    def step(model: nn.Module, batches: Any, others: Any) -> Tensor:
        (x, t, _), (x2, t2, _) = next(batches), next(others)
        return F.mse_loss(model(x).squeeze(1), t) + 0.5 * F.mse_loss(model(x2).squeeze(1), t2)

    return _fit_on_two(None, step)


STATELESS = [
    mixed_by_random,
    share_of_the_samples,
    tables_by_sample,
    average_of_the_whole_loss,
    sizes_of_the_part,
    counts_beside_it,
    a_number_for_each_sample,
    fetched_ahead,
    two_batches_for_each_loss,
]


def _in_a_rank(program: Callable[[], list[float]]) -> tuple[Any, str, bool]:
    torch.set_default_dtype(torch.float64)
    training = RawLoopTraining(World.from_env(), RunSettings())
    training.begin(None)
    found: Any
    try:
        found = program()
        training.end()
    except NotPrepared as error:
        found = str(error)
        training.stop()
    finally:
        how = training.fails_on_parts
        training.stop()
    return found, how, training.has_split


def _in_one_process(program: Callable[[], list[float]]) -> list[float]:
    torch.set_default_dtype(torch.float64)
    try:
        return program()
    finally:
        torch.set_default_dtype(torch.float32)


def _cases(programs: list[Callable[[], list[float]]]) -> Iterator[Any]:
    for at, program in enumerate(programs):
        for world_size in (2, 3):
            is_for_two = "mean_of_the_first" in program.__name__
            marks = [] if (at == 0 or is_for_two) and world_size == 2 else [pytest.mark.full]
            yield pytest.param(program, world_size, marks=marks, id=f"{program.__name__}-{world_size}")


@pytest.mark.parametrize(("program", "world_size"), [*_cases(STATEFUL)])
def test_a_state_that_each_rank_makes_of_its_parts_ends_before_it_is_trained_on(
    program: Callable[[], list[float]], world_size: int
) -> None:
    for found, how, _ in run_ranks(world_size, _in_a_rank, program):
        assert "which the loop makes of its batches, and these were split" in found
        assert "rank 0: " in found
        assert "the step was not taken" in found
        assert how == STATES


def rare_positives() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        positive = (t > 0.9).to(out)
        return F.binary_cross_entropy_with_logits(out, positive, reduction="sum") / positive.sum().clamp(min=1)

    return _fit(loss)


def rare_positives_as_a_number() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        positive = (t > 0.9).to(out)
        each = F.binary_cross_entropy_with_logits(out, positive, reduction="none")
        return each.sum() / max(1, int(positive.sum().item()))

    return _fit(loss)


def rare_positives_with_a_factor() -> list[float]:
    def loss(out: Tensor, t: Tensor, index: Tensor) -> Tensor:
        positive = (t > 0.9).to(out)
        return 0.3 * F.binary_cross_entropy_with_logits(out, positive, reduction="sum") / positive.sum().clamp(min=1)

    return _fit(loss)


@pytest.mark.parametrize("program", [rare_positives, rare_positives_as_a_number, rare_positives_with_a_factor])
def test_a_least_count_by_which_a_loss_is_divided_ends_before_it_is_trained_on(
    program: Callable[[], list[float]],
) -> None:
    for found, how, _ in run_ranks(3, _in_a_rank, program):
        assert "the loss is divided by a count, which is 1 in a part of this batch" in found
        assert how == STATES


def _fit_in_order(least: Callable[[Tensor], Any]) -> list[float]:
    """Train on parts of which one has a single positive, and none has none."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for x, _, index in DataLoader(_data(), batch_size=ROWS):
            positive = torch.isin(index % ROWS, torch.tensor([1, 9, 12, 13])).to(x)
            optimizer.zero_grad()
            losses = F.binary_cross_entropy_with_logits(model(x).squeeze(1), positive, reduction="none")
            (losses.sum() / least(positive.sum())).backward()
            optimizer.step()
    return [each for parameter in model.parameters() for each in parameter.flatten().tolist()]


def one_positive() -> list[float]:
    return _fit_in_order(lambda count: count.clamp(min=1))


def one_positive_as_a_number() -> list[float]:
    return _fit_in_order(lambda count: max(1, int(count.item())))


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("program", [one_positive, one_positive_as_a_number])
def test_a_count_of_one_that_was_given_no_least_value_is_one(
    program: Callable[[], list[float]], world_size: int
) -> None:
    expected = _in_one_process(program)
    for found, how, was_split in run_ranks(world_size, _in_a_rank, program):
        assert (how, was_split) == ("", True)
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_name_of_a_state_and_its_line_are_told() -> None:
    (found, *_), _ = run_ranks(2, _in_a_rank, bank_of_predictions)
    assert found.startswith("the loss uses ")
    assert "each = F.mse_loss(out, t) + F.mse_loss(out, bank[index])" in found


@pytest.mark.parametrize(("program", "world_size"), [*_cases(COLLECTING)])
def test_samples_that_each_rank_has_collected_are_not_trained_on(
    program: Callable[[], list[float]], world_size: int
) -> None:
    for found, how, _ in run_ranks(world_size, _in_a_rank, program):
        assert "samples that it has collected of its batches" in found
        assert how == STATES


@pytest.mark.parametrize(("program", "world_size"), [*_cases(STATELESS)])
def test_what_is_no_state_of_the_ranks_trains_on_parts_as_in_one_process(
    program: Callable[[], list[float]], world_size: int
) -> None:
    """`counts_beside_it` is whole, and as right: ``mask.sum(1)``, a number for each sample, is taken for a count."""
    expected = _in_one_process(program)
    for found, how, was_split in run_ranks(world_size, _in_a_rank, program):
        assert (how, was_split) == ("", program is not counts_beside_it)
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


# The rule -------------------------------------------------------------------------------------------------------------


def _told(found: int, shape: tuple[int, ...] = (), number: float = 0.0, times: int = 1, **more: bool) -> Any:
    is_fresh, is_whole = more.get("is_fresh", False), more.get("is_whole", False)
    return {
        "key": OutsideValue(
            times,
            shape,
            is_fresh,
            is_whole,
            found,
            number,
            more.get("may_be_size", True),
            more.get("is_by_place", False),
        )
    }


@pytest.mark.parametrize(
    ("ranks", "rows", "is_state"),
    [
        ([_told(1, (5,)), _told(2, (5,))], (9, 7), True),
        ([_told(1, (5,)), _told(1, (5,))], (9, 7), False),
        ([_told(1, (9, 5)), _told(2, (7, 5))], (9, 7), False),  # of the samples
        ([_told(1, (9, 5), is_by_place=True), _told(2, (7, 5))], (9, 7), True),  # `kept[: len(x)]`
        ([_told(1, (6, 5), is_by_place=True), _told(2, (4, 5))], (9, 7), False),  # as long as the samples of a part are
        ([_told(1, (8, 5)), _told(2, (8, 5))], (8, 8), False),  # perhaps
        ([_told(1, (5,), times=9), _told(2, (5,), times=7)], (9, 7), False),  # one for each sample
        ([_told(1, (5,), times=8), _told(2, (5,), times=8)], (8, 8), False),  # perhaps
        ([_told(1, (5,), times=4), _told(2, (5,), times=4)], (8, 8), True),
        ([_told(1, (5,), times=18), _told(2, (5,), times=14)], (9, 7), False),
        ([_told(1, (5,), times=6), _told(2, (5,), times=5)], (9, 7), True),  # some of those that a loop has kept
        ([_told(1, number=0.123, is_fresh=True), _told(2, number=0.234, is_fresh=True)], (8, 8), True),
        ([_told(1, number=9 / 32, is_fresh=True), _told(2, number=7 / 32, is_fresh=True)], (9, 7), False),
        ([_told(1, number=1 / 3, is_fresh=True), _told(2, number=1 / 5, is_fresh=True)], (8, 8), False),
        ([_told(1, number=1 / 3, is_fresh=True), _told(2, number=0.123, is_fresh=True)], (8, 8), True),
        ([_told(1, (2,), is_fresh=True, is_whole=True), _told(2, (2,), is_fresh=True, is_whole=True)], (9, 7), False),
        ([_told(1, number=9, is_fresh=True, may_be_size=False), _told(2, number=7, is_fresh=True)], (9, 7), True),
        ([_told(1, (2,), is_whole=False), {}], (9, 7), False),  # another way through the program
    ],
)
def test_which_differences_are_those_of_a_state(ranks: Any, rows: tuple[int, ...], is_state: bool) -> None:
    assert of_parts(ranks, rows, set(), has_drawn_apart=False) == (["key"] if is_state else [])


def test_a_shape_that_the_first_uneven_parts_have_shown_to_be_fixed_is_of_no_samples() -> None:
    fixed: set[str] = set()
    assert not of_parts([_told(1, (8,)), _told(1, (8,))], (9, 7), fixed, has_drawn_apart=False)
    assert of_parts([_told(1, (8,)), _told(2, (8,))], (8, 8), fixed, has_drawn_apart=False) == ["key"]


def test_numbers_that_may_come_from_noise_of_the_samples_are_not_compared() -> None:
    ranks = [_told(1, number=0.123, is_fresh=True), _told(2, number=0.234, is_fresh=True)]
    assert not of_parts(ranks, (9, 7), set(), has_drawn_apart=True)


def test_the_tensors_of_a_batch_are_found_in_objects_and_a_large_one_is_not_looked_through() -> None:
    class Graphs:
        def __init__(self) -> None:
            self.store = {"x": torch.ones(2), "share": 0.5, "names": ["one"]}

    found = [*tensors_in([Graphs(), (torch.zeros(1),)])]
    assert sum(isinstance(each, Tensor) for each in found) == 2
    assert 0.5 in [each for each in found if isinstance(each, float)]
    assert None in [*tensors_in([[each] for each in range(10_000)])]
    uses = OutsideUses(lambda tensor: False)
    uses.add([[each] for each in range(10_000)])
    assert not uses.of([torch.ones(1)]).digest
