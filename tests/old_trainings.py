"""The programs whose files are kept in tests/old_files, and what they read from such files.

Used when files were written and whenever they are read: nothing here may change as long as the files are there. By
public names only, since everything else may move.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import nbaccel.utils
from nbaccel import Accelerator, GradScalerKwargs, ProjectConfiguration
from nbaccel.testing import MemLimit, run_ranks

__all__ = [
    "FOLDER",
    "SETTINGS",
    "Program",
    "autosaved",
    "continued",
    "continued_in",
    "draws",
    "found_size",
    "load_exported",
    "load_more_than_data",
    "load_scaled",
    "log_numbers",
    "numbered",
    "save_exported",
    "save_more_than_data",
    "save_scaled",
]

FOLDER = Path(__file__).with_name("old_files")

SAMPLES, BATCH_SIZE, ACCUMULATION = 24, 2, 2

SETTINGS = {
    "num-processes": "2",
    "mixed-precision": "bf16",
    "accumulate": "4",
    "out": "model,history",
    "in": "data",
    "ranks": "0,2-3",
    "devices": "0,1",
    "cpu": "true",
    "free-kernel": "true",
    "timeout": "120",
    "hang-timeout": "90",
    "start": "fork",
    "plot": "loss,lr",
    "plain": "true",
    "seed": "17",
    "debug": "true",
    "independent": "true",
    "strict": "true",
    "batches": "split",
    "oom": "shrink",
    "checkpoint-every": "10min",
    "checkpoint-dir": "saved here",
    "keep-checkpoints": "5",
    "resume": "saved here/checkpoint_4",
    "time-limit": "8h",
}
"""A value of each setting of nbaccel.toml."""


class Tally:
    """An object of the program's own with a state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@dataclass
class Program:
    """A training in mid-epoch, of which everything is in its checkpoint: a layer that is frozen, dropout, AdamW, a
    schedule, shuffled data, an accumulation, an object of its own."""

    accelerator: Accelerator
    tally: Tally
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any

    @classmethod
    def start(cls, **options: Any) -> Program:
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION, **options)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.25), torch.nn.Linear(3, 2))
        model[2].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
        numbers = torch.arange(SAMPLES)
        inputs = torch.sin(torch.arange(SAMPLES * 4.0).reshape(SAMPLES, 4))
        loader = DataLoader(TensorDataset(numbers, inputs), BATCH_SIZE, shuffle=True)
        tally = Tally(seen=0, last=None, curve=[])
        accelerator.register_for_checkpointing(tally)
        return cls(accelerator, tally, *accelerator.prepare(model, optimizer, scheduler, loader))

    def train_on(self, numbers: torch.Tensor, inputs: torch.Tensor) -> float:
        with self.accelerator.accumulate(self.model):
            loss = self.model(inputs).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        state = self.tally.state
        self.tally.load_state_dict(
            {"seen": state["seen"] + len(numbers), "last": numbers, "curve": [*state["curve"], loss.item()]}
        )
        return loss.item()

    def epoch(
        self, batches: int | None = None, then: Callable[[], object] | None = None
    ) -> tuple[list[list[int]], list[float]]:
        """The numbers of the samples of each batch, and the losses, of what is left of the epoch or of so many batches.

        then: called after these, inside of the loop; what comes after them is returned.
        """
        taken: list[list[int]] = []
        losses: list[float] = []
        for numbers, inputs in self.loader:
            taken.append(numbers.tolist())
            losses.append(self.train_on(numbers, inputs))
            if len(taken) == batches:
                if then is None:
                    break
                then()
                taken, losses, batches = [], [], None
        return taken, losses

    def rest(self, state: dict[str, Any], drawn: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Train to the end of the next epoch.

        state, drawn: where it began.  options: for what is left of this epoch.
        """
        this, following = self.epoch(**options), self.epoch()
        self.accelerator.end_training()
        return {
            "state": state,
            "draws": drawn,
            "batches": [this[0], following[0]],
            "losses": [this[1], following[1]],
            "weights at the end": self.state()["weights"],
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, as JSON has it."""
        inner = self.accelerator.unwrap_model(self.model)
        moments = self.optimizer.state_dict()["state"]
        tally = self.tally.state
        return {
            "weights": {name: value.tolist() for name, value in inner.state_dict().items()},
            "moments": {
                str(index): {name: torch.as_tensor(value).tolist() for name, value in of.items()}
                for index, of in moments.items()
            },
            "lr": self.scheduler.get_last_lr(),
            "scheduler": self.scheduler.state_dict()["last_epoch"],
            "tally": {**tally, "last": None if tally["last"] is None else tally["last"].tolist()},
        }


def draws() -> dict[str, Any]:
    """The next numbers of each generator."""
    return {
        "python": random.random(),
        "numpy": np.random.random(2).tolist(),
        "torch": torch.rand(2, device="cpu").tolist(),
    }


def numbered(folder: str) -> ProjectConfiguration:
    return ProjectConfiguration(folder, automatic_checkpoint_naming=True)


def continued(project: str | None, checkpoint: str | None) -> dict[str, Any]:
    """A rank that continues from a checkpoint, or from the newest of a project's, to the end of the next epoch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random numbers that are derived in another number of ranks
        program = Program.start(project_config=None if project is None else numbered(project))
        program.accelerator.load_state(checkpoint)
        return program.rest(program.state(), draws())


def continued_in(ranks: int, project: str | None, checkpoint: str | None) -> list[dict[str, Any]]:
    if ranks == 1:
        return [continued(project, checkpoint)]
    return run_ranks(ranks, continued, project, checkpoint)


def autosaved(folder: str, batches: int | None, **options: Any) -> dict[str, Any]:
    """A program that saves itself, or that goes on from what it saved.  batches: after which of epoch 2 it ends."""
    program = Program.start(checkpoint_dir=folder, **options)
    memory = program.accelerator.remember(best=1e9, history=[], weights=torch.zeros(2, device="cpu"))
    epochs, taken = [], []
    for epoch in program.accelerator.epochs(2):
        epochs.append(epoch)
        numbers, losses = program.epoch(batches if epoch == 1 else None)
        taken.append(numbers)
        memory.best = min(memory.best, *losses)
        memory.history.append([epoch, len(losses)])
        memory.weights = torch.tensor([0.5, 0.25], device="cpu") + epoch
    program.accelerator.end_training()
    return {
        "epochs": epochs,
        "batches": taken,
        "best": memory.best,
        "history": memory.history,
        "weights": memory.weights.tolist(),
        "weights at the end": program.state()["weights"],
    }


def _scaled() -> tuple[Accelerator, Callable[[], None]]:
    """An Accelerator in fp16, and what takes a step in it."""
    torch.manual_seed(6)
    scaler = GradScalerKwargs(init_scale=64.0, growth_interval=3)
    accelerator = Accelerator("fp16", cpu=True, kwargs_handlers=[scaler])
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        accelerator.backward(model(torch.ones(1, 2, device="cpu")).sum())
        optimizer.step()
        optimizer.zero_grad()

    return accelerator, step


def save_scaled(folder: str) -> dict[str, Any]:
    """A checkpoint of fp16, whose gradient scaler has grown; returns what is stored of the scaler."""
    accelerator, step = _scaled()
    for _ in range(5):
        step()
    accelerator.save_state(folder)
    state = json.loads(Path(folder, "training.json").read_text())["dict"]
    names_and_values = state[state.index("precision") + 1]["dict"]
    return dict(zip(names_and_values[::2], names_and_values[1::2], strict=True))


def load_scaled(folder: str) -> dict[str, Any]:
    accelerator, _ = _scaled()
    accelerator.load_state(folder)
    return dict(accelerator.scaler.state_dict())


def save_more_than_data(folder: str) -> None:
    """A checkpoint one part of which is a pickle."""
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(Tally(took=timedelta(seconds=90)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a pickle
        accelerator.save_state(folder)


def load_more_than_data(folder: str, **options: Any) -> dict[str, Any]:
    accelerator, tally = Accelerator(cpu=True), Tally()
    accelerator.register_for_checkpointing(tally)
    accelerator.load_state(folder, **options)
    return tally.state


def _exported_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))


def save_exported(folder: Path) -> dict[str, Any]:
    """The same model in each way that models leave a training; returns its state dict."""
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_exported_model())
    accelerator.save_model(model, folder / "whole")
    accelerator.save_model(model, folder / "shards", max_shard_size=64)
    accelerator.save_model(model, folder / "pickled", safe_serialization=False)
    return {name: value.tolist() for name, value in model.state_dict().items()}


def load_exported(folder: Path) -> dict[str, Any]:
    model = _exported_model()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    nbaccel.utils.load_model(model, os.fspath(folder))
    return {name: value.tolist() for name, value in model.state_dict().items()}


def log_numbers(folder: str, **more: float) -> None:
    """Two rows in files of JSON lines and of CSV; a run of the same name goes on below the one before."""
    accelerator = Accelerator(cpu=True, log_with=["jsonl", "csv"], project_dir=folder)
    accelerator.init_trackers("run", config={"lr": 0.1, "layers": [4, 3]})
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.log({"loss": 0.25, "accuracy": 0.75, **more}, step=2)
    accelerator.end_training()


def found_size(cache: str) -> tuple[int, int]:
    """The batch size that fits a small device, and after how many forward passes that was known."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 1000), torch.nn.GELU(), torch.nn.Linear(1000, 1))
    model, _optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    passes = 0

    def loss(batch: torch.Tensor) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return model(batch).mean()

    with MemLimit(2_000_000) as memory:
        memory.count(model)
        size = accelerator.find_batch_size(loss, torch.ones(8, 4), cache=cache)
    return size, passes
