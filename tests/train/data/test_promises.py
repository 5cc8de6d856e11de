"""What the docstring of `DataLoaderConfiguration` promises, in real ranks: each sample seen in training and metrics."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration

SAMPLES = (1, 7, 64)
BATCH_SIZES = (2, 4)

MODES: dict[str, dict[str, Any]] = {
    "even": {},
    "drop": {},
    "join": {"even_batches": False},
    "dispatch": {"dispatch_batches": True},
    "split": {"split_batches": True},
    "dispatch and split": {"dispatch_batches": True, "split_batches": True},
}

Seen = dict[tuple[int, int], tuple[list[list[int]], list[int], int]]


def _train(mode: str, workers: int, samples: tuple[int, ...] = SAMPLES) -> Seen:
    """For each number of samples and batch size: this rank's batches, the ids of the metrics, the model's steps."""
    warnings.simplefilter("ignore")
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**MODES[mode]))
    seen: Seen = {}
    for count, batch_size in itertools.product(samples, BATCH_SIZES):
        loader: DataLoader[Any] = DataLoader(
            range(count),  # type: ignore[arg-type]
            batch_size,
            drop_last=mode == "drop",
            num_workers=workers,
        )
        model = torch.nn.Linear(1, 1)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
        batches, metrics, steps = [], [], 0
        with accelerator.join_uneven_inputs([model]) if mode == "join" else torch.enable_grad():
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch.float()[:, None]).sum())
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
                batches.append(batch.tolist())
                if mode != "join":
                    metrics += accelerator.gather_for_metrics(batch).tolist()
        seen[count, batch_size] = batches, metrics, steps
        accelerator.free_memory()
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_every_sample_is_seen_as_promised(mode: str, workers: int) -> None:
    ranks = run_ranks(2, _train, mode, workers, SAMPLES if workers == 0 else (7,))
    for samples, batch_size in ranks[0]:
        per_rank = [rank[samples, batch_size][0] for rank in ranks]
        metrics = [sorted(rank[samples, batch_size][1]) for rank in ranks]
        seen = Counter(itertools.chain(*itertools.chain(*per_rank)))
        lengths = [len(batches) for batches in per_rank]
        whole_round = batch_size if "split" in mode else 2 * batch_size
        if mode == "drop":
            kept = samples // whole_round * whole_round
            assert seen == Counter(range(kept))
            assert metrics == [list(range(kept))] * 2
        elif mode == "join":
            assert seen == Counter(range(samples))
        else:
            assert set(seen) == set(range(samples))
            assert lengths[0] == lengths[1] == -(-samples // whole_round)
            assert metrics == [list(range(samples))] * 2
            sizes = {len(batch) for batches in per_rank for batch in batches}
            if "dispatch" in mode:
                assert sum(seen.values()) == samples + samples % 2  # the last round's equal parts, filled up
            else:
                assert sum(seen.values()) == lengths[0] * whole_round
                assert sizes == {whole_round // 2}


def _empty(mode: str) -> str:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**MODES[mode]))
    with pytest.raises(ValueError, match="is empty") as caught:
        accelerator.prepare(DataLoader([], 2, drop_last=mode == "drop"))  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_no_samples_are_an_error_on_every_rank(mode: str) -> None:
    for message in [*run_ranks(2, _empty, mode), _empty(mode)]:
        assert message.startswith("the dataset of a prepared loader is empty (list of length 0): there is nothing to")


def _warned(samples: int, batch_size: int, options: dict[str, Any], drop_last: bool = False) -> list[str]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.prepare(DataLoader(range(samples), batch_size, drop_last=drop_last))  # type: ignore[arg-type]
    return [str(warning.message) for warning in caught]


def test_fewer_samples_than_a_round_are_a_warning_that_says_how_many_are_repeats() -> None:
    for (message,) in run_ranks(2, _warned, 5, 4, {}):
        assert message == (
            "the dataset has 5 samples, fewer than one batch of 4 for each of 2 ranks: every epoch is one step, in "
            "which 3 of 8 samples are repeats (gather_for_metrics leaves them out). A batch_size of at most 2 repeats "
            "less."
        )
    for options in ({"even_batches": False}, {"split_batches": True}, {"dispatch_batches": True}):
        assert run_ranks(2, _warned, 5, 4, options) == [[], []]
    assert run_ranks(2, _warned, 8, 4, {}) == [[], []]
    assert _warned(5, 8, {}) == []


def test_dropping_all_there_is_is_a_warning() -> None:
    for (message,) in run_ranks(2, _warned, 5, 4, {}, True):
        assert "5 samples" in message
        assert "drop_last" in message
        assert "every epoch is empty" in message
