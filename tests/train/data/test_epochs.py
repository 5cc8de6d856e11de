"""Which iteration is which epoch, and that nothing disturbs the count of the other ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration


def _epoch(accelerator: Accelerator, loader: Any) -> list[int]:
    """This rank's ids of an epoch in which the ranks meet."""
    seen = []
    for batch in loader:
        seen += batch.tolist()
        accelerator.wait_for_everyone()
    return seen


def _after_a_look(look: str) -> list[list[int]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(16), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
    epochs = [_epoch(accelerator, loader)]
    if accelerator.is_main_process:
        if look == "first batch":
            next(iter(loader))
        elif look == "broken off":
            for _ in loader:
                break
        elif look == "held":
            held = iter(loader)
            next(held)
        else:
            for _ in loader:
                pass
    return [*epochs, _epoch(accelerator, loader), _epoch(accelerator, loader)]


@pytest.mark.parametrize("look", ["first batch", "broken off", "held", "whole loop"])
def test_a_look_on_one_rank_does_not_change_what_it_sees_later(look: str) -> None:
    first, second = run_ranks(2, _after_a_look, look)
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(16))
    assert len({tuple(epoch) for epoch in first}) == 3


def _broken_off_in_training() -> tuple[int, list[list[int]]]:
    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1)
    loader: DataLoader[Any] = DataLoader(range(16), 2, shuffle=True)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(model, loader)
    firsts = []
    for _ in range(3):
        for batch in loader:
            accelerator.backward(model(batch.float()[:, None]).sum())
            firsts.append(batch.tolist())
            break
    return loader.iteration, firsts


def test_training_that_is_broken_off_counts_as_an_epoch() -> None:
    for epochs, firsts in run_ranks(2, _broken_off_in_training):
        assert epochs == 3
        assert len({tuple(batch) for batch in firsts}) > 1
    assert _broken_off_in_training()[0] == 3


def _evaluated_inside() -> tuple[list[int], list[int], bool]:
    """A whole evaluation inside each training step, over the same loader and another."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    training = accelerator.prepare(DataLoader(range(16), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
    testing = accelerator.prepare(DataLoader(range(6), 2))  # type: ignore[arg-type, var-annotated]
    seen, metrics, ends = [], [], []
    for batch in training:
        seen += batch.tolist()
        for inner in testing:
            metrics += accelerator.gather_for_metrics(inner).tolist()
            break
        ends.append(training.end_of_dataloader)
    return seen, metrics, ends == [False] * 3 + [True]


def test_evaluation_inside_training_disturbs_neither() -> None:
    (first, metrics, ends), (second, _, _) = run_ranks(2, _evaluated_inside)
    assert sorted(first + second) == list(range(16))
    assert metrics == [0, 1, 2, 3] * 4
    assert ends


def test_alone_a_look_is_no_epoch_and_a_whole_loop_is_one() -> None:
    loader = Accelerator().prepare(DataLoader(range(4), 2))  # type: ignore[arg-type, var-annotated]
    next(iter(loader))
    assert loader.iteration == 0
    list(loader)
    assert loader.iteration == 1


class _Own(Sampler[int]):
    """Draws from every generator there is, anew in each epoch."""

    def __iter__(self) -> Iterator[int]:
        indices = torch.randperm(16).tolist()
        random.shuffle(indices)
        np.random.shuffle(indices)
        yield from indices

    def __len__(self) -> int:
        return 16


def _own_sampler(dispatch: bool) -> tuple[list[list[int]], float]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(16), 2, sampler=_Own()))  # type: ignore[arg-type, var-annotated]
    epochs = [_epoch(accelerator, loader) for _ in range(2)]
    return epochs, random.random()


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_sampler_of_ones_own_draws_alike_on_every_rank(dispatch: bool) -> None:
    (first, noise), (second, other_noise) = run_ranks(2, _own_sampler, dispatch)
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(16))
    assert first[0] != first[1]
    random.seed(0)
    assert noise == random.random()  # the process's own numbers are untouched
    random.seed(1)
    assert other_noise == random.random()


class _Epochs(IterableDataset[int]):
    """Shuffles by the epoch it is told, as `datasets.IterableDataset` does."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from (100 * self.epoch + index for index in range(4))


def test_datasets_and_samplers_that_shuffle_by_the_epoch_are_told_it() -> None:
    loader = Accelerator().prepare(DataLoader(_Epochs(), 4))
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[0, 1, 2, 3], [100, 101, 102, 103]]
    loader.set_epoch(7)
    assert next(iter(loader)).tolist()[0] == 700
    sampler: DistributedSampler[Any] = DistributedSampler(range(4), num_replicas=1, rank=0)  # type: ignore[arg-type]
    loader = Accelerator().prepare(DataLoader(range(4), 2, sampler=sampler))  # type: ignore[arg-type]
    for _ in range(3):
        list(loader)
    assert sampler.epoch == 2


def _streams(dispatch: bool) -> list[list[int]]:
    loader = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch)).prepare(
        DataLoader(_Epochs(), 1)
    )
    accelerator = Accelerator()
    return [_epoch(accelerator, loader) for _ in range(2)]


@pytest.mark.parametrize("dispatch", [False, True])
def test_streams_are_told_the_epoch_in_two_ranks(dispatch: bool) -> None:
    assert run_ranks(2, _streams, dispatch) == [[[0, 2], [100, 102]], [[1, 3], [101, 103]]]


def _workers() -> list[list[int]]:
    accelerator = Accelerator()
    loader: DataLoader[Any] = accelerator.prepare(
        DataLoader(range(12), 2, shuffle=True, num_workers=2, persistent_workers=True)  # type: ignore[arg-type]
    )
    return [_epoch(accelerator, loader) for _ in range(3)]


def test_persistent_workers_follow_the_order_of_each_epoch() -> None:
    first, second = run_ranks(2, _workers)
    assert [sorted(mine + theirs) for mine, theirs in zip(first, second, strict=True)] == [list(range(12))] * 3
    assert len({tuple(epoch) for epoch in first}) > 1


def test_a_break_leaves_nothing_behind() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4)
    loader = accelerator.prepare(DataLoader(range(8), 2))  # type: ignore[arg-type, var-annotated]
    outside = loader.accumulation.window
    for _ in loader:
        assert loader.accumulation.window.source is loader
        break
    assert loader.accumulation.window is outside
    assert not loader.end_of_dataloader
    assert loader.state_dict()["batches"] == 0
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
