"""Batches of any size out of a loader that does not move, or out of one batch."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbaccel import Accelerator
from nbaccel.errors import CannotSplit
from nbaccel.features.batch_size.examples import LOOKED_AT, examples_of

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_batch_repeats_the_samples_in_whatever_they_come(size: int) -> None:
    x, names = torch.arange(6.0).reshape(3, 2), ["a", "b", "c"]
    batch = {"pair": Pair(x, (x, 0.5)), "names": names, "mask": UserDict(m=x > 0), "scale": torch.tensor(2.0)}
    taken = examples_of(batch).take(size)
    rows = [row % 3 for row in range(size)]
    assert isinstance(taken["pair"], Pair)
    assert taken["pair"].x.equal(x[rows])
    assert taken["pair"].y[0].equal(x[rows])
    assert taken["pair"].y[1] == 0.5
    assert taken["names"] == [names[row] for row in rows]
    assert isinstance(taken["mask"], UserDict)
    assert taken["mask"]["m"].equal((x > 0)[rows])
    assert taken["scale"].equal(torch.tensor(2.0))


def test_a_batch_holds_no_more_memory_than_its_samples() -> None:
    taken = examples_of(torch.ones(5, 4)).take(3)
    assert taken.untyped_storage().nbytes() == 3 * 4 * 4


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="the example batch, a Tensor, holds no sample"):
        examples_of(torch.empty(0, 3))


@pytest.mark.parametrize("batch", [{"name": "x"}, torch.tensor(1.0), (torch.ones(2, 30), torch.ones(9, 4))])
def test_a_batch_whose_samples_nobody_can_tell_apart_is_refused_and_the_loader_asked_for(batch: Any) -> None:
    with pytest.raises(CannotSplit) as caught:
        examples_of(batch)
    assert "takes the loader as well" in caught.value.__notes__[0]


def test_a_loader_makes_its_own_batches_of_whatever_samples() -> None:
    def graph(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Edges of all samples in a row: no dimension counts samples."""
        return {"edges": torch.cat(samples).reshape(2, -1), "sizes": torch.tensor([len(one) for one in samples])}

    batch = examples_of(DataLoader(_Texts([4, 6, 2]), batch_size=2, collate_fn=graph)).take(5)
    assert batch["sizes"].tolist() == [6, 4, 2, 6, 4]
    assert batch["edges"].shape == (2, 11)


class _Texts(Dataset[Any]):
    """Samples of different lengths; knows which ones were read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.ones(self.lengths[index], dtype=torch.int64)


def _padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_the_longest_samples_of_a_loader_are_taken() -> None:
    loader = DataLoader(_Texts([5, 90, 7, 30] * 10), batch_size=4, collate_fn=_padded, shuffle=True)
    assert examples_of(loader).take(3).shape == (3, 90)


def test_of_a_large_dataset_some_samples_are_looked_at_evenly() -> None:
    texts = _Texts([1] * 100_000)
    examples_of(DataLoader(texts, batch_size=4))
    assert len(texts.read) == LOOKED_AT
    assert texts.read[0] < 1000
    assert texts.read[-1] > 99_000


@pytest.mark.parametrize("prepared", [False, True])
def test_a_loader_stays_where_it_is(prepared: bool) -> None:
    def rest(looks: bool) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        loader: Any = DataLoader(_Texts([3] * 20), batch_size=2, shuffle=True, generator=generator)
        if prepared:
            loader = Accelerator(cpu=True).prepare(loader)
        batches = iter(loader)
        next(batches)
        if looks:
            examples_of(loader)
        return [loader.dataset.read[-2:] for _ in batches]

    assert rest(looks=True) == rest(looks=False)


def test_a_dataset_of_whole_batches_gives_its_largest_one() -> None:
    assert len(examples_of(DataLoader(_Texts([3, 8, 5]), batch_size=None)).take(8)) == 8


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from (torch.ones(length) for length in (2, 6, 4))


class _Once(IterableDataset[Any]):
    """A stream that goes on where it was."""

    def __init__(self) -> None:
        self.position = 5

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.position += 1
        return torch.ones(self.position % 7 + 1)


class _Resumable(_Once):
    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_a_stream_is_looked_at_from_its_beginning() -> None:
    assert examples_of(DataLoader(_Stream(), batch_size=2, collate_fn=_padded)).take(1).shape == (1, 6)


def test_a_stream_that_knows_its_place_is_put_back_there() -> None:
    stream = _Resumable()
    assert examples_of(DataLoader(stream, batch_size=2, collate_fn=_padded)).take(1).shape == (1, 7)
    assert stream.position == 5


def test_a_stream_that_can_be_read_once_is_not_read() -> None:
    stream = _Once()
    with pytest.raises(TypeError, match=r"_Once can be read once only.*give one batch"):
        examples_of(DataLoader(stream, batch_size=2))
    assert stream.position == 5


def test_a_dataset_with_other_keys_asks_for_a_batch() -> None:
    class Keyed(_Texts):
        def __getitem__(self, index: Any) -> torch.Tensor:
            raise KeyError(index)

    with pytest.raises(TypeError, match=r"cannot read samples 0, 1, \.\.\. of Keyed: KeyError: 0\. Give one batch"):
        examples_of(DataLoader(Keyed([1, 2]), batch_size=1))


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="the dataset of this loader, a _Texts, is empty"):
        examples_of(DataLoader(_Texts([]), batch_size=2))
