"""Loaders without their first batches, and how many steps a loader makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration, skip_first_batches


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)


def _skipped(configuration: dict[str, Any], streamed: bool) -> Any:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**configuration))
    dataset: Any = Stream() if streamed else range(10)
    torch.manual_seed(4)
    loader = accelerator.prepare(DataLoader(dataset, 1, shuffle=not streamed))

    def epoch(of: Any) -> list[int]:
        torch.manual_seed(loader.iteration)
        seen = []
        for batch in of:
            seen += batch.tolist()
            accelerator.wait_for_everyone()
        return seen

    whole = [epoch(loader), epoch(loader)]
    loader.set_epoch(0)
    rest = accelerator.skip_first_batches(loader, 2)
    return whole, [epoch(rest), epoch(loader)], loader.iteration


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("configuration", [{}, {"dispatch_batches": True}, {"use_seedable_sampler": True}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rest_of_an_epoch_and_then_the_next_one(configuration: dict[str, Any], streamed: bool, ranks: int) -> None:
    for (first, second), resumed, iteration in run_ranks(ranks, _skipped, configuration, streamed):
        assert resumed == [first[2:], second]
        assert iteration == 2


def test_the_length_shrinks_and_is_never_negative() -> None:
    loader = Accelerator().prepare(DataLoader(range(10), 2))  # type: ignore[arg-type, var-annotated]
    assert [len(skip_first_batches(loader, skip)) for skip in (0, 2, 5, 9)] == [5, 3, 0, 0]
    assert [len(list(skip_first_batches(loader, skip))) for skip in (0, 2, 5, 9)] == [5, 3, 0, 0]
    assert len(skip_first_batches(skip_first_batches(loader, 1), 2)) == 2
    assert len(loader) == 5


def test_a_negative_number_is_an_error() -> None:
    for loader in (DataLoader(range(4), 2), Accelerator().prepare(DataLoader(range(4), 2))):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="num_batches must be at least 0, got -1"):
            skip_first_batches(loader, -1)


def test_loaders_that_are_not_prepared_are_skipped_too() -> None:
    read = []

    class Reads(list[int]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return index

    loader: DataLoader[Any] = DataLoader(Reads(range(10)), 2)  # type: ignore[arg-type]
    rest = skip_first_batches(loader, 3)
    assert [batch.tolist() for batch in rest] == [[6, 7], [8, 9]]
    assert read == [6, 7, 8, 9]
    assert (len(rest), rest.batch_sampler.batch_size) == (2, 2)
    streamed = skip_first_batches(DataLoader(Stream(), 4), 1)
    assert [batch.tolist() for batch in streamed] == [[4, 5, 6, 7], [8, 9]]
    assert isinstance(streamed, DataLoader)


def _prepared_afterwards() -> list[list[int]]:
    loader: DataLoader[Any] = DataLoader(range(16), 2)  # type: ignore[arg-type]
    return [batch.tolist() for batch in Accelerator().prepare(skip_first_batches(loader, 4))]


def test_a_skipped_loader_may_be_prepared() -> None:
    assert run_ranks(2, _prepared_afterwards) == [[[8, 9], [12, 13]], [[10, 11], [14, 15]]]


def test_a_position_that_was_loaded_gives_way_to_an_explicit_skip() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(10), 2))  # type: ignore[arg-type, var-annotated]
    for _ in loader:
        state = loader.state_dict()
        break
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)] == [[2, 3], [4, 5], [6, 7], [8, 9]]
    assert len(list(loader)) == 5


def test_a_rest_that_is_shuffled_draws_anew_in_each_epoch() -> None:
    torch.manual_seed(0)
    loader = Accelerator().prepare(DataLoader(range(40), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
    rest = skip_first_batches(loader, 5)
    assert [batch.tolist() for batch in rest] != [batch.tolist() for batch in rest]


def test_an_explicit_skip_after_a_loaded_position_stays_in_the_order_of_that_epoch() -> None:
    def start(seed: int) -> tuple[Accelerator, Any]:
        torch.manual_seed(seed)
        accelerator = Accelerator()
        return accelerator, accelerator.prepare(DataLoader(range(10), 2, shuffle=True))  # type: ignore[arg-type]

    _, loader = start(1)
    whole = [batch.tolist() for batch in loader]
    _, loader = start(1)
    for _ in zip(range(2), loader, strict=False):
        state = loader.state_dict()
    accelerator, loader = start(99)
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)] == whole[2:]


def test_the_position_of_a_rest_is_that_of_the_whole() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(10), 2))  # type: ignore[arg-type, var-annotated]
    for _ in accelerator.skip_first_batches(loader, 2):
        state = loader.state_dict()
        break
    assert state["batches"] == 3


def _steps(accumulation: int, split: bool, samples: int) -> tuple[int, int, int]:
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation, dataloader_config=DataLoaderConfiguration(split_batches=split)
    )
    loader: DataLoader[Any] = DataLoader(torch.arange(float(samples))[:, None], 2)  # type: ignore[arg-type]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    announced = accelerator.total_steps(loader, epochs=2)
    moves = accelerator.total_scheduler_steps(loader, epochs=2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert accelerator.total_steps(loader, epochs=2) == announced
    steps = 0
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                steps += accelerator.sync_gradients
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert scheduler.scheduler.last_epoch == moves
    return announced, steps, moves


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("accumulation", "samples"), [(1, 10), (3, 10), (4, 23)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_steps_that_are_announced_are_those_that_are_made(
    ranks: int, accumulation: int, split: bool, samples: int
) -> None:
    for announced, steps, moves in run_ranks(ranks, _steps, accumulation, split, samples):
        assert announced == steps
        assert moves == steps * (1 if split else ranks)
