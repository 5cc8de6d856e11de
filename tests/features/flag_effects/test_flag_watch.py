"""Flags that have no effect are named before the first step, by who trains: one real run for each kind of loop."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, launch
from nbaccel.base.events import LoopKind
from nbaccel.utils import find_executable_batch_size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class Net(nn.Module):
    """A model that a transformers Trainer takes as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.line(x).square().mean()}


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8))["loss"].backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def told(program: Callable[[], None]) -> list[str]:
    """Return what `program` is told of flags in this rank."""
    with contextlib.redirect_stderr(io.StringIO()) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program()
    return [line for line in caught.getvalue().splitlines() if line.startswith("nbaccel: ")]


def told_rank_0(
    program: Callable[[], None], precision: str | None = "bf16", strategy: str | None = "fsdp"
) -> list[str]:
    flags = {"mixed_precision": precision, "strategy": strategy}
    accumulate = 4 if precision else None
    of_main, of_other = launch(
        told, 2, args=(program,), cpu=True, gradient_accumulation_steps=accumulate, **flags
    ).values
    assert of_other == []
    return of_main


def loop_that_prepares_nothing() -> None:
    model = Net()
    train(model, sgd(model))


@find_executable_batch_size(starting_batch_size=2)
def loop_below_a_function_of_ours(batch_size: int) -> None:
    loop_that_prepares_nothing()


def ddp_of_its_own() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Net())
    train(model, sgd(model))
    dist.destroy_process_group()


def accelerates_accelerator() -> None:
    from accelerate import Accelerator as Theirs

    accelerator = Theirs(cpu=True)
    model = Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train(model, optimizer)
    accelerator.end_training()


def transformers_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    data = [{"x": torch.ones(8)}] * 8
    arguments = TrainingArguments("out", max_steps=2, use_cpu=True, report_to="none", save_strategy="no", optim="sgd",
                                  disable_tqdm=True)  # fmt: skip
    Trainer(Net(), arguments, train_dataset=data).train()


def lightnings_fabric() -> None:
    import lightning

    fabric = lightning.Fabric(accelerator="cpu")
    fabric.launch()
    model = Net()
    model, optimizer = fabric.setup(model, sgd(model))
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(2, 8))["loss"])
        optimizer.step()


def lightnings_trainer() -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.net(batch[0])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, **quiet)
    trainer.fit(Module(), loader())


def prepared_loop(accumulates: str) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(bare := Net(), sgd(bare), loader())
    for at, (x,) in enumerate(batches):
        with accelerator.accumulate(model) if accumulates == "by a block" else contextlib.nullcontext():
            accelerator.backward(model(x)["loss"])
            if accumulates != "by its own count" or at % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("accumulates", ["", "by a block", "by its own count"])
def test_a_prepared_loop_that_steps_with_every_batch_is_told_so(accumulates: str) -> None:
    run = launch(told, 1, args=(partial(prepared_loop, accumulates),), cpu=True, gradient_accumulation_steps=4)
    line = (
        "nbaccel: gradient_accumulation_steps=4 has no effect above a prepared loop: its own value wins, a step for "
        "each batch. Instead: `with accelerator.accumulate(model):` around each batch."
    )
    assert run.values == [[] if accumulates else [line]]


PRECISION, BATCHES, SHARDS = "mixed_precision='bf16'", "gradient_accumulation_steps=4", "strategy='fsdp'"
ALL = {PRECISION, BATCHES, SHARDS}


@pytest.mark.parametrize(
    ("program", "kind", "lack", "instead"),
    [
        (loop_that_prepares_nothing, LoopKind.UNMODIFIED, {SHARDS}, "model, optimizer, loader = acceler"),
        (loop_below_a_function_of_ours, LoopKind.UNMODIFIED, {SHARDS}, "model, optimizer, loader = accelera"),
        (ddp_of_its_own, LoopKind.DDP, ALL, "hand the bare model to prepare, model, optimizer, loader = accelerator."),
        (accelerates_accelerator, LoopKind.ACCELERATE, {SHARDS}, "`from nbaccel import Accelerator`"),
        (transformers_trainer, LoopKind.TRAINER, {BATCHES, SHARDS}, "TrainingArguments(gradient_accumulation_steps=4)"),
        pytest.param(lightnings_trainer, LoopKind.LIGHTNING, ALL, "Trainer(accumulate_grad_batches=4)",
                     marks=pytest.mark.full),
        pytest.param(lightnings_fabric, LoopKind.FABRIC, ALL, 'Fabric(precision="bf16-mixed")', marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_each_kind_of_loop_is_told_what_has_no_effect_and_what_to_write_instead(
    program: Callable[[], None],
    kind: LoopKind,
    lack: set[str],
    instead: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if program not in (loop_that_prepares_nothing, loop_below_a_function_of_ours, ddp_of_its_own):
        pytest.importorskip({"t": "transformers", "l": "lightning", "a": "accelerate"}[program.__name__[0]])
    lines = told_rank_0(program)
    assert all(f" no effect above {kind}: " in line for line in lines)
    assert {flag for flag in ALL for line in lines if flag in line.partition(" no effect ")[0]} == lack
    assert any(f"Instead: {instead}" in line for line in lines), lines


def trainer_of_arguments_that_the_notebook_made() -> None:
    with patch.dict(os.environ, {"ACCELERATE_MIXED_PRECISION": "no"}):
        transformers_trainer()


def test_a_trainer_whose_arguments_have_another_precision_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    [line] = [line for line in told_rank_0(trainer_of_arguments_that_the_notebook_made, strategy=None)
              if "mixed_precision" in line]  # fmt: skip
    assert line == (
        "nbaccel: mixed_precision='bf16' has no effect above transformers' Trainer: its own value wins, no. Instead: "
        "TrainingArguments(bf16=True), made in this cell."
    )


def prepared(strategy: str | None = None) -> None:
    accelerator = Accelerator(strategy=strategy)
    model = Net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    train(model, optimizer)


def prepared_by_ddp_of_its_choice() -> None:
    prepared("ddp")


def sharded_by_itself() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = Net()
    fully_shard(model)
    train(model, sgd(model))
    dist.destroy_process_group()


def sharded_by_itself_as_the_first_version_did() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    train(model, sgd(model))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "program",
    [sharded_by_itself, prepared, sharded_by_itself_as_the_first_version_did, prepared_by_ddp_of_its_choice],
)
def test_who_shards_or_chooses_by_itself_is_told_nothing(program: Callable[[], None]) -> None:
    assert told_rank_0(program, precision=None) == []


def test_without_such_flags_nothing_is_said() -> None:
    assert told_rank_0(ddp_of_its_own, None, "ddp") == []


SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
print("seeded by", torch.initial_seed())
dist.init_process_group("gloo")
model = MODEL(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.ones(2, 8)).mean().backward()
    optimizer.step()
print("trained")
dist.destroy_process_group()
"""


def launched(folder: Path, flags: str, model: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT.replace("MODEL", model), encoding="utf-8")
    command = [sys.executable, "-m", "nbaccel", "launch", "--cpu", *flags.split(), "train.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("wraps", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_script_is_told_as_well(tmp_path: Path, wraps: bool) -> None:
    ended = launched(tmp_path, "-n 2 --strategy fsdp -p bf16 -a 4 --seed 3", "DistributedDataParallel" if wraps else "")
    assert ended.returncode == 0, ended.stderr
    if wraps:
        assert ended.stderr.count("nbaccel: -p bf16, -a 4 and --strategy fsdp have no effect above ") == 1
        assert "out by itself. Instead: hand the bare model to prepare" in ended.stderr
    else:
        assert ended.stderr.count("nbaccel: --strategy fsdp has no effect above an unmodified loop") == 1
        assert ended.stderr.count("nbaccel: -p bf16 and -a 4 have no effect above an unmodified loop: a script's") == 1
    assert sorted(line for line in ended.stdout.splitlines() if "seeded" in line) == ["seeded by 3", "seeded by 4"]


def test_a_script_whose_work_would_be_lost_is_refused_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "nbaccel.toml").write_text('mixed-precision = "bf16"\n', encoding="utf-8")
    ended = launched(tmp_path, "-n 1 --checkpoint-every 10min")
    assert ended.returncode == 1
    refused = "FlagWithoutEffect: --checkpoint-every 10min has no effect above an unmodified loop: the loop prepares no"
    assert refused in ended.stderr
    assert "Nothing was trained yet." in ended.stderr
    assert "trained" not in ended.stdout
    ended = launched(tmp_path, "-n 1")
    assert "nbaccel: -p bf16 (of the settings) has no effect above an unmodified loop: a script's" in ended.stderr
    assert "trained" in ended.stdout
