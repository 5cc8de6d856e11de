"""Unmodified loops end in two and three ranks as in one process, whether their batches are cut or not (see `loops`).

Here each runs in bare forks of the test process; `make full` also launches it as a cell is, by both ways to start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from nbaccel import Accelerator
from nbaccel.base.events import Event, Loss, Metric, Progress, outlet
from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import NotPrepared, RanksFailed
from nbaccel.launching import api
from nbaccel.launching.launcher import Launcher
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.raw_loop.single_rank import SingleRankWatch
from train.raw_loop.loops import LOOPS, Loop, Values, ends, net, points, sgd

TOLERANCE = 1e-12
"""Of a number, or of one where the number is smaller."""

REFUSAL = "errors.NotPrepared: "
SHOWS_PARTS = "what is shown of it is rank 0's part"
SPLIT = "split over"
PADDED = "sizes below the loss differ between ranks"

SETUP = "nbaccel.train.setup:setup_rank"
"""What the ranks of a cell run first."""

ALWAYS_LAUNCHED = ("gan_with_r1", "grad_scaler_with_an_overflow", "root_of_a_mean_from_the_third_step_on")
"""By a zygote, in two ranks. The others, and the other ways, are launched by `make full`."""


def _ways_to_fork() -> Iterator[Any]:
    for loop, world_size in itertools.product(LOOPS, [2, 3]):
        marks = [pytest.mark.full] if loop.is_slow and world_size > 2 else []
        yield pytest.param(loop, world_size, marks=marks, id=f"{loop.name}-{world_size}")


@pytest.mark.sample(28)
@pytest.mark.parametrize(("loop", "world_size"), [*_ways_to_fork()])
def test_a_loop_ends_in_ranks_as_in_one_process(loop: Loop, world_size: int, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        ranks = run_ranks(world_size, _in_a_rank, loop)
    except RanksFailed as error:
        if loop.may_refuse and REFUSAL in str(error):
            return
        raise
    wrong = _complaints(loop, [(weights, printed) for weights, printed, _ in ranks], capfd.readouterr().out)
    wrong += [f"rank {rank}: batches cut {was}" for rank, (*_, was) in enumerate(ranks) if was != loop.is_split]
    assert not wrong, "; ".join(wrong)


@pytest.mark.sample(15)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_a_loop_that_is_watched_in_the_only_rank_is_left_as_it_is(loop: Loop) -> None:
    (weights, printed), (expected, numbers) = run_ranks(1, _watched, loop)[0], in_one_process(loop)
    assert not differences([weights], expected, "tensor")
    assert not differences([printed], numbers, "number")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """One zygote for all loops; its start takes seconds, which no test shall be charged for."""
    launcher = Launcher()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api, "default_launcher", lambda: launcher)
        api.launch(int, 1, cpu=True, start_method="zygote")
        yield launcher
    launcher.close()


def _ways_to_launch() -> Iterator[Any]:
    for start, world_size, loop in itertools.product(["zygote", "fork"], [1, 2, 3], LOOPS):
        is_always = (start, world_size) == ("zygote", 2) and loop.name in ALWAYS_LAUNCHED
        marks = [] if is_always else [pytest.mark.full]
        yield pytest.param(start, world_size, loop, marks=marks, id=f"{start}-{world_size}-{loop.name}")


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(("start", "world_size", "loop"), [*_ways_to_launch()])
def test_a_loop_that_is_launched_ends_as_in_one_process(
    start: str, world_size: int, loop: Loop, capfd: pytest.CaptureFixture[str]
) -> None:
    run = api.launch(loop.run, world_size, cpu=True, start_method=start, setup=SETUP, check=False)
    if run.error is not None:
        if loop.may_refuse and isinstance(run.error, NotPrepared):
            return
        raise run.error
    assert run.start_method == start
    said = capfd.readouterr().out
    wrong = _complaints(loop, run.values, said)
    wrong += ["batches are cut, or not"] if (SPLIT in said) != (loop.is_split and world_size > 1) else []
    assert not wrong, "; ".join(wrong)


def _complaints(loop: Loop, ranks: Sequence[Values], said: str) -> list[str]:
    """What is not as it should be in what the ranks ended with.  said: what we printed."""
    is_alone = len(ranks) == 1
    weights, numbers = in_one_process(loop) if loop.is_exact or is_alone else ranks[0]
    wrong = [*differences([its for its, _ in ranks], weights, "tensor")]
    wrong += ["lengths are said to differ"] if PADDED in said else []
    if is_alone or not loop.shows_parts:
        wrong += differences([its for _, its in ranks], numbers, "number")
    elif SHOWS_PARTS not in said:
        wrong.append("nothing was said")
    steps = len(in_one_process(loop)[1])
    wrong += [f"rank {rank} printed {len(its)} numbers" for rank, (_, its) in enumerate(ranks) if len(its) != steps]
    return wrong


@cache
def in_one_process(loop: Loop) -> Values:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in ranks; a second one costs more than it helps
    try:
        return loop.run()
    finally:
        torch.set_num_threads(threads)


def _watched(loop: Loop) -> Values:
    watch = SingleRankWatch()
    watch.begin(None)
    try:
        found = loop.run()
        watch.end()
        return found
    finally:
        watch.stop()


def _in_a_rank(loop: Loop) -> tuple[list[Tensor], list[float], bool]:
    watch = RawLoopTraining(World.from_env(), RunSettings())
    watch.begin(None)
    try:
        weights, printed = loop.run()
        watch.end()
        return weights, printed, watch.has_split
    finally:
        watch.stop()


def differences(ranks: Sequence[Sequence[Tensor | float]], expected: Sequence[Tensor | float], what: str) -> list[str]:
    """What is not as expected, per rank the first of each."""
    wrong = []
    for rank, values in enumerate(ranks):
        pairs = zip(values, expected, strict=False)  # their number is compared elsewhere
        far = [(place, difference) for place, pair in enumerate(pairs) if (difference := _distance(*pair)) > TOLERANCE]
        if far or len(values) != len(expected):
            place, difference = far[0] if far else (min(len(values), len(expected)), float("inf"))
            wrong.append(f"rank {rank}, {what} {place} of {len(expected)}: {difference:.1e} ({len(far)} differ)")
    return wrong


def _distance(actual: Tensor | float, expected: Tensor | float) -> float:
    """The largest difference; infinite where one is not a number or overflows and the other does not."""
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    if a.shape != b.shape:
        return float("inf")
    apart = ((a - b).abs() / b.abs().clamp(min=1)).where((a != b) & ~(a.isnan() & b.isnan()), 0.0)
    return float(apart.nan_to_num(nan=float("inf")).max()) if a.numel() else 0.0


# Loops that go different ways in the ranks, each by an everyday line. -------------------------------------------------


def _a_bad_batch_later() -> Values:
    x, y = points(32).tensors
    y[19] = float("nan")
    model = net()
    optimizer = sgd(model)
    for batch, targets in DataLoader(TensorDataset(x, y), batch_size=8):
        loss = torch.nn.functional.mse_loss(model(batch), targets)
        if torch.isnan(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return ends(model), []


def _is_incomplete(batch: torch.Tensor) -> bool:
    """Not said in the loop itself, where it would be read, and the batches be kept whole."""
    return len(batch) != 8


def _full_batches_alone() -> Values:
    model = net()
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in DataLoader(points(), batch_size=8):
            if _is_incomplete(x):
                continue
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return ends(model), []


def _until_an_incomplete_batch() -> Values:
    model = net()
    optimizer = sgd(model)
    for _ in range(3):
        for x, y in DataLoader(points(), batch_size=8):
            if _is_incomplete(x):
                break
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return ends(model), []


def _samples_by_their_losses() -> Values:
    data, model = points(32), net()
    optimizer, weights = sgd(model), torch.ones(32)
    for _ in range(4):
        drawn = WeightedRandomSampler(weights, 32)
        for x, y in DataLoader(data, batch_size=8, sampler=drawn):
            losses = torch.nn.functional.mse_loss(model(x), y, reduction="none").squeeze(1)
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            weights[: len(x)] = losses.detach()
    return ends(model), []


def _with(loss_of: Callable[[torch.Tensor, int], torch.Tensor]) -> Values:
    model = net()
    optimizer = sgd(model)
    for epoch in range(3):
        for x, y in DataLoader(points(32), batch_size=8):
            optimizer.zero_grad()
            loss_of(torch.nn.functional.mse_loss(model(x), y, reduction="none").squeeze(1), epoch).mean().backward()
            optimizer.step()
    return ends(model), []


def _the_hardest_ones_later() -> Values:
    """A part has others, as online mining of hard examples once losses are below its threshold."""
    return _with(lambda losses, epoch: losses.topk(len(losses) // 2).values if epoch else losses)


def _weights_of_the_batch_later() -> Values:
    return _with(lambda losses, epoch: losses * (losses / losses.mean()).detach() if epoch else losses)


def _neighbours_from(first: int) -> Values:
    """Samples that meet others, where nothing of it is in the graph, from one of the steps on: four make an epoch."""
    model, step = net(), 0
    optimizer = sgd(model)
    for _ in range(6):
        for x, y in DataLoader(points(32), batch_size=8):
            x = 0.7 * x + 0.3 * x.flip(0) if step >= first else x
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
    return ends(model), []


def _neighbours_from_an_epoch_on() -> Values:
    return _neighbours_from(12)


def _neighbours_from_a_step_on() -> Values:
    return _neighbours_from(5)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (_neighbours_from_an_epoch_on, "step 12: this loss is no sum over samples ("),
        (_neighbours_from_a_step_on, "step 8: this loss is no sum over samples ("),
        (_the_hardest_ones_later, "step 4: this loss is no sum over samples ("),
        (_weights_of_the_batch_later, "step 4: this loss is no sum over samples ("),
        (_a_bad_batch_later, "are at different batches, of which one was left out in some of them"),
        (_full_batches_alone, "the loop has passed them over, as one does that leaves out batches with len"),
        (_until_an_incomplete_batch, "the loop has passed them over"),
        (_samples_by_their_losses, "have drawn different samples"),
    ],
)
def test_ranks_that_go_different_ways_end_in_a_sentence(program: Callable[[], Values], why: str) -> None:
    loop = Loop(program.__name__, program)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, _in_a_rank, loop)
    assert REFUSAL in str(caught.value)
    assert why in str(caught.value)


def _order_and_noise_by_numpy() -> Values:
    """Noise for the samples of a part is drawn less often in some ranks; the next order is NumPy's, too."""
    np.random.seed(0)
    data, model, seen = points(27), net(), []
    optimizer = sgd(model, 1e-3)
    for _ in range(3):
        order = np.random.permutation(27).tolist()
        for x, y in DataLoader(data, batch_size=9, sampler=order):
            noise = torch.from_numpy(np.random.randn(len(x), 5))
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x + 0.01 * noise), y).backward()
            optimizer.step()
        seen += order
    return [*ends(model), torch.tensor(seen)], []


def test_what_numpy_draws_for_samples_changes_no_decision(capfd: pytest.CaptureFixture[str]) -> None:
    ranks = run_ranks(2, _in_a_rank, Loop("numpy", _order_and_noise_by_numpy))
    assert not differences([weights for weights, *_ in ranks], ranks[0][0], "tensor")
    assert "what the loop draws from NumPy or random is the same in all ranks" in capfd.readouterr().out


def _sentences_padded_in_the_model(total_length: int | None) -> Values:
    """Lengths are given beside sequences of one size; a softmax over time counts the padding, too."""
    lengths = torch.arange(32) % 11 + 3
    data = TensorDataset(torch.randn(32, 14, 5), lengths, torch.randn(32, 4))
    layer, head, printed = nn.GRU(5, 4, batch_first=True), nn.Linear(4, 4), []
    optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.05)
    for x, length, y in DataLoader(data, batch_size=8):
        packed = pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=total_length)
        attended = (states.mean(2).softmax(1)[..., None] * states).sum(1)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(head(attended), y)
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return [*ends(layer), *ends(head)], printed


@pytest.mark.parametrize("total_length", [None, 14])
def test_lengths_that_each_rank_makes_for_its_part_are_said(
    total_length: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    loop = Loop("padded", partial(_sentences_padded_in_the_model, total_length))
    ranks = [(weights, printed) for weights, printed, _ in run_ranks(2, _in_a_rank, loop)]
    is_alike = total_length is not None
    assert bool(_complaints(loop, ranks, "")) != is_alike
    assert (PADDED in capfd.readouterr().out) != is_alike


def _logged() -> tuple[list[Tensor], list[int]]:
    """Trains without preparing, then prepares; both log without saying a step."""
    accelerator, events = Accelerator(), list[Event]()
    model, data = net(), points(16)
    optimizer = sgd(model)
    with outlet(events.append):
        for _ in range(2):
            for x, y in DataLoader(data, batch_size=8):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                accelerator.log({"before": 1})
                optimizer.step()
                accelerator.log({"after": 1})
        accelerator.log({"accuracy": 0.5})
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
        for x, y in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            accelerator.log({"loss": 1})
    return ends(model), [event.step for event in events if isinstance(event, Metric)]


def test_what_an_unprepared_loop_logs_belongs_to_its_steps_and_not_all_to_the_first() -> None:
    for _, steps, _ in run_ranks(2, _in_a_rank, Loop("logged", _logged)):
        assert steps == [0, 0, 1, 1, 2, 2, 3, 3, 3, *[0, 1]]


def _accumulated_by_hand() -> tuple[list[Tensor], list[Any]]:
    """Steps after four batches, which leaves none of 5, and after those that an epoch has left: as programs do."""
    model, events = net(), list[Event]()
    optimizer = sgd(model)
    with outlet(events.append):
        for _ in range(3):
            loader = DataLoader(points(20), batch_size=4)
            for at, (x, y) in enumerate(loader):
                (torch.nn.functional.mse_loss(model(x), y) / 4).backward()
                if (at + 1) % 4 == 0 or at + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
    steps = [event.step for event in events if isinstance(event, Loss)]
    (done,) = {gauge.step for gauge in events if isinstance(gauge, Progress) and gauge.is_over and gauge.epoch == 2}
    return ends(model), [*steps, done]


def test_batches_that_a_loop_accumulates_by_hand_count_as_the_optimizers_steps() -> None:
    for _, steps, _ in run_ranks(2, _in_a_rank, Loop("by hand", _accumulated_by_hand)):
        assert steps == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 5, 6]


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ZeroDivisionError


def _fails_in_its_second_backward() -> list[list[Any]]:
    watch = RawLoopTraining(World.from_env(), RunSettings())
    watch.begin(None)
    try:
        model, found = net(), []
        x, _ = next(iter(DataLoader(points(8), batch_size=8)))
        model(x).mean().backward()
        found.append([None if each.grad is None else each.grad.tolist() for each in model.parameters()])
        with pytest.raises(ZeroDivisionError):
            model(_Fails.apply(x.requires_grad_())).square().mean().backward()
        found.append([None if each.grad is None else each.grad.tolist() for each in model.parameters()])
        return found
    finally:
        watch.stop()


def test_a_backward_that_fails_leaves_the_gradients_that_were_there() -> None:
    for before, after in run_ranks(2, _fails_in_its_second_backward):
        assert None not in before
        assert after == before
