"""Which rank sees which sample, and what metrics are made of, compared with the real package.

Both run every case in the same two ranks, so that the cost is that of two launches. Two differences on purpose stand
here too, at the end: each test shows both sides of its line in the compatibility page.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration

accelerate = pytest.importorskip("accelerate")

Make = Callable[[dict[str, Any]], Any]
Case = tuple[int, dict[str, Any], dict[str, Any]]


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(range(self.samples))


def _ours(options: dict[str, Any]) -> Any:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def _theirs(options: dict[str, Any]) -> Any:
    return accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**options))


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"split_batches": True},
    {"even_batches": False},
    {"dispatch_batches": True},
    {"dispatch_batches": True, "split_batches": True},
]
LOADERS: list[dict[str, Any]] = [
    {"batch_size": 4},
    {"batch_size": 4, "drop_last": True},
    {"batch_size": 2, "num_workers": 1},
]
STREAMS: list[dict[str, Any]] = [{}, {"split_batches": True}, {"dispatch_batches": False}]

CASES: list[Case] = [
    *(
        (samples, options, loader)
        for samples, options, loader in itertools.product([1, 7, 16], CONFIGURATIONS, LOADERS)
        if not ("drop_last" in loader and "dispatch_batches" in options)  # accelerate 1.15 fails with a TypeError
    ),
    *((samples, options, {"batch_size": 4, "streamed": True}) for samples in (1, 7, 16) for options in STREAMS),
]


def _seen(make: Make, samples: int, options: dict[str, Any], loader_options: dict[str, Any]) -> list[Any]:
    """The length, and per epoch: this rank's batches, what metrics got of all ranks, where the end showed."""
    loader_options = dict(loader_options)
    streamed = loader_options.pop("streamed", False)
    accelerator = make(options)
    dataset: Any = Stream(samples) if streamed else list(range(samples))
    loader = accelerator.prepare(DataLoader(dataset, **loader_options))
    epochs: list[Any] = []
    for _ in range(2):
        batches, metrics, ends = [], [], []
        with torch.no_grad():
            for batch in loader:
                batches.append(batch.tolist())
                ends.append(loader.end_of_dataloader)
                if options.get("even_batches", True):
                    metrics += accelerator.gather_for_metrics(batch).tolist()
        if streamed and options.get("dispatch_batches") is False:
            metrics.clear()  # accelerate's have the samples twice that fill up the last round
        epochs.append((batches, metrics, ends))
    return [None if streamed else len(loader), epochs]


def _split_by_argument(kind: type[Any]) -> list[list[int]]:
    """This rank's batches where `split_batches` is an argument of the Accelerator."""
    return [batch.tolist() for batch in kind(cpu=True, split_batches=True).prepare(DataLoader(range(8), 4))]  # type: ignore[arg-type]


def _all_cases(make: Make) -> list[Any]:
    """What `_seen` gives of every case, and of `_split_by_argument` at the end."""
    warnings.simplefilter("ignore")
    return [*(_seen(make, *case) for case in CASES), _split_by_argument(type(make({})))]


@pytest.fixture(scope="module")
def both() -> list[tuple[Any, Any]]:
    """Of each entry of `_all_cases`, what both ranks saw: ours and theirs."""
    ours, theirs = (list(zip(*run_ranks(2, _all_cases, make), strict=True)) for make in (_ours, _theirs))
    return list(zip(ours, theirs, strict=True))


@pytest.mark.sample(16)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_ranks_get_what_accelerate_gives_them(number: int, both: list[tuple[Any, Any]]) -> None:
    ours, theirs = both[number]
    assert ours == theirs


def _shuffled(make: Make) -> list[Any]:
    warnings.simplefilter("ignore")
    accelerator = make({"use_seedable_sampler": True, "data_seed": 5})
    loader = accelerator.prepare(DataLoader(range(10), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
    epochs: list[list[int]] = []
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1] += batch.tolist()
            accelerator.wait_for_everyone()
    return epochs


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_seedable_sampler_gives_accelerates_order(world_size: int) -> None:
    ours, theirs = (run_ranks(world_size, _shuffled, make) for make in (_ours, _theirs))
    assert ours == theirs


def _skipped(make: Make) -> list[Any]:
    warnings.simplefilter("ignore")
    accelerator = make({})
    loader = accelerator.prepare(DataLoader(torch.arange(22), 2))  # type: ignore[arg-type]
    rest = accelerator.skip_first_batches(loader, 2)
    return [len(rest), [batch.tolist() for batch in rest], [batch.tolist() for batch in loader]]


def test_skipped_batches_are_those_that_accelerate_skips() -> None:
    assert run_ranks(2, _skipped, _ours) == run_ranks(2, _skipped, _theirs)


def test_split_batches_as_an_argument_splits_and_accelerate_ignores_it(both: list[tuple[Any, Any]]) -> None:
    ours, theirs = both[-1]
    assert ours == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert theirs == ([[0, 1, 2, 3]], [[4, 5, 6, 7]])


class Noisy(Dataset[Any]):
    """A dataset that draws from torch's generator, as one that augments its samples does."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        return torch.rand(()).item()


class NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (torch.rand(()).item() for _ in range(6))


def _noise(make: Make | None) -> list[list[Any]]:
    """Per dataset, the batches with what the loop draws after each; without `make` from the loader as it is."""
    warnings.simplefilter("ignore")
    accelerator = make({}) if make else None
    drawn: list[list[Any]] = []
    for dataset in (Noisy(), NoisyStream()):
        torch.manual_seed(7)
        loader = DataLoader(dataset, 2)
        batches = accelerator.prepare(loader) if accelerator else loader
        drawn.append([(batch.tolist(), torch.rand(()).item()) for batch in batches])
    return drawn


def test_one_process_reads_no_batch_ahead_but_to_see_the_end_and_accelerate_always_reads_one() -> None:
    """What a dataset draws, a random crop say, then comes before what the loop draws for the batch before, or after."""
    (plain, plain_stream), (ours, our_stream), (theirs, their_stream) = (
        run_ranks(1, _noise, make)[0] for make in (None, _ours, _theirs)
    )
    assert ours == plain != theirs
    assert our_stream == their_stream != plain_stream
