"""Whole programs of Accelerate's users and of tutorials under ZeRO: as under DDP, or refused with what to write."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from compat.test_programs import NAMES, answer, assert_alike
from nbaccel import Accelerator, DeepSpeedPlugin, testing
from nbaccel.errors import RanksFailed
from nbaccel.features.deepspeed.native_build import import_deepspeed

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed: make test-deepspeed"),
    pytest.mark.timeout(900),
]

run_ranks = functools.partial(testing.run_ranks, timeout_s=300)


class YourModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, labels: Tensor, use_checkpointing: bool = False) -> Tensor:
        if use_checkpointing:
            hidden = torch.utils.checkpoint.checkpoint(self.backbone, x, use_reentrant=False)
        else:
            hidden = self.backbone(x)
        return F.cross_entropy(self.head(hidden.relu()), labels)


def your_dataloader(batch_size: int) -> DataLoader[Any]:
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0), device="cpu")
    samples = [{"x": x, "labels": (x.sum() > 0).long()} for x in inputs]
    return DataLoader(samples, batch_size=batch_size)  # type: ignore[arg-type]


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _portable_template(options: dict[str, Any]) -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, **options)
    torch.manual_seed(42 + accelerator.process_index)
    model: Any = YourModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_loader: Any = your_dataloader(batch_size=8 // accelerator.num_processes)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    for epoch in range(2):
        model.train()
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.wait_for_everyone()
        accelerator.save_state(f"checkpoint_epoch_{epoch}")
    accelerator.end_training()
    return _values(accelerator.unwrap_model(model))


def _workflow(options: dict[str, Any]) -> dict[str, Tensor]:
    """Train within ``accelerator.autocast``, with a schedule that is prepared with its optimizer alone."""
    accelerator = Accelerator(cpu=True, **options)
    model: Any = YourModel()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2 * accelerator.num_processes, 0.5)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    model, train_loader = accelerator.prepare(model, your_dataloader(8 // accelerator.num_processes))
    for epoch in range(2):
        for batch in train_loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = model(**batch, use_checkpointing=True)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(f"checkpoints/epoch_{epoch}")
    accelerator.end_training()
    return _values(accelerator.unwrap_model(model))


def _two_stages(options: dict[str, Any]) -> dict[str, Tensor]:
    """Train a head over a frozen part, give the process group up, and train all of it."""
    accelerator = Accelerator(cpu=True, **options)
    model = YourModel()
    for is_frozen in (True, False):
        model.backbone.requires_grad_(not is_frozen)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        prepared: Any
        prepared, stepping, loader = accelerator.prepare(
            model, optimizer, your_dataloader(8 // accelerator.num_processes)
        )
        for batch in loader:
            accelerator.backward(prepared(**batch))
            stepping.step()
            stepping.zero_grad()
        accelerator.destroy_process_group()
    return _values(model)


def _experiments(options: dict[str, Any]) -> dict[str, Tensor]:
    values = {}
    for experiment in range(3):
        accelerator = Accelerator(cpu=True, **options)
        model: Any = YourModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (experiment + 1))
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, your_dataloader(8 // accelerator.num_processes)
        )
        for batch in loader:
            accelerator.backward(model(**batch))
            optimizer.step()
            optimizer.zero_grad()
        state = accelerator.get_state_dict(model)
        values |= {f"{experiment}.{name}": value.detach().clone() for name, value in state.items()}
        accelerator.destroy_process_group()
    return values


TUTORIALS: dict[str, Callable[[dict[str, Any]], dict[str, Tensor]]] = {
    "a portable template": _portable_template,
    "a workflow": _workflow,
    "two stages": _two_stages,
    "short experiments": _experiments,
}


def _plugin(stage: int) -> dict[str, Any]:
    table = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return {"deepspeed_plugin": DeepSpeedPlugin({"zero_optimization": table})}


def _all(folder: Path, options: Callable[[], dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    warnings.simplefilter("ignore")
    os.chdir(folder)
    return {name: train(options()) for name, train in TUTORIALS.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_tutorials_program_trains_like_one_process(stage: int, ranks: int, tmp_path: Path) -> None:
    for name in ("alone", "shared"):
        (tmp_path / name).mkdir()
    [alone] = run_ranks(1, lambda: _all(tmp_path / "alone", dict))
    found = run_ranks(ranks, lambda: _all(tmp_path / "shared", lambda: _plugin(stage)))[0]
    for name, wanted in alone.items():
        assert found[name].keys() == wanted.keys()
        largest = max(float((found[name][key] - value).abs().max()) for key, value in wanted.items())
        assert largest <= 1e-6, name


# -- programs of Accelerate's users, where its launch has chosen DeepSpeed

_ONE = "DeepSpeed trains one model with one optimizer in a run"

REFUSED = {
    "gan": _ONE,
    "penalty": _ONE,
    "local_sgd": "no rank has gradients of its own to step with",
    "save_hooks": "parameters that are not this model's, and DeepSpeed trains those of one model",
}
"""Programs that ZeRO cannot train, and what is said."""

OTHERWISE = {
    "export": "half-precision weights, where DDP computes under autocast with whole ones",
    "reward_model": "the kind of training, which it tells",
}
"""Programs whose answers differ from those under DDP, and why. All others are equal."""

WITH_WEIGHTS = {
    "lora": "compares a frozen weight",
    "new_token": "looks into the embeddings",
    "reward_model": "writes its gain between steps",
}
"""Programs that read or write weights by themselves, which are empty in stage 3: not for that stage."""


def _answer(name: str, stage: int) -> Any:
    warnings.simplefilter("ignore")
    if stage:
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
    return answer(name)


def _answers(names: list[str], stage: int, ranks: int) -> dict[str, tuple[Any, Any]]:
    """Return what each program says under DDP, and under ZeRO: text where it is refused."""
    for module in ("torch._dynamo", "sklearn.datasets", "sklearn.model_selection", "peft"):
        import_module(module)
    import_deepspeed(torch.device("cpu"))
    said: dict[str, tuple[Any, Any]] = {}
    for name in names:
        plain = None if name in REFUSED else run_ranks(ranks, _answer, name, 0)[0]
        try:
            said[name] = plain, run_ranks(ranks, _answer, name, stage)[0]
        except RanksFailed as error:
            said[name] = plain, str(error)
    return said


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_unchanged_program_says_the_same_under_zero_and_under_ddp(stage: int) -> None:
    names = [name for name in NAMES if stage < 3 or name not in WITH_WEIGHTS]
    [said] = testing.run_ranks(1, lambda: _answers(names, stage, 2), timeout_s=2900)
    for name, (plain, ours) in said.items():
        if name in REFUSED:
            assert REFUSED[name] in ours, name
        elif name in OTHERWISE:
            assert ours.keys() == plain.keys(), name
        else:
            assert_alike(ours, plain, name)
