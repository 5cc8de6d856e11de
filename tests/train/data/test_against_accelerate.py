"""Which rank sees which sample, and what metrics are made of, compared with the real package where it is the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration

accelerate = pytest.importorskip("accelerate")


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(range(self.samples))


Make = Callable[[dict[str, Any]], Any]


def _ours(options: dict[str, Any]) -> Any:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def _theirs(options: dict[str, Any]) -> Any:
    warnings.simplefilter("ignore")
    return accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**options))


def _seen(make: Make, samples: int, options: dict[str, Any], loader_options: dict[str, Any]) -> list[Any]:
    """Per epoch: this rank's batches, what metrics got of all ranks, and where the end showed."""
    warnings.simplefilter("ignore")
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
    try:
        length = len(loader)
    except TypeError:
        length = -1
    return [length, epochs]


CASES = [{"batch_size": 4}, {"batch_size": 4, "drop_last": True}, {"batch_size": 2, "num_workers": 1}]

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"split_batches": True},
    {"even_batches": False},
    {"dispatch_batches": True},
    {"dispatch_batches": True, "split_batches": True},
]


@pytest.mark.parametrize("samples", [1, 7, 16])
@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize("loader_options", CASES, ids=str)
def test_ranks_get_what_accelerate_gives_them(
    samples: int, options: dict[str, Any], loader_options: dict[str, Any]
) -> None:
    if loader_options.get("drop_last") and options.get("dispatch_batches"):
        pytest.skip("accelerate 1.15 fails with a TypeError")
    assert run_ranks(2, _seen, _ours, samples, options, loader_options) == run_ranks(
        2, _seen, _theirs, samples, options, loader_options
    )


@pytest.mark.parametrize("samples", [1, 7, 16])
@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"dispatch_batches": False}], ids=str)
def test_streams_are_dealt_as_accelerate_deals_them(samples: int, options: dict[str, Any]) -> None:
    loader_options = {"batch_size": 4, "streamed": True}
    ours = run_ranks(2, _seen, _ours, samples, options, loader_options)
    theirs = run_ranks(2, _seen, _theirs, samples, options, loader_options)
    assert ours == theirs


def _shuffled(make: Make, world_size: int) -> list[Any]:
    accelerator = make({"use_seedable_sampler": True, "data_seed": 5})
    loader = accelerator.prepare(DataLoader(range(10), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
    epochs = []
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1] += batch.tolist()
            accelerator.wait_for_everyone()
    return epochs


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_seedable_sampler_gives_accelerates_order(world_size: int) -> None:
    ours, theirs = (run_ranks(world_size, _shuffled, make, world_size) for make in (_ours, _theirs))
    assert ours == theirs


def _skipped(make: Make) -> list[Any]:
    accelerator = make({})
    loader = accelerator.prepare(DataLoader(torch.arange(22), 2))  # type: ignore[arg-type]
    rest = accelerator.skip_first_batches(loader, 2)
    return [len(rest), [batch.tolist() for batch in rest], [batch.tolist() for batch in loader]]


def test_skipped_batches_are_those_that_accelerate_skips() -> None:
    assert run_ranks(2, _skipped, _ours) == run_ranks(2, _skipped, _theirs)
