"""Rank 0 reads, the others receive."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, IterableDataset

from nbaccel import Accelerator, CollectiveMismatch, RanksFailed, World
from nbaccel.base.events import Event, Waiting, outlet
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration
from nbaccel.train.data.dispatch import _RoundShard
from nbaccel.train.data.position import DatasetStates
from nbaccel.train.data.shard import NOTHING


class Draws(IterableDataset[float]):
    """A stream that differs between ranks that read it: it draws as it goes."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.read = 0

    def __iter__(self) -> Iterator[float]:
        for _ in range(self.samples):
            self.read += 1
            yield random.random()


def _drawn(dispatch: bool | None) -> tuple[list[float], list[float], int]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    random.seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(Draws(8), 2))
    mine, everyone = [], []
    for batch in loader:
        mine += batch.tolist()
        everyone += accelerator.gather(batch).tolist()
    return mine, everyone, loader.dataset.read


def test_a_stream_that_differs_between_ranks_is_rank_0s_alone() -> None:
    (first, everyone, read), (second, _, read_by_1) = run_ranks(2, _drawn, None)
    random.seed(0)
    stream = [random.random() for _ in range(8)]
    assert everyone == pytest.approx(stream)
    assert first + second == pytest.approx(stream[:2] + stream[4:6] + stream[2:4] + stream[6:])
    assert (read, read_by_1) == (8, 0)


def test_a_stream_that_all_ranks_read_draws_alike_on_all_of_them() -> None:
    (first, everyone, read), (second, _, read_by_1) = run_ranks(2, _drawn, False)
    assert sorted(first + second) == sorted(everyone)
    assert len(set(everyone)) == 8
    assert (read, read_by_1) == (8, 8)


@dataclass
class Pair:
    ids: torch.Tensor
    text: list[str]


def _collate(samples: list[int]) -> dict[str, Any]:
    ids = torch.tensor(samples)
    return {
        "pair": Pair(ids, [f"text {index}" for index in samples]),
        "half": ids.to(torch.bfloat16)[:, None].expand(-1, 3),
        "mask": (ids % 2 == 0, torch.tensor(samples, dtype=torch.complex64)),
        "none": None,
        "scalar": torch.tensor(7),
        "empty": torch.empty(len(samples), 0),
    }


def _structured() -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(range(6), 2, collate_fn=_collate))  # type: ignore[arg-type, var-annotated]
    return list(loader)


def test_batches_arrive_as_they_were_whatever_they_hold() -> None:
    for rank, batches in enumerate(run_ranks(2, _structured)):
        expected = [[0, 1], [4]] if rank == 0 else [[2, 3], [5]]
        for batch, ids in zip(batches, expected, strict=True):
            assert batch["pair"].ids.tolist() == ids
            assert batch["pair"].text == [f"text {index}" for index in ids]
            assert (batch["half"].dtype, tuple(batch["half"].shape)) == (torch.bfloat16, (len(ids), 3))
            assert batch["half"][:, 2].tolist() == ids
            assert batch["mask"][0].tolist() == [index % 2 == 0 for index in ids]
            assert batch["mask"][1].dtype == torch.complex64
            assert (batch["none"], batch["scalar"].item(), tuple(batch["empty"].shape)) == (None, 7, (len(ids), 0))


def _ragged() -> list[int]:
    """Batches padded to different lengths, as a tokenizer's collator makes them."""

    def collate(samples: list[int]) -> torch.Tensor:
        return torch.zeros(len(samples), max(samples) + 1)

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(range(8), 2, collate_fn=collate))  # type: ignore[arg-type, var-annotated]
    return [batch.shape[1] for batch in loader]


def test_batches_of_different_lengths_need_not_fit_together() -> None:
    assert run_ranks(2, _ragged) == [[2, 6], [4, 8]]


def _sliced() -> list[list[int]]:
    calls = []

    def every_second(batch: torch.Tensor, data_slice: slice, process_index: int, num_processes: int) -> torch.Tensor:
        calls.append(data_slice)
        return batch[process_index::num_processes]

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare_data_loader(
        DataLoader(range(8), 2),  # type: ignore[arg-type]
        slice_fn_for_dispatch=every_second,
    )
    seen = [batch.tolist() for batch in loader]
    assert calls == ([slice(0, 2), slice(2, 4)] * 2 if accelerator.is_main_process else [])
    return seen


def test_a_slice_function_of_ones_own_cuts_each_round() -> None:
    assert run_ranks(2, _sliced) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def _uneven() -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True, even_batches=False))
    loader = accelerator.prepare(DataLoader(range(5), 2))  # type: ignore[arg-type, var-annotated]
    with torch.no_grad():
        return [batch.tolist() for batch in loader]


def test_without_even_batches_the_last_ranks_get_what_is_left() -> None:
    assert run_ranks(2, _uneven) == [[[0, 1], [4]], [[2, 3]]]


def _broken() -> str:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(4)
            raise OSError("the disk is gone")

    accelerator = Accelerator()
    try:
        for _ in accelerator.prepare(DataLoader(Broken(), 1)):
            pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_failure_to_read_is_told_to_every_rank() -> None:
    assert run_ranks(2, _broken) == [
        "OSError: the disk is gone",
        "NbaccelError: rank 0 failed while it read a batch for all ranks: OSError: the disk is gone",
    ]


class _Sized(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)

    def __len__(self) -> int:
        return 10


def _sized(dispatch: bool) -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(_Sized(), 2))
    return [len(loader), *([batch.tolist() for batch in loader] for _ in range(2)), len(loader)]


@pytest.mark.parametrize("dispatch", [False, True])
def test_streams_with_a_length_have_one_when_prepared(dispatch: bool) -> None:
    last = ([8], [9]) if dispatch else ([8, 9], [0, 1])
    first = [[0, 1], [4, 5], last[0]]
    second = [[2, 3], [6, 7], last[1]]
    assert run_ranks(2, _sized, dispatch) == [[3, first, first, 3], [3, second, second, 3]]


def _alone_in_the_loop() -> str:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(_Sized(), 2))
    told = []

    def listener(event: Event) -> None:
        if isinstance(event, Waiting):
            told.append(event.call)
            raise CollectiveMismatch("nobody will come")

    if not accelerator.is_main_process:
        with outlet(listener), pytest.raises(CollectiveMismatch, match="nobody will come"):
            next(iter(loader))
    return "".join(told)


def test_a_rank_that_waits_for_rank_0_in_vain_says_where() -> None:
    _, told = run_ranks(2, _alone_in_the_loop)
    assert told.startswith("the loop over a loader that rank 0 reads for all ranks")


def _left_early() -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    loader = accelerator.prepare(DataLoader(range(12), 2))  # type: ignore[arg-type, var-annotated]
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        break
    accelerator.wait_for_everyone()
    return [*seen, *(batch.tolist() for batch in loader)]


def test_a_loop_that_was_left_early_starts_anew() -> None:
    first, second = run_ranks(2, _left_early)
    assert first == [[0, 1], [0, 1], [4, 5], [8, 9]]
    assert second == [[2, 3], [2, 3], [6, 7], [10, 11]]


def _only_rank_0_has_data() -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    samples = range(8) if accelerator.is_main_process else range(1)
    loader = accelerator.prepare(DataLoader(samples, 2))  # type: ignore[arg-type, var-annotated]
    assert len(loader) == 2
    return [batch.tolist() for batch in loader]


def test_only_rank_0_needs_the_data() -> None:
    assert run_ranks(2, _only_rank_0_has_data) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def _parts() -> None:
    accelerator = Accelerator()
    samples = range(8 - accelerator.process_index)
    accelerator.prepare(DataLoader(samples, 2))  # type: ignore[arg-type, var-annotated]


def test_different_datasets_are_refused_before_the_first_batch_with_the_lengths() -> None:
    with pytest.raises(RanksFailed, match=r"different lengths \(rank 0: 8, rank 1: 7\).*dispatch_batches=True"):
        run_ranks(2, _parts)


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(0, 40),
    batch_size=st.integers(1, 6),
    ranks=st.integers(2, 5),
    even=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_sample_is_sent_to_exactly_one_rank_but_for_the_fill(
    samples: int, batch_size: int, ranks: int, even: bool, drop_last: bool
) -> None:
    loader: DataLoader[Any] = DataLoader(range(samples), batch_size, drop_last=drop_last)  # type: ignore[arg-type]
    shard = _RoundShard(loader, DatasetStates(None), World(0, ranks, 0, ranks), None, even=even, split=False)
    sent: list[list[list[int]]] = [[] for _ in range(ranks)]
    for members, first, is_last in shard.rounds():
        for rank in range(ranks):
            part = shard.part(members, first, is_last, rank)
            if part is not NOTHING:
                sent[rank].append(part.tolist())
    seen = Counter(index for batches in sent for batch in batches for index in batch)
    assert [len(batches) for batches in sent] == shard.lengths_of(len(loader))
    if drop_last:
        assert seen == Counter(range(samples // (batch_size * ranks) * batch_size * ranks))
    elif even:
        assert set(seen) == set(range(samples))
        assert 0 <= sum(seen.values()) - samples < ranks
        assert len({tuple(len(batch) for batch in batches) for batches in sent}) == 1
    else:
        assert seen == Counter(range(samples))
