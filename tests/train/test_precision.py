"""Mixed precision: where autocast reaches, what comes out in fp32, and steps that fp16 skips."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.base.world import World
from nbaccel.testing import run_ranks
from nbaccel.train.prepare.optimizer import SKIPS_IN_A_ROW
from nbaccel.train.step import precision
from nbaccel.train.step.kwargs_handlers import AutocastKwargs, GradScalerKwargs
from nbaccel.train.step.readings import Reading
from nbaccel.train.strategies.single import Strategy
from peers import TOOLKITS, toolkit

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: torch.Tensor
    hidden: Any = None


class Model(torch.nn.Module):
    def __init__(self, shape: str = "tensor") -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.shape = shape
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        self.seen.append(y.dtype)
        shapes = {"tensor": y, "dict": {"y": [y]}, "pair": Pair(y, 1), "dataclass": Output(y, (y, None))}
        return shapes[self.shape]


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("no", torch.float32)])
def test_a_prepared_model_computes_in_the_chosen_precision_and_answers_in_fp32(name: str, dtype: torch.dtype) -> None:
    accelerator = Accelerator(mixed_precision=name)
    model = accelerator.prepare(Model())
    assert accelerator.mixed_precision == name
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert model.seen == [dtype]


def test_outputs_are_fp32_in_any_container() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    nested = accelerator.prepare(Model("dict"))(torch.ones(1, 2))
    pair = accelerator.prepare(Model("pair"))(torch.ones(1, 2))
    output = accelerator.prepare(Model("dataclass"))(torch.ones(1, 2))
    assert isinstance(pair, Pair)
    assert isinstance(output, Output)
    tensors = [nested["y"][0], pair.left, output.logits, output.hidden[0]]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert (pair.right, output.hidden[1]) == (1, None)


def test_autocast_nests() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    linear = torch.nn.Linear(2, 2)
    with accelerator.autocast():
        assert linear(torch.ones(1, 2)).dtype == torch.bfloat16
        with accelerator.autocast(enabled=False):
            assert linear(torch.ones(1, 2)).dtype == torch.float32
        assert linear(torch.ones(1, 2)).dtype == torch.bfloat16


class Nested(torch.nn.Module):
    """Calls itself, and breaks off at the bottom if told to."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.fails = fails
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth:
            x = self(x, depth - 1)
        elif self.fails:
            raise ZeroDivisionError
        y: torch.Tensor = self.linear(x)
        self.seen.append(y.dtype)
        return y


def test_a_forward_inside_of_another_one_leaves_autocast_to_it_and_switched_off_in_the_end() -> None:
    model = Accelerator(mixed_precision="bf16").prepare(Nested())
    for _ in range(2):
        assert model(torch.ones(1, 2)).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
    assert model.seen == [torch.bfloat16] * 6


def test_a_forward_that_fails_leaves_the_next_one_as_it_was() -> None:
    model = Accelerator(mixed_precision="bf16").prepare(Nested(fails=True))
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2))
    assert not torch.is_autocast_enabled("cpu")
    model.fails = False
    model(torch.ones(1, 2))
    assert model.seen == [torch.bfloat16] * 3
    assert not torch.is_autocast_enabled("cpu")


def test_one_autocast_serves_all_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counted(torch.autocast):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    accelerator = Accelerator(mixed_precision="bf16")
    models = accelerator.prepare(Model(), Model())
    monkeypatch.setattr(torch, "autocast", Counted)
    for _ in range(3):
        for model in models:
            model(torch.ones(1, 2))
    assert len(made) == 1


@pytest.mark.slow
def test_a_prepared_model_compiles_into_one_graph() -> None:
    model = Accelerator(mixed_precision="bf16").prepare(torch.nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert not torch.is_autocast_enabled("cpu")


def test_an_unknown_precision_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="mixed_precision must be one of 'no', 'fp16', 'bf16', got 'fp17'"):
        Accelerator(mixed_precision="fp17")


def test_explicit_precision_beats_the_launchs_and_that_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Accelerator().mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert (Accelerator().mixed_precision, Accelerator().gradient_accumulation_steps) == ("bf16", 3)
    assert Accelerator(mixed_precision="no", gradient_accumulation_steps=1).mixed_precision == "no"


def test_unwrapping_can_take_autocast_off_again() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = accelerator.prepare(Model())
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    model(torch.ones(1, 2))
    assert model.seen == [torch.float32]


def test_a_prepared_model_can_be_pickled() -> None:
    model = Accelerator(mixed_precision="bf16").prepare(Model())
    again = pickle.loads(pickle.dumps(model))
    again(torch.ones(1, 2))
    assert again.seen == [torch.bfloat16]
    assert model.seen == []


def test_the_best_model_can_be_kept_and_saved_between_the_steps_of_an_fp16_training() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    for best in (copy.deepcopy(model), pickle.loads(pickle.dumps(accelerator.unwrap_model(model)))):
        assert best(torch.ones(1, 2)).equal(model(torch.ones(1, 2)))
        assert best.forward.__wrapped__.__self__ is best


def test_an_accelerator_travels_between_the_steps_of_an_fp16_training() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    again, model, optimizer = pickle.loads(pickle.dumps((accelerator, model, optimizer)))
    again.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert again.scaler.get_scale() == 8.0


def _fp16_steps(infinite_at: int) -> tuple[list[bool], list[float], list[float]]:
    """Three steps, one of them with an infinite gradient on rank 0."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    skipped, rates, weights = [], [], []
    for step in range(3):
        loss = model(torch.ones(1, 1)).sum() / 4  # times the first scale, 65536, it fits fp16
        if step == infinite_at and accelerator.is_main_process:
            loss = loss * float("inf")
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        rates.append(scheduler.get_last_lr()[0])
        weights.append(next(model.parameters()).item())
    return skipped, rates, weights


@pytest.mark.filterwarnings("ignore:the loss is")
def test_a_skipped_fp16_step_moves_neither_weights_nor_scheduler() -> None:
    skipped, rates, weights = _fp16_steps(1)
    assert skipped == [False, True, False]
    assert rates == [0.0625, 0.0625, 0.03125]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.filterwarnings("ignore:the loss is")
def test_a_step_that_one_rank_must_skip_is_skipped_by_all() -> None:
    first, second = run_ranks(2, _fp16_steps, 1)
    assert first == second
    assert first[0] == [False, True, False]


def _clipped(precision: str) -> tuple[list[float], float]:
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 0.5)).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.125).item())
            before = model.weight.item()
            optimizer.step()
    return norms, before - model.weight.item()


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_clipping_is_for_the_whole_window_and_by_true_size(precision: str) -> None:
    norms, change = _clipped(precision)
    assert norms == pytest.approx([0.25, 0.5])
    assert change == pytest.approx(0.125, rel=1e-4)


def test_clipping_values_unscales_too() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 1)).sum() / 2)
    accelerator.clip_grad_value_(model.parameters(), 0.125)
    assert model.weight.grad.item() == 0.125
    optimizer.step()


def test_two_optimizers_share_one_scale_until_both_have_stepped() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)
    accelerator._context.precision.scaler.set_growth_interval(1)  # the scale doubles at every update
    x = torch.ones(1, 1)
    for model in models:
        with torch.no_grad():
            model.weight.fill_(0.0)
    for model in prepared[:2]:
        accelerator.backward(model(x).sum() / 4)
    for optimizer in prepared[2:]:
        optimizer.step()
    assert [model.weight.item() for model in models] == [-0.25, -0.25]


def _scales(infinite: range, steps: int, **options: Any) -> tuple[list[float], list[str]]:
    accelerator = Accelerator(mixed_precision="fp16", **options)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    scales = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            accelerator.backward(model(torch.ones(1, 1)).sum() * (1e38 if step in infinite else 0.25))
            optimizer.step()
            optimizer.zero_grad()
            scales.append(accelerator._context.precision.state_dict()["scale"])
    return scales, [str(warning.message) for warning in caught]


def test_the_scale_stops_at_one_and_the_user_hears_of_it_once() -> None:
    scales, messages = _scales(range(120), 130)
    assert scales[15:17] == [1.0, 1.0]
    assert min(scales) == scales[-1] == 1.0
    assert len(messages) == 1
    assert messages[0].startswith("50 optimizer steps in a row were skipped on all 1 rank(s), the last one in step 49")
    assert "the loss scale is down to 1" in messages[0]
    assert "mixed_precision='bf16'" in messages[0]


def test_the_smallest_scale_can_be_chosen() -> None:
    handlers = [GradScalerKwargs(init_scale=64.0, min_scale=16.0, growth_interval=1)]
    assert _scales(range(4), 6, kwargs_handlers=handlers)[0] == [32.0, 16.0, 16.0, 16.0, 32.0, 64.0]
    with pytest.raises(ValueError, match="min_scale must lie above 0 and at most at init_scale 65536, got 0"):
        GradScalerKwargs(min_scale=0)


def _plain_scales(infinite: range, steps: int) -> list[float]:
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scales = []
    for step in range(steps):
        with torch.autocast("cpu", torch.float16):
            output = model(torch.ones(1, 1)).float()
        scaler.scale(output.sum() * (1e38 if step in infinite else 0.25)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.state_dict()["scale"])
    return scales


def test_the_scale_moves_as_in_plain_torch() -> None:
    ours, _ = _scales(range(2, 5), 12, kwargs_handlers=[GradScalerKwargs(growth_interval=3)])
    assert ours == _plain_scales(range(2, 5), 12)


def test_the_scalers_defaults_are_accelerates() -> None:
    def defaults(name: str) -> dict[str, Any]:
        handler = toolkit(name).GradScalerKwargs()
        return {option: getattr(handler, option) for option in ("init_scale", "growth_factor", "growth_interval")}

    theirs, ours = (run_ranks(1, defaults, name)[0] for name in TOOLKITS)
    assert ours == theirs


def test_unscaling_happens_once_however_often_it_is_asked_for() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 1)).sum() / 4)
    assert model.weight.grad.item() == 65536 / 4
    accelerator.unscale_gradients(optimizer)
    accelerator.unscale_gradients()
    accelerator.unscale_gradients([optimizer])
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert model.weight.grad.item() == 0.25
    before = model.weight.item()
    optimizer.step()
    assert before - model.weight.item() == pytest.approx(0.25)


def test_without_fp16_there_is_nothing_to_unscale() -> None:
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1, bias=False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.unscale_gradients()
    assert model.weight.grad.item() == 1.0


def test_clipping_before_any_backward_is_harmless_under_fp16() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(1, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 0.0


def test_autocast_takes_its_options_from_the_handler() -> None:
    accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(enabled=False)])
    model = accelerator.prepare(Model())
    model(torch.ones(1, 2))
    assert model.seen == [torch.float32]
    with accelerator.autocast():
        assert model.linear(torch.ones(1, 2)).dtype == torch.float32
    with accelerator.autocast(AutocastKwargs(enabled=True, cache_enabled=False)):
        assert not torch.is_autocast_cache_enabled()
        assert model.linear(torch.ones(1, 2)).dtype == torch.bfloat16
        with accelerator.autocast(autocast_handler=AutocastKwargs(enabled=False)):
            assert model.linear(torch.ones(1, 2)).dtype == torch.float32


def test_an_optimizer_without_gradients_steps_over_nothing_under_fp16() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    idle, busy = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (idle, busy)]
    idle, busy, *optimizers = accelerator.prepare(idle, busy, *optimizers)
    before = busy.weight.item()
    for _ in range(2):
        accelerator.backward(busy(torch.ones(1, 1)).sum() / 4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert before - busy.weight.item() == pytest.approx(0.5)
    assert not accelerator.optimizer_step_was_skipped


def test_the_scaler_is_there_for_fp16_only() -> None:
    assert Accelerator(mixed_precision="bf16").scaler is None
    scaler = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)]).scaler
    assert scaler is not None
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_prepared_optimizer_has_the_accelerators_scaler(precision: str) -> None:
    accelerator = Accelerator(mixed_precision=precision)
    optimizer: Any = accelerator.prepare(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
    assert optimizer.scaler is accelerator.scaler
    assert (optimizer.scaler is None) is (precision == "no")


def test_a_scaler_that_is_switched_off_leaves_losses_as_they_are() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(enabled=False)])
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(1, 1)).sum() / 4)
    assert model.weight.grad.item() == 0.25
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).item() == 0.25
    optimizer.step()
    assert not optimizer.step_was_skipped


class Asked(Reading):
    """Notes when somebody waits for a value."""

    waits = 0

    def values(self) -> dict[str, Any]:
        Asked.waits += 1
        return super().values()


def _fused(scales: list[float], **scaling: Any) -> tuple[Any, Any, Callable[[float], None]]:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**scaling)])
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.125, fused=True))
    accelerator._context.watch.see = torch.detach  # type: ignore[method-assign]  # it would warn of infinite losses

    def step(factor: float) -> None:
        accelerator.backward(model(torch.ones(1, 1)).sum() * factor)
        optimizer.step()
        optimizer.zero_grad()
        scales.append(torch.amp.GradScaler.scale(accelerator.scaler, torch.ones(())).item())

    return accelerator, optimizer, step


def _fused_steps(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> tuple[list[float], list[bool], list[float]]:
    """Scales, skipped steps and weights of a training whose steps are skipped by the device."""
    torch.manual_seed(0)
    monkeypatch.setattr(precision, "_waits", lambda flag: is_late)
    scales: list[float] = []
    _, optimizer, step = _fused(scales, init_scale=8.0, min_scale=2.0)
    skipped, weights = [], []
    for factor in (1.0, float("inf"), float("nan"), 1.0, float("inf"), 1.0):
        step(factor)
        skipped.append(optimizer.step_was_skipped)
        weights.append(optimizer.param_groups[0]["params"][0].item())
    step(1.0)  # the scale is updated when the next loss is scaled
    return scales, skipped, weights


def test_what_a_fused_optimizer_skipped_is_the_same_however_late_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    scales, skipped, weights = _fused_steps(monkeypatch, True)
    assert (scales, skipped, weights) == _fused_steps(monkeypatch, False)
    assert scales == [8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 2.0]  # 1 without the floor
    assert skipped == [False, True, True, False, True, False]


def test_a_step_of_a_fused_optimizer_is_read_in_the_next_one_or_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_waits", lambda flag: True)
    monkeypatch.setattr(precision, "Reading", Asked)
    accelerator, optimizer, step = _fused([])
    monkeypatch.setattr(Asked, "waits", 0)
    step(1.0)
    assert Asked.waits == 0
    step(float("inf"))
    assert Asked.waits == 1  # for the first step
    assert [accelerator.optimizer_step_was_skipped for _ in range(2)] == [True, True]
    assert Asked.waits == 2
    step(1.0)
    assert Asked.waits == 2
    assert not pickle.loads(pickle.dumps(optimizer)).step_was_skipped
    assert Asked.waits == 3


def test_skips_in_a_row_are_counted_also_if_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_waits", lambda flag: True)
    _, _, step = _fused([])
    for _ in range(SKIPS_IN_A_ROW):
        step(float("inf"))
    with pytest.warns(UserWarning, match=f"{SKIPS_IN_A_ROW} optimizer steps in a row were skipped"):
        step(1.0)


def _before_and_after(interrupt: Callable[[Any, Any, Any], None], fused: bool = False) -> list[float]:
    """How far a weight of 0 moves, whose gradient is 2**-7, in a step after something that came to no end."""
    accelerator = Accelerator(mixed_precision="fp16")
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused))
    moved = []
    for number in range(3):
        accelerator.backward(model(torch.full((2, 1), 2.0**-7)).mean())
        if number == 1:
            interrupt(accelerator, model, optimizer)
            continue
        before = model.weight.item()
        accelerator.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        moved.append(model.weight.item() - before)
    return moved


def _clip(accelerator: Any, model: Any, optimizer: Any) -> None:
    accelerator.clip_grad_norm_(model.parameters(), 100.0)


def _clip_and_drop(accelerator: Any, model: Any, optimizer: Any) -> None:
    _clip(accelerator, model, optimizer)
    optimizer.zero_grad()


def _clip_and_free(accelerator: Any, model: Any, optimizer: Any) -> None:
    _clip_and_drop(accelerator, model, optimizer)
    accelerator._lifecycle.forget_all_but(accelerator._lifecycle.everything_prepared)


def _fail_in_step(accelerator: Any, model: Any, optimizer: Any) -> None:
    hook = optimizer.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    hook.remove()


@pytest.mark.parametrize(
    ("interrupt", "gradients"), [(_clip, 2), (_clip_and_drop, 1), (_clip_and_free, 1), (_fail_in_step, 2)]
)
def test_after_a_step_that_came_to_no_end_gradients_are_of_true_size(
    interrupt: Callable[[Any, Any, Any], None], gradients: int
) -> None:
    """What is left of it and not dropped is added to, as without fp16."""
    assert _before_and_after(interrupt) == [-(2.0**-7), -(2.0**-7) * gradients]


def test_a_fused_step_that_fails_leaves_the_next_one_of_true_size() -> None:
    assert _before_and_after(_fail_in_step, fused=True) == [-(2.0**-7), -(2.0**-7) * 2]


def test_trained_parameters_in_fp16_say_what_to_do() -> None:
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1).half(), torch.nn.Linear(1, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(ValueError, match=r"2 of the 4 trained ones are of float16: .* parameter\.data\.float\(\)"):
        optimizer.step()


@pytest.mark.parametrize(
    ("gpu", "capability", "has_units", "instead"),
    [
        ("Tesla T4", (7, 5), False, "Write mixed_precision='fp16'"),
        ("Tesla P100", (6, 0), False, "Write mixed_precision='no'"),
        ("NVIDIA H100", (9, 0), True, None),
    ],
)
def test_bf16_is_called_slow_where_torch_emulates_it(
    monkeypatch: pytest.MonkeyPatch, gpu: str, capability: tuple[int, int], has_units: bool, instead: str | None
) -> None:
    """Torch calls it supported on a T4, and a program for an A100 would only be slow there."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_units
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def warned(name: str, rank: int = 0, device: str = "cuda") -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Strategy(World(rank, 2), torch.device(device)).precision(name)
        return [str(each.message) for each in caught if "bf16" in str(each.message)]

    assert warned("fp16") == warned("no") == warned("bf16", rank=1) == warned("bf16", device="cpu") == []
    if instead is None:
        assert warned("bf16") == []
    else:
        (message,) = warned("bf16")
        assert message.startswith(f"mixed_precision='bf16': {gpu} has no bf16 units")
        assert instead in message
