"""Steps of DeepSpeed whose backwards, parameters and schedules are not the usual ones; and what a training leaves."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nbaccel import Accelerator, DeepSpeedPlugin, LocalSGD, testing
from nbaccel.features.deepspeed.native_build import import_deepspeed
from nbaccel.features.deepspeed.partitions import join_group
from nbaccel.utils import DummyOptim, DummyScheduler, find_executable_batch_size

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed: make test-deepspeed"),
    pytest.mark.timeout(600),
]

run_ranks = functools.partial(testing.run_ranks, timeout_s=300)  # each imports deepspeed anew

ONES = torch.ones(2, 3, device="cpu")
ON_HOST = {"offload_optimizer_device": "cpu"}


def _zero(stage: int, more: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    table = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return {"deepspeed_plugin": DeepSpeedPlugin({"zero_optimization": table, **(more or {})}, **fields)}


class Branches(nn.Module):
    """A model with a part that a batch uses or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.side, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, inputs: Tensor, uses_side: bool = True) -> Tensor:
        hidden = self.first(inputs)
        return self.last(hidden + self.side(hidden) if uses_side else hidden)


# A letter is a backward: s with the side, p (plain) without; capitals do not end the window. "." steps and sets
# gradients to zero, "!" only sets them to zero, "_" steps without anything.
STEPS = {
    "a part that is used sometimes": "s.p.s.p.",
    "a step without a backward": "s._._s.",
    "gradients that are dropped": "s!p.s!s.",
    "a window that is dropped": "s.S!p.",
    "a window that begins without a part": "Ps.Ps.Ps.",
    "a window that ends without a part": "Sp.Sp.Sp.",
}
TWICE = {
    "two backwards of one step": "ss.ss.sp.",
    "two backwards after a window": "Sss.Ssp.",
}


def _run(script: str, options: dict[str, Any]) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True, **options)
    plain = Branches()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for number, letter in enumerate(script, 1):
        if letter.isalpha():
            with accelerator.no_sync(model) if letter.isupper() else nullcontext():
                accelerator.backward(model(ONES * number, letter.lower() == "s").square().mean() / number**2)
        else:
            with warnings.catch_warnings():
                if letter == "_":
                    warnings.simplefilter("ignore")  # it looks like the step of a loop that calls loss.backward
                if letter in "._":
                    optimizer.step()
            if letter != "_":
                optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def _run_all(scripts: dict[str, str], options: Callable[[], dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    return {name: _run(script, options()) for name, script in scripts.items()}


@pytest.mark.parametrize(("stage", "fields"), [(1, {}), (2, {}), (3, {}), (2, ON_HOST), (3, ON_HOST)])
def test_every_gradient_is_in_one_step_as_in_one_process(stage: int, fields: dict[str, Any]) -> None:
    scripts = STEPS if fields else {**STEPS, **TWICE}
    [alone] = run_ranks(1, lambda: _run_all(scripts, dict))
    found, *_ = run_ranks(2, lambda: _run_all(scripts, lambda: _zero(stage, **fields)))
    for name, wanted in alone.items():
        for key, value in wanted.items():
            torch.testing.assert_close(found[name][key], value, msg=f"{name}, {key}", atol=1e-6, rtol=1e-5)


def _exchanges(stage: int, by_hand: bool) -> dict[str, int]:
    """Return the collectives of a rank's third step."""
    warnings.simplefilter("ignore")  # of what DeepSpeed imports
    plain = Branches()
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    if by_hand:
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        deepspeed = import_deepspeed(torch.device("cpu"))
        join_group(Accelerator(cpu=True).world)
        engine, *_ = deepspeed.initialize(model=plain, optimizer=optimizer, config=config, dist_init_required=False)
        model, backward, step = engine, engine.backward, engine.step
    else:
        accelerator = Accelerator(cpu=True, **_zero(stage))
        model, optimizer = accelerator.prepare(plain, optimizer)
        backward, step = accelerator.backward, optimizer.step
    for _ in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            backward(model(ONES).square().mean())
            step()
            optimizer.zero_grad()
    return {each.key: each.count for each in seen.key_averages() if each.key.startswith("c10d::")}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_exchanges_no_more_than_the_engine_by_hand(stage: int) -> None:
    by_hand, *_ = run_ranks(2, lambda: _exchanges(stage, True))
    assert sum(by_hand.values()) >= 3
    assert run_ranks(2, lambda: _exchanges(stage, False)) == [by_hand, by_hand]


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return ""


def _refusals(path: str) -> list[str]:
    accelerator = Accelerator(cpu=True, **_zero(2, {"gradient_clipping": 0.5}))
    plain = Branches()
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    accelerator.backward(model(ONES).mean())

    def on_a_disk() -> None:
        other = nn.Linear(2, 2)
        fields = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": path}
        Accelerator(cpu=True, **_zero(3, **fields)).prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))

    return [
        _said(lambda: _run("ss.", _zero(2, **ON_HOST))),
        _said(lambda: _run("sS", _zero(2))),
        _said(on_a_disk),
        _said(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0)),
        _said(lambda: accelerator.clip_grad_value_(model.parameters(), 1.0)),
        _said(LocalSGD(accelerator, model, 2).__enter__),
    ]


def test_what_the_engine_would_lose_is_refused_with_the_next_move(tmp_path: Path) -> None:
    wanted = (
        "Add the losses and call it once",
        "Step first",
        "Use 'cpu'",
        "gradient_clipping: 0.5, which is of the norm 2",
        "leave one of them out",
        'strategy="ddp" has',
    )
    said = run_ranks(2, lambda: _refusals(str(tmp_path)))[0]
    for words, sentence in zip(wanted, said, strict=True):
        assert words in sentence


def _clipped(options: dict[str, Any]) -> tuple[float, float]:
    accelerator = Accelerator(cpu=True, **options)
    plain = Branches()
    before = [weight.detach().clone() for weight in plain.parameters()]
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    accelerator.backward((model(ONES) * 10).square().mean())
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    after = accelerator.get_state_dict(model).values()
    return float(norm), sum(float((new - old).square().sum()) for new, old in zip(after, before, strict=True)) ** 0.5


@pytest.mark.parametrize(("stage", "fields"), [(2, {}), (2, ON_HOST), (3, ON_HOST)])
def test_gradients_are_clipped_once_where_configuration_and_loop_say_it(stage: int, fields: dict[str, Any]) -> None:
    norm, moved = run_ranks(1, lambda: _clipped(_zero(stage, {"gradient_clipping": 0.5}, **fields)))[0]
    assert norm == pytest.approx(run_ranks(1, lambda: _clipped({}))[0][0])
    assert moved == pytest.approx(0.5, rel=1e-4)


def _left_open(clips: bool) -> float:
    accelerator = Accelerator(cpu=True, **_zero(2, {"gradient_clipping": "auto"}))
    plain = Branches()
    before = [weight.detach().clone() for weight in plain.parameters()]
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    accelerator.backward((model(ONES) * 10).square().mean())
    if clips:
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    after = accelerator.get_state_dict(model).values()
    return sum(float((new - old).square().sum()) for new, old in zip(after, before, strict=True)) ** 0.5


def test_a_clipping_that_is_left_open_is_the_programs_or_that_of_accelerate() -> None:
    assert run_ranks(1, lambda: [_left_open(True), _left_open(False)])[0] == pytest.approx([0.5, 1.0], rel=1e-4)


class Scaled(nn.Module):
    """A model with a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(2.0, device="cpu"))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.part(inputs) * self.scale


def _scaled(options: dict[str, Any]) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(accelerator.process_index)  # rank 0's weights are those of all
    plain = Scaled()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    for number in (1, 2):
        accelerator.backward(model(ONES * number).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return {name: value.detach().clone() for name, value in plain.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_without_a_dimension_is_trained(stage: int) -> None:
    [alone] = run_ranks(1, lambda: _scaled({}))
    for found in run_ranks(2, lambda: _scaled(_zero(stage))):
        for name, wanted in alone.items():
            torch.testing.assert_close(found[name], wanted, atol=1e-6, rtol=0)


def test_a_parameter_without_a_dimension_is_refused_in_stage_3() -> None:
    [said] = run_ranks(1, lambda: _said(lambda: _scaled(_zero(3))))
    assert "scale has no dimension, and DeepSpeed's stage 3 cannot cut it: give it the shape (1,)" in said


def _under_the_models_own(options: dict[str, Any]) -> dict[str, Tensor]:
    """Accumulate as DDP's programs do, by ``model.no_sync``."""
    accelerator = Accelerator(cpu=True, **options)
    plain = Branches()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for number in range(4):
        is_last = number % 2 == 1
        with model.no_sync() if not is_last and hasattr(model, "no_sync") else nullcontext():
            accelerator.backward(model(ONES * (1 + number)).square().mean())
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_window_of_the_models_own_no_sync_is_one_step(stage: int) -> None:
    [alone] = run_ranks(1, lambda: _under_the_models_own({}))
    found, *_ = run_ranks(2, lambda: _under_the_models_own(_zero(stage)))
    for name, wanted in alone.items():
        torch.testing.assert_close(found[name], wanted, atol=1e-6, rtol=0)


def _adam(stage: int, values: dict[str, Any], **more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"torch_adam": True, **values}}
    return _zero(stage, {"optimizer": optimizer, **more})


def _rates() -> list[tuple[float, float]]:
    accelerator = Accelerator(cpu=True, **_adam(2, {"lr": 3e-5, "weight_decay": 0.1}))
    model = Branches()
    groups = [{"params": model.first.parameters()}, {"params": model.last.parameters(), "weight_decay": 0.5}]
    model.side.requires_grad_(False)
    _, optimizer = accelerator.prepare(model, DummyOptim(groups))
    return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]


def test_the_configuration_says_what_the_program_left_open() -> None:
    assert run_ranks(1, _rates) == [[(3e-5, 0.1), (3e-5, 0.5)]]


def _scheduled(folder: str, resumes: bool, makes: bool) -> list[float]:
    warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_max_lr": 1, "warmup_type": "linear"}}
    more = {} if makes else {"scheduler": warm_up}
    accelerator = Accelerator(cpu=True, **_adam(2, {"lr": "auto"}, **more))
    plain = Branches()
    dummy = DummyOptim(plain.parameters(), lr=0.5)
    make = (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)) if makes else None
    schedule = DummyScheduler(dummy, lr_scheduler_callable=make)
    model, optimizer, schedule = accelerator.prepare(plain, dummy, schedule)
    if resumes:
        accelerator.load_state(folder)
    rates = []
    for _ in range(3):
        accelerator.backward(model(ONES).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    if not resumes:
        accelerator.save_state(folder)
    return rates


@pytest.mark.parametrize(
    ("makes", "wanted"), [(False, [0.0, 0.01, 0.02, 0.03, 0.04, 0.05]), (True, [0.5, 0.25, 0.25, 0.125, 0.125, 0.0625])]
)
def test_a_schedule_of_configuration_or_callable_goes_on_after_a_resume(
    makes: bool, wanted: list[float], tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoint")
    [first] = run_ranks(1, lambda: _scheduled(folder, False, makes))
    [then] = run_ranks(1, lambda: _scheduled(folder, True, makes))
    assert [*first, *then] == pytest.approx(wanted)


def _with_a_frozen_part(stage: int, folder: str) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", **_zero(stage))
    plain = Branches()
    plain.register_buffer("table", torch.tensor([1.001], device="cpu"))
    plain.side.requires_grad_(False)
    frozen = plain.side.weight.detach().clone()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    model, prepared = accelerator.prepare(plain, optimizer)
    for _ in range(2):
        accelerator.backward(model(ONES).mean())
        prepared.step()
        prepared.zero_grad()
        accelerator.save_state(folder)
        accelerator.load_state(folder)
    saved = accelerator.get_state_dict(model)
    is_saved_whole = not saved or torch.equal(saved["side.weight"], frozen)
    accelerator.end_training()
    states = [tuple(state["exp_avg"].shape) for state in optimizer.state.values()]
    return {
        "types": {value.dtype for value in plain.state_dict().values()},
        "frozen": torch.equal(plain.side.weight, frozen) and is_saved_whole,
        "table": plain.table.item(),
        "output": tuple(plain(ONES).shape),
        "states": states,
        "groups": [tuple(weight.shape) for weight in optimizer.param_groups[0]["params"]],
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_part_comes_back_as_it_was_and_the_model_is_whole(stage: int, tmp_path: Path) -> None:
    for found in run_ranks(2, lambda: _with_a_frozen_part(stage, str(tmp_path / "checkpoint"))):
        assert found["types"] == {torch.float32}
        assert found["frozen"]
        assert found["table"] == pytest.approx(1.001, abs=1e-6)
        assert found["output"] == (2, 1)
        assert found["states"] == [(3, 3), (3,), (1, 3), (1,)]
        assert found["groups"] == [(3, 3), (3,), (3, 3), (3,), (1, 3), (1,)]


def _in_parts(parts: list[int]) -> tuple[Tensor, dict[int, Any]]:
    plain = Branches()
    dummy = DummyOptim(plain.parameters(), lr=0.1)
    for steps in parts:
        accelerator = Accelerator(cpu=True, **_adam(3, {"lr": "auto"}))
        model, optimizer = accelerator.prepare(plain, dummy)
        for number in range(steps):
            accelerator.backward(model(ONES * (1 + number % 2)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()
    return plain.first.weight.detach().clone(), dict(dummy.state_dict()["state"])


def test_states_of_the_configured_optimizer_go_on_in_the_next_training() -> None:
    (whole, states), *_ = run_ranks(2, lambda: _in_parts([4]))
    (continued, others), *_ = run_ranks(2, lambda: _in_parts([2, 2]))
    torch.testing.assert_close(continued, whole)
    assert states[0]["step"] == others[0]["step"] == 4


def _after_out_of_memory() -> tuple[list[int], list[int]]:
    tried, sizes = [], []
    config = {"train_micro_batch_size_per_gpu": "auto"}
    accelerator = Accelerator(cpu=True, **_zero(2, config))

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        plain = nn.Linear(3, 2)
        loader: Any = torch.utils.data.DataLoader(torch.ones(16, 3, device="cpu"), batch_size=batch_size)
        model, optimizer, loader = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loader)
        sizes.append(accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"])
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        for batch in loader:
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()

    train()
    return tried, sizes


def test_a_smaller_batch_is_tried_after_out_of_memory() -> None:
    assert run_ranks(1, _after_out_of_memory) == [([8, 4], [8, 4])]
