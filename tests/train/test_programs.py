"""Whole programs, as users of Accelerate write them, with only the import changed."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from nbaccel import Accelerator, RanksFailed
from nbaccel.base.events import Event, Metric, outlet
from nbaccel.testing import run_ranks
from nbaccel.train.setup import setup_rank


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class YourModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        logits = self.layers(x)
        return Output(F.cross_entropy(logits, labels), logits)


def your_dataloader(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(100, 4, generator=generator)
    samples = [{"x": x, "labels": (x.sum() > 0).long()} for x in inputs]
    return DataLoader(samples, batch_size=batch_size, shuffle=True)  # type: ignore[arg-type]


def _portable_template() -> tuple[list[str], list[float]]:
    """The training template of a widely read tutorial."""
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=4, log_with="wandb")
    torch.manual_seed(42 + accelerator.process_index)
    model = YourModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    train_loader = your_dataloader(batch_size=16 // accelerator.num_processes)
    model, optimizer, train_loader = accelerator.prepare(model, optimizer, train_loader)
    for epoch in range(2):
        model.train()
        pbar = tqdm(train_loader, disable=not accelerator.is_main_process, desc=f"Epoch {epoch}")
        for batch in pbar:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.is_main_process:
                pbar.set_postfix({"loss": loss.item()})
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.save_state(f"checkpoint_epoch_{epoch}")
    accelerator.end_training()
    plain = accelerator.unwrap_model(model)
    return sorted(os.listdir()), [value for p in plain.parameters() for value in p.flatten().tolist()]


def test_the_portable_template_trains_in_two_ranks(tmp_path: Path) -> None:
    def in_folder() -> tuple[list[str], list[float]]:
        os.chdir(tmp_path)
        warnings.simplefilter("ignore")
        return _portable_template()

    first, second = run_ranks(2, in_folder)
    assert first[1] == second[1]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_epoch_0", "checkpoint_epoch_1"]


def _cell(names: dict[str, Any], prepares: bool) -> tuple[list[float], list[tuple[int, float]]]:
    """A cell: `accelerator` is there, the rest comes from the notebook."""
    events: list[Event] = []
    with outlet(events.append):
        setup_rank(names)
        accelerator, model, optimizer, loader = (names[n] for n in ("accelerator", "model", "optimizer", "loader"))
        if prepares:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for _ in range(3):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.log({"loss": loss})
    logged = [(event.step, float(event.values["loss"])) for event in events if isinstance(event, Metric)]
    return [value for p in accelerator.unwrap_model(model).parameters() for value in p.flatten().tolist()], logged


def _notebook() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double()
    samples = [(torch.randn(4).double(), torch.tensor(index % 3)) for index in range(32)]
    loader = DataLoader(samples, batch_size=4)  # type: ignore[arg-type, var-annotated]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": loader}


def test_the_cell_of_the_readme_equals_one_process_on_the_whole_batch() -> None:
    (first, logged), (second, _) = run_ranks(2, _cell, _notebook(), True)
    assert first == second
    assert [step for step, _ in logged] == list(range(12))
    whole = _notebook()
    whole["loader"] = DataLoader(whole["loader"].dataset, batch_size=8)
    torch.testing.assert_close(torch.tensor(first), torch.tensor(_cell(whole, True)[0]), rtol=1e-12, atol=0)


def test_the_cell_of_the_readme_without_prepare_fails_with_the_line_to_write() -> None:
    with pytest.raises(RanksFailed, match=r"accelerator\.prepare\(model, optimizer, loader\)"):
        run_ranks(2, _cell, _notebook(), False)


def _evaluated_by_main_only() -> tuple[int, list[float]]:
    """Rank 0 evaluates on a loader of its own between epochs, while the others go on to the next step."""
    accelerator = Accelerator()
    names = _notebook()
    model, optimizer, loader = accelerator.prepare(names["model"], names["optimizer"], names["loader"])
    for _ in range(2):
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            with torch.no_grad():
                plain = accelerator.unwrap_model(model)
                for x, _ in names["loader"]:
                    plain(x)
    return accelerator._context.accumulation.clock.step, [v for p in model.parameters() for v in p.flatten().tolist()]


def test_the_main_process_may_evaluate_alone() -> None:
    first, second = run_ranks(2, _evaluated_by_main_only)
    assert first == second
    assert first[0] == 8
