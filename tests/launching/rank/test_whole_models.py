"""A model that is whole in every rank, where the strategy of the run is "fsdp", is reported at its first step."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

MISSED = (
    "NOT sharded: SGD steps a whole model in each of 2 ranks (9 parameters). The strategy fsdp is that of nbaccel's "
)


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
    """Return what `program` is told of shards in this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    return [text for each in caught if (text := str(each.message)).startswith("NOT sharded")]


def told_rank_0(program: Callable[[], None], strategy: str | None = "fsdp") -> list[str]:
    of_main, of_other = launch(told, 2, args=(program,), cpu=True, strategy=strategy).values
    assert of_other == []
    return of_main


def loop_that_prepares_nothing() -> None:
    model = Net()
    train(model, sgd(model))


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


@pytest.mark.parametrize(
    ("program", "who", "remedy"),
    [
        (
            loop_that_prepares_nothing,
            "the loop prepares nothing",
            "\n    model, optimizer, loader = accelerator.prepare",
        ),
        (ddp_of_its_own, "the program wraps its model in DistributedDataParallel", "the bare model to prepare"),
        (accelerates_accelerator, "Accelerate's own Accelerator does not read it", "`from nbaccel import Accelerator`"),
        (transformers_trainer, "transformers' Trainer does not read it", "TrainingArguments(fsdp=True), which needs"),
        pytest.param(lightnings_fabric, "Lightning's Fabric does not read it", 'Fabric(strategy="fsdp"), which needs',
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_who_trains_whole_models_is_told_once_how_to_shard_them(
    program: Callable[[], None], who: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if program is not loop_that_prepares_nothing and program is not ddp_of_its_own:
        pytest.importorskip({"t": "transformers", "l": "lightning", "a": "accelerate"}[program.__name__[0]])
    [text] = told_rank_0(program)
    assert text.startswith(MISSED)
    assert who in text
    assert remedy in text


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
    assert told_rank_0(program) == []


def test_other_strategies_say_nothing() -> None:
    assert told_rank_0(ddp_of_its_own, None) == []


@pytest.mark.parametrize("wraps", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_script_is_told_as_well(tmp_path: Path, wraps: bool) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo')\n"
        f"model = {'DistributedDataParallel' if wraps else ''}(torch.nn.Linear(8, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(2):\n"
        "    model(torch.ones(2, 8)).mean().backward()\n"
        "    optimizer.step()\n"
        "dist.destroy_process_group()\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "nbaccel", "launch", "-n", "2", "--cpu", "--strategy", "fsdp", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(MISSED) == 1
    assert ("by itself: hand the bare model" if wraps else "the loop prepares nothing") in ended.stderr
