"""What is seen of an unmodified loop in the only rank: steps, losses, passes. `test_loops` shows that none changes."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.base.events import Event, Gauge, LoopEntered, Loss, Progress, StepEntered, StepsEnded, outlet
from nbaccel.errors import RunStopped
from nbaccel.train.raw_loop.single_rank import SingleRankWatch
from nbaccel.train.step.raw_loop_hooks import step_under_way


class Seen(list[Event]):
    """Events in their order; gauges are read when they come and at the end."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.of(StepEntered)]

    @property
    def losses(self) -> list[tuple[int, float]]:
        return [(event.step, float(event.value)) for event in self.of(Loss)]

    @property
    def passes(self) -> list[Progress]:
        """As each has ended."""
        return [event for event in self.of(Progress) if event.is_over]


@pytest.fixture
def seen() -> Iterator[Seen]:
    seen = Seen()
    watch = SingleRankWatch()
    with outlet(seen):
        watch.begin(None)
        try:
            yield seen
        finally:
            watch.stop()


def data(count: int = 12) -> TensorDataset:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(data(), batch_size)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_steps_losses_and_passes_of_a_loop_are_told(seen: Seen) -> None:
    model, optimizer = model_and_optimizer()
    printed = []
    for _ in range(2):
        for x, y in loader():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            printed.append(loss.item())
    assert seen.steps == [*range(6)]
    assert seen.losses == [*enumerate(printed)]
    assert len(seen.of(StepsEnded)) == 6
    told = [(each.epoch, each.batch, each.batches, each.samples, each.is_training) for each in seen.passes]
    assert told == [(0, 3, 3, 4, True), (1, 3, 3, 4, True)]
    assert {(each.samples, bool(each.obstacle)) for each in seen.of(LoopEntered)} == {(4, True)}


def test_a_gauge_is_read_while_its_pass_goes_on(seen: Seen) -> None:
    model, optimizer = model_and_optimizer()
    for at, (x, y) in enumerate(loader()):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        (gauge,) = seen.of(Gauge)
        now = gauge.read()
        assert (now.step, now.batch, now.is_training) == (at + 1, at + 1, True)
    assert gauge.read() is None


def test_learning_rates_are_those_of_the_optimizers_that_step(seen: Seen) -> None:
    model, optimizer = model_and_optimizer()
    _, idle = model_and_optimizer()
    told = []
    for x, y in loader():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        told.append(seen.of(Gauge)[0].read().learning_rates)
        optimizer.param_groups[0]["lr"] /= 2
    assert told == [(0.1,), (0.05,), (0.025,)]
    assert idle.param_groups[0]["lr"] == 0.1


def test_a_training_without_a_loader_tells_its_steps_and_rates(seen: Seen) -> None:
    model, optimizer = model_and_optimizer()
    x, y = data().tensors
    for at in range(3):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        (gauge,) = seen.of(Gauge)
        now = gauge.read()
        assert (now.step, now.batch, now.batches, now.samples, now.is_training) == (at + 1, 0, None, None, True)
        assert now.learning_rates == (0.1,)
    for x, y in loader():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert gauge.read() is None
    told = [(each.first, each.step, each.batches, each.samples) for each in seen.passes]
    assert told == [(0, 3, None, None), (3, 6, 3, 4)]


def test_accumulated_batches_are_one_step_and_two_optimizers_too(seen: Seen) -> None:
    model, optimizer = model_and_optimizer()
    _, other = model_and_optimizer()
    for at, (x, y) in enumerate(loader(2)):
        F.mse_loss(model(x), y).backward()
        if at % 2:
            optimizer.step()
            other.step()
            optimizer.zero_grad()
    assert seen.steps[-1] == 2
    assert [step for step, _ in seen.losses] == [0, 0, 1, 1, 2, 2]


def test_accumulated_batches_are_one_step_where_the_collector_does_not_list_the_optimizer(seen: Seen) -> None:
    model, optimizer = model_and_optimizer()
    gc.freeze()  # as before a fork: a rank's collector lists no object of the notebook
    try:
        for at, (x, y) in enumerate(loader(2)):
            F.mse_loss(model(x), y).backward()
            if at % 3 == 2:
                optimizer.step()
    finally:
        gc.unfreeze()
    assert [step for step, _ in seen.losses] == [0, 0, 0, 1, 1, 1]
    assert [each.step for each in seen.passes] == [2]


def test_a_loop_without_an_optimizer_of_its_own_steps_with_each_batch(seen: Seen) -> None:
    model, _ = model_and_optimizer()
    _, other = model_and_optimizer()
    for x, y in loader():
        F.mse_loss(model(x), y).backward()
        for each in model.parameters():
            each.data -= 0.1 * each.grad
            each.grad = None
    assert seen.steps == [0, 1, 2]
    assert other.state_dict()["state"] == {}


def test_a_scaled_loss_is_told_as_the_program_has_computed_it(seen: Seen) -> None:
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    printed = []
    for x, y in loader():
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        printed.append(loss.item())
    assert [value for _, value in seen.losses] == pytest.approx(printed)


def test_gradients_that_are_asked_for_are_no_steps(seen: Seen) -> None:
    model, _ = model_and_optimizer()
    for x, y in loader():
        torch.autograd.grad(F.mse_loss(model(x), y), model.parameters())
    assert seen.steps == []
    assert [each.is_training for each in seen.passes] == [False]


def test_an_evaluation_is_shown_as_one(seen: Seen) -> None:
    model, optimizer = model_and_optimizer()
    for x, y in loader():
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for x, _ in loader():
            model(x)
    assert [each.is_training for each in seen.passes] == [True, False]
    assert seen.steps == [0, 1, 2]


def test_a_loop_that_prepares_is_left_to_that(seen: Seen) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(*model_and_optimizer(), loader())
    for x, y in batches:
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    assert seen.steps == [0, 1, 2], "each step once"
    assert step_under_way() is None


def test_a_step_at_which_the_run_ends_is_not_counted() -> None:
    seen, watch = Seen(), SingleRankWatch()
    model, optimizer = model_and_optimizer()

    def stops_before_step_2(event: Event) -> None:
        seen.append(event)
        if isinstance(event, StepEntered) and event.step == 2:
            raise RunStopped("stopped before step 2")

    with outlet(stops_before_step_2):
        watch.begin(None)
        with pytest.raises(RunStopped):
            for x, y in loader():
                F.mse_loss(model(x), y).backward()
                optimizer.step()
        watch.stop()
    assert [each.step for each in seen.passes] == [2]
    assert len(seen.of(StepsEnded)) == 2


def test_a_watch_that_has_left_holds_no_model() -> None:
    watch = SingleRankWatch()
    watch.begin(None)
    model, optimizer = model_and_optimizer()
    for x, y in loader():
        torch.amp.GradScaler("cpu").scale(F.mse_loss(model(x), y))  # and no backward, which would forget it
    watch.end()
    held = weakref.ref(model.weight)
    del model, optimizer, x, y
    gc.collect()
    assert held() is None


def trainer_named(name: str) -> Callable[[nn.Module, Tensor, Tensor], None]:
    """A function of a module of that name, which runs a backward."""
    module = types.ModuleType(name)
    source = "def step(model, x, y):\n    (model(x) - y).square().mean().backward()\n"
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    step: Callable[[nn.Module, Tensor, Tensor], None] = vars(module)["step"]
    return step


@pytest.mark.parametrize("name", ["transformers.trainer", "lightning.pytorch.loops"])
def test_a_trainer_that_reports_by_itself_is_left_to_that(seen: Seen, name: str) -> None:
    model, _ = model_and_optimizer()
    step = trainer_named(name)
    for x, y in loader():
        step(model, x, y)
    assert seen.steps == []
    assert seen.losses == []
    assert "a trainer has a loop of its own" in seen.of(LoopEntered)[-1].obstacle


def test_torch_is_as_it_was_after_a_task() -> None:
    before = torch.autograd._engine_run_backward, torch.compile, torch.optim.Optimizer.add_param_group
    watch = SingleRankWatch()
    for _ in range(2):
        watch.begin(None)
        watch.begin(None)  # a task before it failed
        assert torch.autograd._engine_run_backward is not before[0]
        watch.end()
        assert (torch.autograd._engine_run_backward, torch.compile, torch.optim.Optimizer.add_param_group) == before
    watch.stop()


def test_an_iterator_goes_on_in_the_next_task() -> None:
    watch, seen = SingleRankWatch(), Seen()
    with outlet(seen):
        watch.begin(None)
        batches = iter(loader())
        next(batches)
        watch.end()
        watch.begin(None)
        assert len([*batches]) == 2
        watch.end()
    assert [each.batch for each in seen.passes] == [1, 2]


def test_a_loader_without_a_batch_hides_no_pass_around_it() -> None:
    model, optimizer = model_and_optimizer()
    watch, seen, left = SingleRankWatch(), Seen(), []
    with outlet(seen):
        watch.begin(None)
        for x, y in loader():
            assert list(DataLoader(TensorDataset(torch.ones(0, 3)))) == []
            place = watch.place()
            left.append(None if place is None else place.left)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        watch.stop()
    assert left == [2, 1, 0]
    assert [each.batch for each in seen.passes if each.is_training] == [3]
