"""A whole training on fixed seeds has the losses of plain PyTorch, computed beside it, step by step.

Everything at once that moves a number: dropout, accumulation with a short last window, clipping, AdamW, a schedule,
evaluation that is gathered. What each does alone is in test_exactness.py and its neighbours.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.testing import run_ranks

EPOCHS, SAMPLES, BATCH_SIZE, WINDOW, MAX_NORM = 3, 40, 4, 2, 0.1

Trace = dict[str, list[float]]
"""losses: of each batch, those of all ranks in their order.  norms: of each step, before clipping.
held_out: of each epoch.  lr: after each step."""


def _parts(dtype: torch.dtype) -> tuple[Any, Any, Any, TensorDataset]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)
    ).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    inputs = torch.randn(SAMPLES, 5, dtype=torch.float64).to(dtype)
    return model, optimizer, scheduler, TensorDataset(inputs, inputs.sum(1).gt(0).long() + inputs[:, 0].gt(1).long())


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _loader(data: TensorDataset, batch_size: int) -> DataLoader[Any]:
    """Seeds for workers come from a generator of its own, so that dropout alone draws from the default one."""
    return DataLoader(data, batch_size, generator=torch.Generator())


def _plain(dtype: torch.dtype, ranks: int) -> Trace:
    """In one process, which takes the batches of all ranks in turn and has a random state for each."""
    model, optimizer, scheduler, data = _parts(dtype)
    seeds = [torch.Generator().manual_seed(100 + rank).get_state() for rank in range(ranks)]
    trace: Trace = {"losses": [], "norms": [], "held_out": [], "lr": []}
    batches = list(_loader(data, BATCH_SIZE))
    rounds = [batches[start : start + ranks] for start in range(0, len(batches), ranks)]
    for _ in range(EPOCHS):
        model.train()
        for start in range(0, len(rounds), WINDOW):
            window = rounds[start : start + WINDOW]
            for of_ranks in window:
                for rank, batch in enumerate(of_ranks):
                    torch.set_rng_state(seeds[rank])
                    loss = _loss(model, batch)
                    seeds[rank] = torch.get_rng_state()
                    (loss / len(window) / ranks).backward()
                    trace["losses"].append(loss.item())
            trace["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            trace["lr"] += scheduler.get_last_lr()
        model.eval()
        with torch.no_grad():
            trace["held_out"].append(_loss(model, data.tensors).item())
    return trace


def _prepared(dtype: torch.dtype) -> Trace:
    accelerator = Accelerator(gradient_accumulation_steps=WINDOW, cpu=True, step_scheduler_with_optimizer=False)
    model, optimizer, scheduler, data = _parts(dtype)
    model, optimizer, scheduler, loader, held_out = accelerator.prepare(
        model, optimizer, scheduler, _loader(data, BATCH_SIZE), _loader(data, 3)
    )
    torch.manual_seed(100 + accelerator.process_index)
    trace: Trace = {"losses": [], "norms": [], "held_out": [], "lr": []}
    for _ in range(EPOCHS):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = _loss(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    trace["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)))
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                    trace["lr"] += scheduler.get_last_lr()
                optimizer.zero_grad()
            trace["losses"] += accelerator.gather(loss.detach().reshape(1)).tolist()
        model.eval()
        with torch.no_grad():
            answers = [accelerator.gather_for_metrics((model(x), y)) for x, y in held_out]
        logits, targets = (torch.cat([answer[index] for answer in answers]) for index in (0, 1))
        assert len(targets) == SAMPLES
        trace["held_out"].append(F.cross_entropy(logits, targets).item())
    accelerator.end_training()
    return trace


DTYPES = pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=["64", "32"])


def _assert_close(trace: Trace, expected: Trace, within: float) -> None:
    for name, values in expected.items():
        assert trace[name] == pytest.approx(values, rel=within, abs=within / 1000), name


@DTYPES
def test_one_process_has_the_losses_of_plain_pytorch(dtype: torch.dtype, within: float) -> None:
    expected = _plain(dtype, 1)
    assert max(expected["norms"]) > MAX_NORM  # it clips
    assert len(expected["norms"]) == EPOCHS * 5
    trace = _prepared(dtype)
    held_out = trace.pop("held_out")  # by batches, and at once
    assert held_out == pytest.approx(expected.pop("held_out"), rel=within)
    assert trace == expected  # bit by bit


@pytest.mark.slow
@DTYPES
def test_two_ranks_have_the_losses_of_plain_pytorch(dtype: torch.dtype, within: float) -> None:
    expected = _plain(dtype, 2)
    assert len(expected["norms"]) == EPOCHS * 3  # windows of 2, 2 and 1 batches per rank
    for trace in run_ranks(2, _prepared, dtype):
        _assert_close(trace, expected, within)
