"""Two sessions of one training with everything that trainings have: accumulation, dropout, evaluation, any loader.

The first ends in the middle of an epoch, and the second goes on, in the same number of ranks or another.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nbaccel import Accelerator
from nbaccel.base.events import Event, StepEntered, outlet
from nbaccel.errors import RunStopped
from nbaccel.testing import run_ranks
from nbaccel.utils import DataLoaderConfiguration
from trainings import Tied

SAMPLES, SEEN_BEFORE, BATCH, WINDOW, EPOCHS = 52, 16, 2, 4, 3
"""What is left of the epoch, 36 samples, is whole batches for one, two and three ranks."""


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


@dataclass(frozen=True)
class Told:
    """By one rank. began_at: the optimizer step.  ids: of the samples of the first epoch that it trained on."""

    began_at: int
    ids: list[int]
    losses: list[float]
    best: float
    history: list[list[float]]
    weights: list[float]


def _session(folder: str, kind: str, stop_at: int | None) -> Told:
    """A program as users write it, whose session ends before optimizer step `stop_at`."""

    def stop(event: Event) -> None:
        if isinstance(event, StepEntered) and event.step == stop_at:
            raise RunStopped

    torch.manual_seed(0)
    table = torch.randn(SAMPLES, 3)
    with outlet(stop), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of random numbers that are derived in another number of ranks
        accelerator = Accelerator(
            gradient_accumulation_steps=WINDOW,
            checkpoint_every="1000steps",
            checkpoint_dir=folder,
            resume=True,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, dispatch_batches=False),
        )
        model: Any = Tied()
        loader: Any = (
            DataLoader(Stream(), BATCH) if kind == "stream" else DataLoader(range(SAMPLES), BATCH, shuffle=True)
        )  # type: ignore[arg-type]
        model, optimizer, loader, held_out = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.05), loader, DataLoader(table[:12], BATCH)
        )
        began_at = accelerator._context.accumulation.clock.step
        memory = accelerator.remember(best=float("inf"), history=[], losses=[])
        ids: list[int] = []
        try:
            for epoch in accelerator.epochs(EPOCHS):
                for batch in loader:
                    with accelerator.accumulate(model):
                        loss = model(table[batch]).square().mean()
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                    memory.losses.append(float(loss.detach()))
                    ids += batch.tolist() if epoch == 0 else []
                model.eval()
                with torch.no_grad():
                    error = sum(float(model(x).square().mean()) for x in held_out)
                model.train()
                memory.history.append([epoch, error])
                memory.best = min(memory.best, error)
        except RunStopped:
            pass
        accelerator.end_training()
    weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    return Told(began_at, ids, memory.losses, memory.best, memory.history, weights)


@pytest.mark.parametrize("kind", ["map-style", "stream"])
@pytest.mark.parametrize(("first", "then"), [(1, 1), (2, 2), (1, 2), (2, 1), (2, 3)])
def test_a_training_goes_on_in_its_next_session(tmp_path: Path, first: int, then: int, kind: str) -> None:
    stop_at = SEEN_BEFORE // (first * BATCH * WINDOW)
    before = run_ranks(first, _session, str(tmp_path / "parts"), kind, stop_at)
    after = run_ranks(then, _session, str(tmp_path / "parts"), kind, None)
    assert {told.began_at for told in after} == {stop_at}, "every rank goes on at the same step"
    seen = Counter(itertools.chain.from_iterable(told.ids for told in before + after))
    assert seen == Counter(range(SAMPLES)), "each sample of the epoch once"
    if first == then:
        whole = run_ranks(first, _session, str(tmp_path / "whole"), kind, None)
        assert after[0].losses == whole[0].losses
        assert (after[0].best, after[0].history) == (whole[0].best, whole[0].history)
        assert [told.weights for told in after] == [told.weights for told in whole]
