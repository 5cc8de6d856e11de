"""After `free_memory`, `release_memory` or `end_training` nothing of ours holds what a training has used.

A program walks every public method of the Accelerator first; then its models, optimizers, schedulers, loaders, data
and batches are looked for. The exceptions are the program's own wishes: what it registered or asked to remember.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from nbaccel import Accelerator
from nbaccel.local_sgd import LocalSGD
from nbaccel.testing import run_ranks
from nbaccel.train.oom.memory.free_memory import release_memory
from nbaccel.utils import ProfileKwargs, find_executable_batch_size

SAMPLES, BATCH_SIZE = 8, 2


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index))


class Storages:
    """Memory of tensors, without holding it."""

    def __init__(self) -> None:
        self._references: list[tuple[str, int]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        self._references.append((name, tensor.untyped_storage()._weak_ref()))

    def living(self) -> set[str]:
        return {name for name, reference in self._references if not torch.UntypedStorage._expired(reference)}


@dataclass
class Seen:
    """Weak references to all that a training has used, by name."""

    objects: list[tuple[str, Any]] = field(default_factory=list)
    storages: Storages = field(default_factory=Storages)

    def object(self, name: str, thing: Any) -> None:
        self.objects.append((name, weakref.ref(thing)))

    def model(self, name: str, model: torch.nn.Module) -> None:
        self.object(name, model)
        for parameter in model.parameters():
            self.storages.add(f"weights of {name}", parameter.data)

    def batch(self, tensor: Tensor) -> None:
        self.storages.add("a batch", tensor)

    def living(self) -> set[str]:
        gc.collect()
        return {name for name, reference in self.objects if reference() is not None} | self.storages.living()


@dataclass
class Program:
    """A training, and each public method of its Accelerator used as programs do."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any
    folder: str
    seen: Seen
    made: list[Any]
    """What else it has prepared."""

    def batches(self) -> list[Tensor]:
        batches = list(self.loader)
        for batch in batches:
            self.seen.batch(batch)
        return batches

    def loss(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch).square().mean()
        self.seen.storages.add("a loss", loss)
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.seen.storages.add("a gradient", parameter.grad)
        self.optimizer.zero_grad()

    def train(self) -> None:
        for batch in self.loader:
            self.seen.batch(batch)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.loss(batch))
                self.step()

    def break_off(self) -> None:
        """A loop that is left in the middle of a window, and one that fails."""
        for batch in self.loader:
            self.seen.batch(batch)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.loss(batch))
            break
        self.optimizer.zero_grad()
        try:
            for batch in self.loader:
                self.seen.batch(batch)
                raise RuntimeError(batch)
        except RuntimeError:
            pass

    def hold(self) -> None:
        for batch in self.batches()[:2]:
            with self.accelerator.no_sync(self.model):
                self.accelerator.backward(self.loss(batch))
            with self.accelerator.hold_gradients(self.model):
                self.accelerator.backward(self.loss(batch))
            with self.accelerator.no_sync(self.model):
                loss = self.loss(batch)
            with self.accelerator.trigger_sync_in_backward(self.model):
                self.accelerator.backward(loss)
            self.step()
        with LocalSGD(self.accelerator, self.model, local_sgd_steps=2) as local_sgd:
            for batch in self.batches():
                self.accelerator.backward(self.loss(batch))
                self.step()
                local_sgd.step()

    def recover(self) -> None:
        for batch in self.batches():
            with self.accelerator.accumulate(self.model):
                self.accelerator.forward_backward(self.loss, batch)
                self.step()

        def does_not_fit(batch: Tensor) -> Tensor:
            loss = self.loss(batch)
            if len(batch) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

        for batch in self.batches()[:2]:
            with self.accelerator.accumulate(self.model):
                self.accelerator.forward_backward(does_not_fit, batch)
                self.step()

    def estimate(self) -> None:
        self.accelerator.estimate(self.model, self.optimizer, torch.ones(2, 3), lambda model, x: model(x).mean())

    def search(self) -> None:
        self.accelerator.find_batch_size(self.loss, self.loader, max_batch_size=4)
        self.optimizer.zero_grad()

    def look_for_a_size(self) -> None:
        @find_executable_batch_size(starting_batch_size=2)
        def attempt(batch_size: int) -> None:
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = self.accelerator.prepare(model, optimizer)
            self.seen.model("model of an attempt", model)
            self.seen.object("optimizer of an attempt", optimizer)
            self.made += [self.accelerator.unwrap_model(model), optimizer.optimizer]
            self.accelerator.backward(model(torch.ones(batch_size, 3)).mean())
            if batch_size > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        attempt()

    def clip(self) -> None:
        self.accelerator.backward(self.loss(self.batches()[0]))
        self.accelerator.unscale_gradients()
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.accelerator.clip_grad_value_(self.model.parameters(), 1.0)
        self.step()

    def talk(self) -> None:
        batch = self.batches()[0]
        with torch.no_grad():
            outputs = self.model(batch)
        for value in (outputs, batch):
            self.accelerator.gather(value)
            self.accelerator.reduce({"value": value}, "mean")
            self.accelerator.pad_across_processes([value])
        for batch in self.loader:
            self.accelerator.gather_for_metrics((self.model(batch), batch))
        with self.accelerator.split_between_processes(batch) as share:
            self.seen.batch(share)
        self.accelerator.wait_for_everyone()
        for first in (self.accelerator.main_process_first, self.accelerator.local_main_process_first):
            with first():
                pass
        self.accelerator.set_trigger()
        self.accelerator.check_trigger()
        self.accelerator.print(end="")

    def decorate(self) -> None:
        batch = self.batches()[0]
        for decorator in (
            self.accelerator.on_main_process,
            self.accelerator.on_local_main_process,
            self.accelerator.on_last_process,
        ):
            decorator(lambda: batch)()
        self.accelerator.on_process(lambda: batch, process_index=0)()
        self.accelerator.on_local_process(lambda: batch, local_process_index=0)()

    def save(self) -> None:
        folder, accelerator = self.folder, self.accelerator
        accelerator.register_save_state_pre_hook(lambda models, weights, place: None)
        accelerator.register_load_state_pre_hook(lambda models, place: None)
        accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1)))
        accelerator.save_state(os.path.join(folder, "last"))
        accelerator.wait_for_everyone()
        accelerator.load_state(os.path.join(folder, "last"))
        accelerator.save_model(self.model, os.path.join(folder, "model"))
        accelerator.save(accelerator.get_state_dict(self.model), os.path.join(folder, "weights.pt"))
        accelerator._checkpoints.registered.save_hooks.clear()
        accelerator.save_state(os.path.join(folder, "next"), blocking=False)

    def read(self) -> None:
        for left in self.accelerator.skip_first_batches(self.loader, 1):
            self.seen.batch(left)
            break
        for _ in self.accelerator.epochs(2):
            self.train()
        self.accelerator.remember(best=0.0)
        self.accelerator.total_steps(self.loader)
        self.accelerator.total_scheduler_steps(self.loader)
        with self.accelerator.join_uneven_inputs([self.model], even_batches=False):
            self.train()

    def look(self) -> None:
        with self.accelerator.autocast():
            self.loss(self.batches()[0])
        # Without stacks: torch 2.11 on Python 3.13 keeps the modules of those for ever, 2.6 fails with them by chance.
        options = ProfileKwargs(activities=["cpu"], profile_memory=True, record_shapes=True)
        with self.accelerator.profile(options):
            self.train()
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self.accelerator.verify_device_map(self.model)
        self.accelerator.phase("evaluation")

    def track(self) -> None:
        self.accelerator.init_trackers("run", config={"lr": 0.1})
        batch = self.batches()[0]
        self.accelerator.log({"loss": self.loss(batch), "batch": batch.sum()})
        self.accelerator.get_tracker("jsonl")

    def prepare_one_by_one(self) -> None:
        model = self.accelerator.prepare_model(torch.nn.Sequential(torch.nn.Linear(3, 3)), evaluation_mode=True)
        self.accelerator.gradient_checkpointing(model)
        optimizer = self.accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scheduler = self.accelerator.prepare_scheduler(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer))
        loader = self.accelerator.prepare_data_loader(DataLoader(Rows(), 2, num_workers=1, persistent_workers=True))
        for batch in loader:
            self.seen.batch(batch)
            self.seen.storages.add("an output", model(batch))
        self.seen.model("second model", model)
        self.made += [model, optimizer, scheduler, loader]
        for name, thing in (("optimizer", optimizer), ("scheduler", scheduler), ("loader", loader)):
            self.seen.object(f"second {name}", thing)

    def ask(self) -> None:
        """All that is no method."""
        for name in dir(Accelerator):
            if not name.startswith("_") and not callable(getattr(Accelerator, name)):
                getattr(self.accelerator, name)


WALK: dict[Callable[[Program], None], str] = {
    Program.prepare_one_by_one: "prepare_model prepare_optimizer prepare_scheduler prepare_data_loader "
    "gradient_checkpointing",
    Program.track: "init_trackers log get_tracker",
    Program.train: "prepare accumulate backward",
    Program.break_off: "",
    Program.hold: "no_sync hold_gradients trigger_sync_in_backward",
    Program.clip: "clip_grad_norm_ clip_grad_value_ unscale_gradients",
    Program.talk: "gather gather_for_metrics reduce pad_across_processes split_between_processes wait_for_everyone "
    "main_process_first local_main_process_first set_trigger check_trigger print",
    Program.decorate: "on_main_process on_local_main_process on_last_process on_process on_local_process",
    Program.save: "save_state load_state save_model save get_state_dict register_save_state_pre_hook "
    "register_load_state_pre_hook register_for_checkpointing",
    Program.read: "skip_first_batches epochs remember total_steps total_scheduler_steps join_uneven_inputs",
    Program.look: "autocast profile unwrap_model verify_device_map phase",
    Program.recover: "forward_backward",
    Program.search: "find_batch_size",
    Program.estimate: "estimate",
    Program.look_for_a_size: "",
    Program.ask: "",
}
"""What is walked, and which methods that covers."""

ENDS = ("free_memory", "clear", "release_memory", "end_training")
NO_HOLDERS = ("destroy_process_group", "lomo_backward", "map", "maybe_context_parallel")


def test_every_public_method_is_walked() -> None:
    walked = {name for names in WALK.values() for name in names.split()}
    methods = {name for name in dir(Accelerator) if not name.startswith("_") and callable(getattr(Accelerator, name))}
    assert methods == walked | set(ENDS) - {"release_memory"} | set(NO_HOLDERS)


def _walk(folder: str, steps: int, precision: str) -> tuple[Accelerator, Seen, list[Any]]:
    accelerator = Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=steps, log_with="jsonl", project_dir=folder
    )
    seen = Seen()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    loader = DataLoader(Rows(), BATCH_SIZE, shuffle=True)
    seen.model("model", model)
    for name, thing in (("torch's optimizer", optimizer), ("torch's scheduler", scheduler), ("torch's loader", loader)):
        seen.object(name, thing)
    seen.object("data", loader.dataset)
    prepared = accelerator.prepare(model, optimizer, scheduler, loader)
    for name, thing in zip(("prepared model", "optimizer", "scheduler", "loader"), prepared, strict=True):
        seen.object(name, thing)
    program = Program(accelerator, *prepared, folder, seen, list(prepared))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in WALK:
            part(program)
    accelerator.accumulate(program.model)  # and never enter it
    return accelerator, seen, program.made


def _left_after(end: str, folder: str, steps: int, precision: str) -> set[str]:
    accelerator, seen, prepared = _walk(folder, steps, precision)
    if end == "end_training":
        del prepared
        accelerator.end_training()
    else:
        call: Any = release_memory if end == "release_memory" else getattr(accelerator, end)
        prepared = call(*prepared)
        assert not any(prepared)
    return seen.living()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "end", "steps", "precision"),
    [
        (1, "free_memory", 2, "bf16"),
        (1, "release_memory", 1, "no"),
        (1, "end_training", 1, "fp16"),
        (2, "free_memory", 1, "no"),
        (2, "release_memory", 2, "bf16"),
        (2, "end_training", 2, "no"),
    ],
)
def test_nothing_of_ours_holds_what_a_training_has_used(
    tmp_path: Path, ranks: int, end: str, steps: int, precision: str
) -> None:
    assert run_ranks(ranks, _left_after, end, str(tmp_path), steps, precision, timeout_s=240) == [set()] * ranks
