"""Prepared optimizers and schedulers beside the ones they wrap."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.prepare.optimizer import PreparedOptimizer, PreparedScheduler
from peers import toolkit


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0, momentum=0.5)


def test_a_prepared_optimizer_is_an_optimizer_and_shows_its_own() -> None:
    plain = _optimizer()
    prepared = Accelerator().prepare(plain)
    assert isinstance(prepared, torch.optim.Optimizer)
    assert prepared.param_groups is plain.param_groups
    assert prepared.state is plain.state
    assert prepared.defaults is plain.defaults
    assert prepared.state_dict() == plain.state_dict()
    prepared.load_state_dict(copy.deepcopy(plain.state_dict()))
    torch.optim.lr_scheduler.StepLR(prepared, 1)


def test_zero_grad_drops_the_gradients_of_all_groups_or_fills_them_with_zeros() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    plain = torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:], "lr": 0.1}], lr=1.0)
    prepared = Accelerator().prepare(plain)
    for weight in weights[1:]:
        weight.grad = torch.ones(2)
    prepared.zero_grad(set_to_none=False)
    assert [None if weight.grad is None else weight.grad.tolist() for weight in weights] == [None, [0, 0], [0, 0]]
    prepared.zero_grad()
    assert [weight.grad for weight in weights] == [None, None, None]


class _Counting(torch.optim.SGD):
    """An optimizer that does more than torch's when gradients are dropped."""

    calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls += 1
        super().zero_grad(set_to_none)


def test_an_optimizers_own_zero_grad_is_called_also_one_that_was_put_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    own = _Counting([weight], lr=1.0)
    Accelerator().prepare(own).zero_grad()
    assert own.calls == 1

    seen: list[object] = []
    replaced = torch.optim.SGD([weight], lr=1.0)
    prepared = Accelerator().prepare(replaced)
    replaced.zero_grad = seen.append  # type: ignore[method-assign, assignment]
    prepared.zero_grad()
    assert seen == [True]

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none: seen.append("patched"))
    Accelerator().prepare(torch.optim.SGD([weight], lr=1.0)).zero_grad()
    assert seen == [True, "patched"]


def test_a_prepared_optimizer_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(Accelerator().prepare(_optimizer())))
    assert again.param_groups[0]["lr"] == 1.0
    again.step()


def test_a_prepared_loader_can_be_copied_beside_its_optimizer() -> None:
    """Each of the two knows the other, so one is rebuilt while the other is still empty."""
    loader, _ = Accelerator().prepare(DataLoader(range(4), batch_size=2), _optimizer())  # type: ignore[arg-type]
    assert [batch.tolist() for batch in copy.deepcopy(loader)] == [[0, 1], [2, 3]]


def test_a_closure_reaches_the_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.tensor([4.0]))
    accelerator = Accelerator()
    prepared = accelerator.prepare(torch.optim.LBFGS([parameter]))

    def closure() -> torch.Tensor:
        prepared.zero_grad()
        loss = parameter.square().sum()
        accelerator.backward(loss)
        return loss

    assert prepared.step(closure).item() == 16.0
    assert abs(parameter.item()) < 1.0


def test_fp16_refuses_a_closure_and_says_what_takes_one() -> None:
    prepared = Accelerator(mixed_precision="fp16").prepare(_optimizer())
    with pytest.raises(ValueError, match="use mixed_precision='bf16' or 'no'"):
        prepared.step(lambda: 0)


def _moves(split_batches: bool, with_optimizer: bool, kind: str) -> int:
    accelerator = Accelerator(split_batches=split_batches, step_scheduler_with_optimizer=with_optimizer)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedulers: dict[str, Any] = {
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=5),
    }
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedulers[kind]())
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        scheduler.step()
    return int(scheduler.last_epoch)


@pytest.mark.parametrize(
    ("split_batches", "with_optimizer", "kind", "moves"),
    [(False, True, "step", 6), (True, True, "step", 3), (False, False, "step", 3), (False, True, "cycle", 5)],
)
def test_a_scheduler_moves_once_per_rank_and_step(
    split_batches: bool, with_optimizer: bool, kind: str, moves: int
) -> None:
    assert run_ranks(2, _moves, split_batches, with_optimizer, kind) == [moves, moves]


def _rates(name: str, steps: int, adjust: bool, kind: str, with_optimizer: bool = True) -> list[tuple[float, int]]:
    """The rate and the scheduler's own count after each of two epochs of 5 batches."""
    warnings.simplefilter("ignore")  # a scheduler that follows its calls moves before the optimizer does
    tools = toolkit(name)
    accelerator = tools.Accelerator(
        cpu=True,
        gradient_accumulation_plugin=tools.GradientAccumulationPlugin(num_steps=steps, adjust_scheduler=adjust),
        step_scheduler_with_optimizer=with_optimizer,
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    kinds: dict[str, Any] = {
        "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1.0, total_steps=10 * accelerator.num_processes
        ),
    }
    loader = DataLoader(TensorDataset(torch.ones(5 * accelerator.num_processes, 1)), batch_size=1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, kinds[kind]())
    seen = []
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        seen.append((scheduler.get_last_lr()[0], scheduler.scheduler._step_count))
    return seen


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("steps", "adjust", "kind", "with_optimizer"),
    [
        (1, True, "exponential", True),
        (2, True, "exponential", True),
        (2, False, "exponential", True),
        (2, True, "exponential", False),
        (2, True, "cycle", True),
    ],
)
def test_rates_and_counts_are_accelerates(
    ranks: int, steps: int, adjust: bool, kind: str, with_optimizer: bool
) -> None:
    theirs, ours = (
        run_ranks(ranks, _rates, name, steps, adjust, kind, with_optimizer) for name in ("accelerate", "nbaccel")
    )
    assert ours == theirs


def test_a_cycle_planned_in_optimizer_steps_reaches_its_end() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=6)
    model, optimizer, cycle = accelerator.prepare(model, optimizer, cycle)
    for _ in range(6 * 4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            cycle.step()
    assert cycle.scheduler.last_epoch == 6


def test_a_scheduler_that_watches_a_metric_gets_it() -> None:
    accelerator = Accelerator()
    optimizer = _optimizer()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    optimizer, plateau = accelerator.prepare(optimizer, plateau)
    for loss in (1.0, 2.0):
        optimizer.step()
        plateau.step(loss)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_optimizer_and_scheduler_can_be_prepared_one_by_one() -> None:
    accelerator = Accelerator()
    optimizer = accelerator.prepare_optimizer(_optimizer())
    scheduler = accelerator.prepare_scheduler(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    assert (type(optimizer), type(scheduler)) == (PreparedOptimizer, PreparedScheduler)
    assert scheduler.optimizers == [optimizer]
    assert accelerator.prepare(optimizer, scheduler) == (optimizer, scheduler)


def _gan(precision: str) -> list[float]:
    """One generator, one discriminator, an optimizer and a schedule each, in the usual order of calls."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    generator, discriminator = torch.nn.Linear(2, 1), torch.nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2 * accelerator.num_processes) for optimizer in optimizers]
    size = 4 // accelerator.num_processes
    data = DataLoader(TensorDataset(torch.randn(24, 2), torch.randn(24, 1)), batch_size=size)
    generator, discriminator, loader, *rest = accelerator.prepare(
        generator, discriminator, data, *optimizers, *schedulers
    )
    optimizer_g, optimizer_d, scheduler_g, scheduler_d = rest
    for noise, real in loader:
        with accelerator.accumulate(generator, discriminator):
            fake = generator(noise)
            accelerator.backward(discriminator(fake.detach()).mean() - discriminator(real).square().mean() / 4)
            optimizer_d.step()
            scheduler_d.step()
            optimizer_d.zero_grad()
            accelerator.backward(-discriminator(fake).mean())
            optimizer_g.step()
            scheduler_g.step()
            optimizer_g.zero_grad()
    assert scheduler_g.get_last_lr() == scheduler_d.get_last_lr()
    models = (accelerator.unwrap_model(model) for model in (generator, discriminator))
    return [value for model in models for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-6), ("fp16", 5e-3), ("bf16", 5e-2)])
def test_two_models_that_train_against_each_other_do_so_in_two_ranks(precision: str, tolerance: float) -> None:
    alone = _gan(precision)
    first, second = run_ranks(2, _gan, precision)
    assert first == second
    assert first == pytest.approx(alone, abs=tolerance)


def _with_state(parameter: torch.nn.Parameter, **options: Any) -> torch.optim.Optimizer:
    """As an optimizer arrives that was pickled in a notebook: its state is on the CPU."""
    optimizer = torch.optim.Adam([parameter], **options)
    optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "past": [torch.ones(2), 1]}
    return optimizer


@pytest.mark.parametrize(
    ("options", "steps_on"), [({}, "cpu"), ({"fused": True}, "cuda:0"), ({"capturable": True}, "cuda:0")]
)
def test_a_state_from_the_cpu_comes_to_its_parameter_as_loading_would_bring_it(
    options: dict[str, Any], steps_on: str
) -> None:
    with FakeTensorMode():
        parameter = torch.nn.Parameter(torch.empty(2, device="cuda:0", dtype=torch.bfloat16))
        Accelerator().prepare(_with_state(parameter, **options))
        optimizer = _with_state(parameter, **options)
        Accelerator().prepare_optimizer(optimizer)
        entries = optimizer.state[parameter]
    assert str(entries["step"].device) == steps_on
    assert str(entries["exp_avg"].device) == str(entries["past"][0].device) == "cuda:0"
    assert entries["exp_avg"].dtype == torch.float32
    assert entries["past"][1] == 1


class _Movable(torch.nn.Parameter):
    """One that `_Model.to` takes for moved."""

    place = torch.device("cpu")
    device = property(lambda parameter: parameter.place)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = _Movable(torch.ones(2))

    def to(self, *args: Any, **kwargs: Any) -> _Model:
        self.weight.place = torch.device("meta")
        return self


@pytest.mark.parametrize("order", ["model first", "optimizer first", "apart"])
def test_a_state_follows_a_model_that_prepare_moves_whichever_comes_first(order: str) -> None:
    model, accelerator = _Model(), Accelerator()
    optimizer = _with_state(model.weight)
    if order == "apart":
        accelerator.prepare_optimizer(optimizer)
        accelerator.prepare_model(model)
    else:
        accelerator.prepare(*((model, optimizer) if order == "model first" else (optimizer, model)))
    assert optimizer.state[model.weight]["exp_avg"].device.type == "meta"


@pytest.mark.parametrize("kind", ["paged", "pinned"])
def test_a_state_that_its_optimizer_keeps_on_the_host_on_purpose_stays_there(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = _Model()
    optimizer = _with_state(model.weight)
    kept = optimizer.state[model.weight]["exp_avg"]
    if kind == "paged":
        kept.is_paged = True
    else:
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is kept)
    Accelerator().prepare(model, optimizer)
    assert optimizer.state[model.weight]["exp_avg"] is kept
    assert optimizer.state[model.weight]["past"][0].device.type == "meta"


def test_a_parameter_without_memory_takes_no_state_away() -> None:
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    optimizer = _with_state(parameter)
    Accelerator().prepare(optimizer)
    assert optimizer.state[parameter]["exp_avg"].tolist() == [1, 1]
