"""Programs of other libraries for tests in real kernels: `make_X()` makes an object, `use_X(made)` trains with it.

Each use returns [the world's size, its steps, whether all ranks ended with equal weights, whether they were given each
sample once]. Nothing is downloaded.
"""

from __future__ import annotations

import pytest

from environments import ENVIRONMENTS

in_one_environment = pytest.mark.parametrize(
    "environment",
    [pytest.param(each, id=each.name, marks=[pytest.mark.full] if at else []) for at, each in enumerate(ENVIRONMENTS)],
    indirect=True,
    scope="session",
)
"""Marks a test `full` in all environments but the first: front ends differ, and libraries see little of them."""

SHARED = """
import json, os, sys, torch
from torch.utils.data import DataLoader

ROWS = []

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        ROWS.append(index)
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=generator), "labels": torch.tensor(float(index % 2))}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(int(os.environ.get("RANK", 0)))  # apart, unless the library brings the ranks together
        self.layer = torch.nn.Linear(8, 1)
    def forward(self, x, labels=None):
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}

def found(world, steps, model):
    weights = [torch.cat([p.detach().double().flatten() for p in model.parameters()]).tolist()]
    everywhere = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, (weights, ROWS))
    rows = sorted(index for _, each in everywhere for index in each)
    return [world, steps, all(each == weights for each, _ in everywhere), rows == list(range(64))]
"""

TRANSFORMERS = """
from dataclasses import dataclass
from accelerate import PartialState
from transformers import Trainer, TrainingArguments

def settings(kind=TrainingArguments, **kwargs):
    return kind(output_dir="out", per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to=[],
                save_strategy="no", logging_strategy="no", disable_tqdm=True, **kwargs)

def train(trainer):
    ROWS.clear()
    trainer.train()
    return found(trainer.args.world_size, trainer.state.global_step, trainer.model)

@dataclass
class OwnArguments(TrainingArguments):
    length: int = 16
    def __post_init__(self):
        super().__post_init__()
        self.length //= 2

class OwnTrainer(Trainer):
    def __init__(self, model, args, rows):
        with PartialState().main_process_first():  # a library's own state, before anybody asks the arguments
            super().__init__(model=model, args=args, train_dataset=rows)

make_arguments = settings
def use_arguments(arguments):
    return train(Trainer(model=Net(), args=arguments, train_dataset=Numbers()))
def make_trainer():
    return Trainer(model=Net(), args=settings(), train_dataset=Numbers())
use_trainer = train
def make_subclass():
    return OwnTrainer(Net(), settings(OwnArguments), Numbers())
use_subclass = train
"""

ACCELERATE = """
import accelerate

def make_accelerator():
    return accelerate.Accelerator(cpu=True)
def use_accelerator(accelerator):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return loop(accelerator, *accelerator.prepare(model, optimizer, DataLoader(Numbers(), 4, shuffle=True)))
def loop(accelerator, model, optimizer, loader):
    ROWS.clear()
    for steps, batch in enumerate(loader, 1):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return found(accelerator.num_processes, steps, model)
"""

FABRIC = """
from lightning.fabric import Fabric

def make_fabric(**settings):
    return Fabric(accelerator="cpu", **{"devices": 2, **settings})
def use_fabric(fabric):
    ROWS.clear()
    fabric.launch()
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    for steps, batch in enumerate(fabric.setup_dataloaders(DataLoader(Numbers(), 4, shuffle=True)), 1):
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return found(fabric.world_size, steps, model)
"""

LIGHTNING = """
import logging, lightning.pytorch
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index):
        return self.net(**batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def make_lightning(**settings):
    return lightning.pytorch.Trainer(
        accelerator="cpu", max_epochs=1, enable_checkpointing=False, enable_model_summary=False,
        **{"devices": 2, "strategy": "ddp_notebook", "logger": False, "enable_progress_bar": False, **settings})
def use_lightning(trainer):
    ROWS.clear()
    module = Module()
    trainer.fit(module, DataLoader(Numbers(), 4, shuffle=True))
    return found(trainer.world_size, trainer.global_step, module)
"""
