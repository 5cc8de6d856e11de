"""DeepSpeed trains like one process, in each stage; checkpoints and results are those of any other strategy."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import killing
from nbaccel import Accelerator, DeepSpeedPlugin, testing
from nbaccel.errors import NotPrepared, RankDied, RanksFailed
from nbaccel.testing import conformance
from nbaccel.utils import DummyOptim, DummyScheduler

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed: make test-deepspeed"),
    pytest.mark.timeout(600),
]

run_ranks = functools.partial(testing.run_ranks, timeout_s=300)  # each imports deepspeed anew

REFUSED = {
    "plain": "a model that is prepared before its optimizer",
    "two models": "a second trained model",
    "out of memory": "gradients that forward_backward would lead",
    "unused": "takes gradients that nobody computed as zeros, so weight decay moves what was not used",
    "fp16": "DeepSpeed has no fp16 on most CPUs",
}
"""Programs that ZeRO cannot train like one process, and why."""


def _zero(stage: int, **fields: Any) -> dict[str, Any]:
    """Return options of a stage, in which the small parameters of a test are cut too."""
    table = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return {"deepspeed_plugin": DeepSpeedPlugin({"zero_optimization": table}, **fields)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_trains_like_one_process(stage: int, ranks: int) -> None:
    programs = [name for name in conformance.PROGRAMS if name not in REFUSED]
    found = conformance.check("deepspeed", programs, ranks=ranks, options=lambda: _zero(stage), timeout_s=500)
    assert [result.program for result in found] == programs
    assert not [str(result) for result in found if not result.is_within]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("plain", "prepare both in one call"),
        ("two models", "DeepSpeed trains one model with one optimizer"),
        ("out of memory", "forward_backward leads no step whose gradients DeepSpeed keeps"),
    ],
)
def test_a_program_that_zero_cannot_do_is_refused_with_its_reason(program: str, says: str) -> None:
    with pytest.raises(RanksFailed, match=says):
        conformance.check("deepspeed", [program], ranks=1, options=lambda: _zero(2), timeout_s=200)


def _without_fp16() -> dict[str, Any]:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: False
    return _zero(2)


def test_fp16_is_refused_on_a_processor_without_it() -> None:
    with pytest.raises(RanksFailed, match="DeepSpeed cannot compute in it on this cpu"):
        conformance.check("deepspeed", ["fp16"], ranks=1, options=_without_fp16, timeout_s=200)


def test_what_was_not_used_is_taken_for_a_gradient_of_zero() -> None:
    [found] = conformance.check("deepspeed", ["unused"], ranks=1, options=lambda: _zero(2), timeout_s=200)
    assert not found.is_within
    assert found.largest < 1e-2  # weight decay of what was not used, and nothing else


class Net(nn.Module):
    """Embeddings that are tied, a part that is frozen, and parameters of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.up, self.fixed, self.down = nn.Linear(6, 13), nn.Linear(13, 13), nn.Linear(13, 6)
        self.head.weight = self.embed.weight
        self.fixed.requires_grad_(False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.tanh(self.fixed(self.up(self.embed(words))))))


def _words(steps: int) -> torch.Tensor:
    return torch.randint(0, 11, (steps * 8, 4), generator=torch.Generator().manual_seed(1))


def _train(steps: int, options: dict[str, Any], folder: str = "", goes_on: bool = False) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, **options)
    torch.manual_seed(0)
    model = Net()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.dim() > 1], "weight_decay": 0.1},
        {"params": [weight for weight in trained if weight.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    # What is saved is the number of moves of so many ranks, which others would count otherwise.
    decay = 1.0 if folder else 0.1
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 * accelerator.num_processes, decay)
    loader: Any = torch.utils.data.DataLoader(_words(steps), batch_size=8 // accelerator.num_processes)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    if goes_on:
        accelerator.load_state(folder)
    for words in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    if folder and not goes_on:
        accelerator.save_state(folder)
    state = accelerator.get_state_dict(model)
    return {name: value.detach().clone() for name, value in state.items()} | {
        "lr": torch.tensor(schedule.get_last_lr())
    }


def _largest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 2)
        self.query, self.value = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        scores = (self.query(x) @ x.transpose(1, 2)).softmax(-1)
        return self.head((scores @ self.value(x)).mean(1))


def _train_adapters(steps: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train adapters of peft, which are all that is saved of a model."""
    import peft

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, **options)
    torch.manual_seed(0)
    model: Any = peft.get_peft_model(Attention(), peft.LoraConfig(r=2, target_modules=["query", "value"]))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(_words(steps), batch_size=8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for words in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(words), words.sum(1) % 2))
            accelerator.clip_grad_norm_(trained, 0.1)
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return {}
    adapters = peft.get_peft_model_state_dict(accelerator.unwrap_model(model), state_dict=state)
    return {name: value.detach().clone() for name, value in adapters.items()}


TRAININGS = {
    "short windows, clipping, two groups, a schedule, tied weights and a frozen part": _train,
    "LoRA by peft, short windows and clipping": _train_adapters,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_trained_is_that_of_one_process(stage: int, ranks: int) -> None:
    def train(options: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
        return {name: train(7, options) for name, train in TRAININGS.items()}

    [alone] = run_ranks(1, lambda: train({}))
    trained = run_ranks(ranks, lambda: train(_zero(stage)))[0]
    for name, wanted in alone.items():
        assert wanted
        assert _largest(wanted, trained[name]) <= 1e-6, name


@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (2, 2), (3, 2)])
def test_states_on_the_host_train_alike(stage: int, ranks: int) -> None:
    fields: dict[str, Any] = {"stage": stage, "offload_optimizer_device": "cpu"}
    if stage == 3:
        fields["offload_param_device"] = "cpu"
    [alone] = run_ranks(1, lambda: _train(7, {}))
    trained, *_ = run_ranks(ranks, lambda: _train(7, _zero(**fields)))
    assert _largest(alone, trained) <= 1e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_goes_on_in_any_strategy_and_in_one_process(stage: int, tmp_path: Path) -> None:
    ours = _zero(stage)
    folder = str(tmp_path / "checkpoint")
    run_ranks(2, lambda: _train(6, ours, folder))
    assert not list(tmp_path.rglob("*.pkl"))
    assert not list(tmp_path.rglob("*.pt"))
    results = {
        "one process": run_ranks(1, lambda: _train(6, {}, folder, goes_on=True))[0],
        "ddp": run_ranks(2, lambda: _train(6, {"strategy": "ddp"}, folder, goes_on=True))[0],
        "fsdp": run_ranks(2, lambda: _train(6, {"strategy": "fsdp"}, folder, goes_on=True))[0],
        "deepspeed": run_ranks(2, lambda: _train(6, ours, folder, goes_on=True))[0],
    }
    for name, result in results.items():
        assert _largest(result, results["one process"]) <= 1e-6, name


def _by_configuration(stage: int) -> tuple[list[float], float]:
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": "auto",
    }
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(config))
    torch.manual_seed(0)
    model = Net()
    optimizer = DummyOptim([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    schedule = DummyScheduler(optimizer, warmup_num_steps=4)
    loader: Any = torch.utils.data.DataLoader(_words(1), batch_size=4)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    losses = []
    for words in (words for _ in range(12) for words in loader):
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, schedule.get_last_lr()[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_configuration_brings_optimizer_and_schedule(stage: int) -> None:
    (losses, rate), *_ = run_ranks(2, lambda: _by_configuration(stage))
    assert losses[-1] < losses[0]
    assert rate == pytest.approx(1e-2)


def _refusals() -> list[str]:
    said = []
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    accelerator.prepare(first, torch.optim.SGD(first.parameters(), 0.1))
    for call in (
        lambda: accelerator.prepare(second, torch.optim.SGD(second.parameters(), 0.1)),
        lambda: accelerator.clip_grad_norm_([first.weight], 1.0),
        lambda: Accelerator(cpu=True, **_zero(2)).prepare(
            nn.Linear(2, 2), second, torch.optim.SGD([*second.parameters(), *nn.Linear(2, 2).parameters()], 0.1)
        ),
        lambda: accelerator.prepare(torch.optim.SGD(accelerator.prepare(second).parameters(), 0.1)),
    ):
        try:
            call()
        except (NotImplementedError, ValueError) as error:
            said.append(str(error))
    return said


def test_what_zero_cannot_do_is_refused_with_what_can() -> None:
    second, clipping, shared, late = run_ranks(2, _refusals)[0]
    assert "SGD has 2 parameters that are not this model's" in shared
    assert "DeepSpeed trains one model with one optimizer in a run" in second
    assert "pass model.parameters()" in clipping
    assert "prepare both in one call" in late


def _one_after_the_other() -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kinds, losses = [], []
    for options in ({"strategy": "ddp"}, _zero(3), {"strategy": "fsdp"}):
        accelerator = Accelerator(cpu=True, **options)
        prepared, stepping = accelerator.prepare(model, optimizer)
        loss = prepared(torch.ones(3, 4)).square().mean()
        accelerator.backward(loss)
        stepping.step()
        stepping.zero_grad()
        kinds.append(type(prepared).__name__)
        losses.append(loss.item())
        accelerator.destroy_process_group()
        if "deepspeed_plugin" in options:
            with pytest.raises(NotPrepared):
                accelerator.backward(model(torch.ones(3, 4)).mean())
        del accelerator, prepared, stepping
    return kinds, losses


def test_a_model_goes_from_ddp_to_deepspeed_to_fsdp() -> None:
    kinds, losses = run_ranks(2, _one_after_the_other)[0]
    assert "DeepSpeedEngine" in kinds
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for wanted in losses:
        loss = model(torch.ones(3, 4)).square().mean()
        assert loss.item() == pytest.approx(wanted, abs=1e-6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _saved_twice(folder: str, rank: int, point: int) -> None:
    """Save after two steps, and after two more into the same folder, in which one rank is killed."""
    accelerator = Accelerator(cpu=True, **_zero(3))
    torch.manual_seed(0)
    plain: nn.Module = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    for number in range(4):
        if number == 2:
            accelerator.save_state(folder)
        accelerator.backward(model(torch.full((2, 3), float(number + 1))).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.process_index == rank:
        killing.Points(point).watch(pytest.MonkeyPatch())
    accelerator.save_state(folder)


def _loaded(folder: str) -> tuple[torch.Tensor, float]:
    accelerator = Accelerator(cpu=True, **_zero(3))
    plain: nn.Module = nn.Linear(3, 2)
    optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(plain, optimizer)
    accelerator.load_state(folder)
    state = accelerator.get_state_dict(model)  # on every rank
    weight = state["weight"].clone() if accelerator.is_main_process else torch.zeros(0)
    accelerator.end_training()
    return weight, float(next(iter(optimizer.state_dict()["state"].values()))["step"])


@pytest.mark.parametrize(("rank", "point"), [(0, 0), (0, 2), (1, 0)])
def test_the_older_checkpoint_loads_after_a_rank_was_killed_in_a_save(rank: int, point: int, tmp_path: Path) -> None:
    folder, shared = str(tmp_path / "checkpoint"), set(os.listdir("/dev/shm"))
    with pytest.raises(RankDied) as caught:
        run_ranks(2, lambda: _saved_twice(folder, rank, point))
    assert caught.value.rank == rank
    assert set(os.listdir("/dev/shm")) <= shared
    (weight, steps), *_ = run_ranks(2, lambda: _loaded(folder))
    assert steps == 2.0
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in (1.0, 2.0):
        optimizer.zero_grad()
        model(torch.full((2, 3), number)).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(weight, model.weight.detach(), atol=1e-6, rtol=0)
