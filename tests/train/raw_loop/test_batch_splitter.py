"""Which samples ranks get, asked in one process: one rank after the other runs the same small program."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _SingleProcessDataLoaderIter

from nbaccel.base.events import Event, Gauge, LoopEntered, Progress, outlet
from nbaccel.errors import NotPrepared
from nbaccel.train.raw_loop.batch_parts import GivenBatches, Split, Turn, _uneven_turns
from nbaccel.train.raw_loop.batch_splitter import BatchSplitter
from nbaccel.train.raw_loop.batch_values import BatchWatch
from nbaccel.train.raw_loop.deferred_calls import StepCounter

HOOKED = ("__init__", "_reset", "_next_index", "__next__")


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    real = {name: getattr(_BaseDataLoaderIter, name) for name in HOOKED}
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    for name, method in real.items():
        setattr(_BaseDataLoaderIter, name, method)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


class Rank:
    """One rank, as a program sees it in these tests. Rank -1 is plain torch."""

    def __init__(self, rank: int, world_size: int, mode: str = "split") -> None:
        self.rank = rank
        self.got: list[Any] = []
        self.said: list[Split] = []
        self.handed: list[GivenBatches] = []
        self.own: list[bool] = []
        self.training = True
        steps = StepCounter(lambda: self.passes.batches)
        self.passes = BatchSplitter(max(0, rank), world_size, self, self, steps, BatchWatch(watches=False))
        if rank >= 0:
            self.passes.install()
            self.passes.begin(mode)

    def is_training(self) -> bool:
        return self.training

    def are_lazy(self) -> bool:
        return False

    def batch_norms(self) -> Sequence[str]:
        return ()

    def next_turn(self, turn: Turn | None) -> None:
        """It has nothing to do at a part."""

    def note_split(self, split: Split) -> None:
        self.said.append(split)

    def decision(self, batch_size: int | None) -> str:
        return ""

    def note_drawn(self) -> None:
        """Nobody is told."""

    def take(self, batch: Any) -> None:
        self.got.append(copy.deepcopy(batch))

    def backward(self, keep_whole: str = "") -> None:
        self.handed.append(self.passes.handed)
        self.own.append(self.passes.gives_own)
        if self.rank >= 0:
            self.passes.note_backward(keep_whole)

    def train(self, loader: Any) -> None:
        for batch in loader:
            self.take(batch)
            self.backward()


Program = Callable[[Rank], None]


def run(program: Program, world_size: int = 2, mode: str = "split") -> tuple[list[Any], list[Rank]]:
    """What plain torch gives `program`, and the ranks after it."""
    ranks = []
    for rank in range(-1, world_size):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        this = Rank(rank, world_size, mode)
        program(this)
        this.passes.end()
        ranks.append(this)
    return ranks[0].got, ranks[1:]


def parts_of(batch: Any) -> list[Tensor]:
    return [batch] if isinstance(batch, Tensor) else list(batch.values() if isinstance(batch, dict) else batch)


def check(plain: list[Any], ranks: Sequence[Any], whole: set[int]) -> None:
    """Batches of the numbers `whole` are in all ranks; parts of the others together are the batch of plain torch."""
    assert all(len(rank.got) == len(plain) for rank in ranks)
    for number, batch in enumerate(plain):
        theirs = [rank.got[number] for rank in ranks]
        for place, value in enumerate(parts_of(batch)):
            columns = [parts_of(each)[place] for each in theirs]
            if number in whole:
                assert all(torch.equal(column, value) for column in columns), number
            else:
                assert torch.equal(torch.cat(columns), value), number
                assert all(abs(len(column) - len(value) / len(ranks)) <= 1 for column in columns), number


def numbers(count: int = 22) -> TensorDataset:
    x = torch.arange(float(count))
    return TensorDataset(x[:, None] * torch.ones(3), x)


class Rows(Dataset[Tensor]):
    def __init__(self, count: int = 22) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        return itertools.islice(iter(self.items), info.id if info else 0, None, info.num_workers if info else 1)


# What is split --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_of_all_ranks_are_the_batch_of_torch(world_size: int, shuffle: bool) -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(), batch_size=7, shuffle=shuffle)
        for _ in range(3):
            rank.train(loader)

    plain, ranks = run(program, world_size)

    # The first batch is whole, and the last of each epoch, a single sample.
    check(plain, ranks, whole={0, 3, 7, 11})
    for rank in ranks:
        assert [each.is_part for each in rank.handed] == [n not in {0, 3, 7, 11} for n in range(12)]
    assert [sum(rank.handed[1].rows for rank in ranks), ranks[0].handed[1].whole] == [7, 7]
    assert ranks[0].handed[3].rows == ranks[0].handed[3].whole == 1
    assert ranks[0].said == [Split("loader", 4, 7, True)]
    assert all(rank.passes.has_split and rank.passes.batches == 12 for rank in ranks)


def test_uneven_last_batch_is_cut_like_the_others() -> None:
    plain, ranks = run(lambda rank: rank.train(DataLoader(numbers(19), batch_size=8)))

    check(plain, ranks, whole={0})
    assert [len(rank.got[2][1]) for rank in ranks] == [1, 2]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"in_order": False}])
def test_workers_prefetch_and_the_labels_keep_up(options: dict[str, Any]) -> None:
    def program(rank: Rank) -> None:
        use = {} if rank.rank < 0 and "in_order" in options else options  # torch itself gives them out of order then
        loader = DataLoader(numbers(26), batch_size=4, shuffle=True, num_workers=2, **use)
        for _ in range(2):
            rank.train(loader)
        for number, batch in enumerate(loader):
            rank.take(batch)
            if number == 2:
                break
        rank.train(loader)

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 14, 15, 16, 17})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_iterable_data_sets_are_sliced_when_they_come(num_workers: int) -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(Stream(list(numbers())), batch_size=5, num_workers=num_workers)
        for _ in range(2):
            rank.train(loader)

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 4, 5, 10, 11} if num_workers else {0})  # two workers have one sample left each
    assert ranks[1].handed[1].rows == 3
    assert ranks[1].handed[1].whole == 5


def test_batches_that_a_data_set_makes_are_sliced() -> None:
    batches = [(torch.randn(6, 2), torch.arange(6)) for _ in range(4)]
    plain, ranks = run(lambda rank: rank.train(DataLoader(Stream(batches), batch_size=None)))

    check(plain, ranks, whole={0})


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.randn(6), torch.tensor(1.0)) for _ in range(4)],
        [(torch.randn(6, 2), 1) for _ in range(4)],
        [torch.randn(6) for _ in range(4)],
    ],
)
def test_single_samples_are_no_batches(samples: list[Any]) -> None:
    def program(rank: Rank) -> None:
        for batch in DataLoader(Stream(samples), batch_size=None):
            rank.backward()
            rank.take(batch[0] if isinstance(batch, (tuple, list)) else batch)

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1, 2, 3})
    assert not ranks[0].said[0].is_split
    assert "looks like a single sample" in ranks[0].said[0].why


def test_sampler_of_index_lists_without_automatic_batches_is_cut_by_indices() -> None:
    sampler = BatchSampler(range(22), 6, drop_last=False)
    plain, ranks = run(lambda rank: rank.train(DataLoader(numbers(), batch_size=None, sampler=sampler)))

    check(plain, ranks, whole={0})


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_batch_samplers_of_ones_own(kind: Callable[[list[int]], Any]) -> None:
    sampler = [kind([5, 2, 8, 0]), kind([1, 3]), kind([4]), kind([9, 7, 6, 10, 11])]
    plain, ranks = run(lambda rank: rank.train(DataLoader(Rows(), batch_sampler=sampler)))

    check(plain, ranks, whole={0, 2})


def test_index_that_is_a_structure_is_not_cut() -> None:
    class Sized(Rows):
        def __getitems__(self, index: Any) -> Any:
            size, rows = index
            return [torch.full((size,), float(row)) for row in rows]

    plain, ranks = run(lambda rank: rank.train(DataLoader(Sized(), batch_sampler=[(2, [3, 4, 5]), (2, [1, 0])] * 2)))

    check(plain, ranks, whole={0})


class Box:
    """A batch that cannot be looked into."""

    def __init__(self, samples: list[Tensor]) -> None:
        self.x = torch.stack(samples)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_objects_are_cut_by_their_indices_or_stay_whole_for_once(num_workers: int) -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(Rows(18), batch_size=3, collate_fn=Box, num_workers=num_workers)
        for _ in range(2):
            for batch in loader:
                rank.take(batch.x)
                rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0} if not num_workers else {0, 1, 2})  # two were drawn ahead


def pairs(samples: list[Tensor]) -> Tensor:
    return torch.stack([torch.cat(pair) for pair in itertools.combinations(samples, 2)])


def episode(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    shots = torch.stack(samples).reshape(2, 2, 1)
    return shots[:, :1], shots[:, 1:]


def bag(samples: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    words = [sample.expand(int(sample) % 3 + 1) for sample in samples]
    return torch.cat(words), torch.tensor([0, *(len(each) for each in words[:-1])]).cumsum(0), torch.cat(samples)


class WithPairs:
    """An object that has all pairs beside what belongs to its samples."""

    def __init__(self, samples: list[Tensor]) -> None:
        self.x, self.pairs = torch.stack(samples), pairs(samples)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("collate", [pairs, episode, bag])
def test_a_collate_function_whose_batches_cannot_be_cut_is_given_all_samples(collate: Any, num_workers: int) -> None:
    def program(rank: Rank) -> None:
        for _ in range(2):
            rank.train(DataLoader(Rows(16), batch_size=4, collate_fn=collate, num_workers=num_workers))

    plain, ranks = run(program)

    check(plain, ranks, whole={*range(8)})
    assert [each.why for each in ranks[0].said] == [
        "the batches of its collate_fn cannot be cut (it is not known what of them belongs to which sample)"
    ]


def test_an_object_with_something_that_is_of_no_sample_is_given_all_samples() -> None:
    def program(rank: Rank) -> None:
        for batch in DataLoader(Rows(16), batch_size=4, collate_fn=WithPairs):
            rank.take(batch.x)
            rank.backward()

    check(*run(program), whole={*range(4)})


def test_a_batch_of_graphs_is_made_of_a_part_of_its_samples() -> None:
    kind = type("Batch", (Box,), {"__module__": "torch_geometric.data.batch", "ptr": torch.zeros(1)})

    def program(rank: Rank) -> None:
        for batch in DataLoader(Rows(16), batch_size=4, collate_fn=kind):
            rank.take(batch.x)
            rank.backward()

    check(*run(program), whole={0})


def test_dimensions_that_are_equally_long_by_chance_are_told_apart_by_a_later_batch() -> None:
    def padded(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples).expand(-1, 4 if samples[0] in (0, 4) else 3)

    plain, ranks = run(lambda rank: rank.train(DataLoader(Rows(16), batch_size=4, collate_fn=padded)))

    check(plain, ranks, whole={0, 1})


class Engine:
    """Trains and evaluates by one engine, which is four calls deep and counts its batches."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def run(self, step: Callable[[Any], None], *, trains: bool = True) -> None:
        self._run(step)

    def _run(self, step: Callable[[Any], None]) -> None:
        self._epoch(step)

    def _epoch(self, step: Callable[[Any], None]) -> None:
        self._batches(step)

    def _batches(self, step: Callable[[Any], None]) -> None:
        batches = iter(self.loader)
        for _ in range(len(self.loader)):
            step(next(batches))


def steps_of(rank: Rank) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    def train_step(batch: Any) -> None:
        rank.training = True
        rank.take(batch)
        rank.backward()

    def eval_step(batch: Any) -> None:
        rank.training = False
        with torch.no_grad():
            rank.take(batch)

    return train_step, eval_step


def on_two_lines(rank: Rank, engine: Engine) -> None:
    train, evaluate = steps_of(rank)
    for _ in range(2):
        engine.run(train)
        rank.training = True
        engine.run(evaluate)
        rank.training = True


def by_the_function_given(rank: Rank, engine: Engine) -> None:
    for _ in range(2):
        for step in steps_of(rank):
            engine.run(step)
            rank.training = True


@pytest.mark.parametrize("calls", [on_two_lines, by_the_function_given])
def test_an_engine_that_trains_and_evaluates_at_one_place_evaluates_on_whole_batches(calls: Any) -> None:
    plain, ranks = run(lambda rank: calls(rank, Engine(DataLoader(Rows(8), batch_size=4))))

    check(plain, ranks, whole={0, 2, 3, 6, 7})


def test_parts_that_an_engine_takes_and_does_not_train_on_are_an_error() -> None:
    def program(rank: Rank) -> None:
        engine, has_ended = Engine(DataLoader(Rows(16), batch_size=4)), []

        def step(batch: Any) -> None:
            rank.take(batch)
            if not has_ended:
                rank.backward()

        for _ in range(2):
            engine.run(step)
            has_ended.append(True)
        rank.passes.refuse_passed_over()

    with pytest.raises(NotPrepared, match=r"before the loop that evaluates begins and not inside of it"):
        run(program)


def test_batches_that_nobody_can_look_into_stay_whole_for_good() -> None:
    boxes = [Box([torch.zeros(2)] * 4) for _ in range(3)]

    def program(rank: Rank) -> None:
        for batch in DataLoader(Stream(boxes), batch_size=None):
            rank.take(batch.x)
            rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1, 2})
    assert [each.is_split for each in ranks[0].said] == [False]
    assert "cannot be cut" in ranks[0].said[0].why
    assert not ranks[0].passes.has_split


def test_rows_that_are_not_samples_are_not_cut() -> None:
    time_first: Callable[[list[Tensor]], Tensor] = lambda samples: torch.stack(samples, 1).expand(9, -1)  # noqa: E731
    loader = DataLoader(Stream([torch.ones(1)] * 12), batch_size=4, collate_fn=time_first)
    plain, ranks = run(lambda rank: rank.train(loader))

    check(plain, ranks, whole={0, 1, 2})


def test_batches_that_were_drawn_too_early_are_sliced_along_their_samples() -> None:
    def time_first(samples: list[Tensor]) -> Tensor:
        return torch.stack(samples, 1).expand(2, -1)

    def program(rank: Rank) -> None:
        rank.train(DataLoader(Rows(15), batch_size=3, collate_fn=time_first, num_workers=1))

    plain, ranks = run(program)

    check(plain[:1], [SimpleNamespace(got=rank.got[:1]) for rank in ranks], whole={0})
    assert all(torch.equal(torch.cat([rank.got[n] for rank in ranks], 1), plain[n]) for n in range(1, 5))


def test_collate_function_and_subclass() -> None:
    class Loader(DataLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield {"x": batch["x"] * 2}

    def program(rank: Rank) -> None:
        loader = Loader(Rows(), batch_size=5, shuffle=True, collate_fn=lambda rows: {"x": torch.stack(rows)})
        for _ in range(2):
            rank.train(loader)

    plain, ranks = run(program)

    check(plain, ranks, whole={0})


def test_loaders_side_by_side() -> None:
    def program(rank: Rank) -> None:
        first, second = DataLoader(numbers(), batch_size=7, shuffle=True), DataLoader(Rows(16), batch_size=4)
        for _ in range(2):
            for (x, y), z in zip(first, second, strict=True):
                for value in (x, y, z):
                    rank.take(value)
                rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1, 2, 9, 10, 21, 22})
    assert [(each.name, each.is_split) for each in ranks[0].said] == [("first", True), ("second", True)]


def test_window_of_batches_before_one_backward() -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(24), batch_size=4)
        for _ in range(2):
            batches = iter(loader)
            while window := list(itertools.islice(batches, 2)):
                for batch in window:
                    rank.take(batch)
                rank.backward()
                rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1})
    assert [each.is_part for each in ranks[0].handed] == [False] * 2 + [True] * 10
    assert all(each.batches == 2 for each in ranks[0].handed)


def test_program_that_takes_batches_ahead() -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(26), batch_size=4, shuffle=True)
        for _ in range(3):
            batches = iter(loader)
            ahead = next(batches)
            while ahead is not None:
                batch, ahead = ahead, next(batches, None)
                rank.take(batch)
                if rank.rank >= 0 and len(batch[1]) < 4:  # as dropout would
                    torch.rand(rank.rank + 1)
                rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1})
    for n, expected in ((5, (True, 2, 4)), (6, (True, 1, 2)), (20, (True, 1, 2))):
        assert {(each.is_part, each.rows, each.whole) for each in (rank.handed[n] for rank in ranks)} == {expected}
    assert all(each.batches <= 2 for each in ranks[0].handed)


def test_pass_that_ends_within_its_first_window_is_no_evaluation() -> None:
    def program(rank: Rank) -> None:
        for count in (24, 4):
            batches = iter(DataLoader(Stream(list(numbers(count))), batch_size=4))
            while window := list(itertools.islice(batches, 2)):
                for batch in window:
                    rank.take(batch)
                rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1})
    assert ranks[0].handed[-1].is_part


def test_batch_by_batch_from_new_iterators() -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(), batch_size=6, shuffle=True)
        for _ in range(4):
            rank.take(next(iter(loader)))
            rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0})


def test_iterator_that_is_kept_open_over_an_evaluation() -> None:
    def program(rank: Rank) -> None:
        batches, valid = iter(DataLoader(numbers(40), batch_size=4)), DataLoader(Rows(), batch_size=5)
        for _ in range(3):
            for _ in range(3):
                rank.take(next(batches))
                rank.backward()
            rank.training = False
            for batch in valid:
                rank.take(batch)
            rank.training = True

    plain, ranks = run(program)

    check(plain, ranks, whole={0} | {n for n in range(24) if n % 8 > 2})
    assert ranks[1].handed[3].rows == 2


def test_early_break_and_a_new_pass() -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(), batch_size=6, shuffle=True)
        for _ in range(3):
            for number, batch in enumerate(loader):
                rank.take(batch)
                rank.backward()
                if number == 1:
                    break

    plain, ranks = run(program)

    check(plain, ranks, whole={0})


def test_what_cycle_keeps_is_known_when_it_comes_again() -> None:
    def program(rank: Rank) -> None:
        for _ in range(2):
            batches = itertools.cycle(DataLoader(numbers(18), batch_size=5))
            for _ in range(10):
                rank.take(next(batches))
                rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 4, 8})
    assert [each.is_part for each in ranks[0].handed] == [n not in (0, 4, 8) for n in range(20)]
    assert [each.rows for each in ranks[1].handed] == [5, 3, 3, 2] * 2 + [5, 3] + [3, 3, 3, 2] * 2 + [3, 3]
    assert ranks[0].passes.batches == 20


def test_batches_are_forgotten_when_their_pass_has_ended() -> None:
    """Then a backward is of something else, such as all data at once."""

    def program(rank: Rank) -> None:
        rank.train(DataLoader(numbers(), batch_size=7))
        rank.backward()
        rank.backward()

    _, ranks = run(program)

    assert [each.is_part for each in ranks[0].handed] == [False, True, True, False, False, False]
    assert ranks[0].handed[4] == GivenBatches()


# What stays whole -----------------------------------------------------------------------------------------------------


def test_evaluation_on_the_training_loader_stays_whole() -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(), batch_size=7, shuffle=True)
        for _ in range(2):
            rank.train(loader)
            for batch in loader:
                rank.take(batch)
            with torch.no_grad():
                for batch in loader:
                    rank.take(batch)

    plain, ranks = run(program)

    check(plain, ranks, whole=set(range(24)) - {1, 2, 12, 13, 14})


def test_one_function_that_trains_and_evaluates() -> None:
    def epoch(rank: Rank, loader: Any, trains: bool) -> None:
        for batch in loader:
            rank.take(batch)
            if trains:
                rank.backward()

    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(16), batch_size=8)
        for _ in range(2):
            epoch(rank, loader, True)
            epoch(rank, loader, False)

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 2, 3, 6, 7})


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "eval"])
def test_evaluation_at_the_line_of_the_training_stays_whole_where_it_is_told_apart(how: str) -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(16), batch_size=8)
        for trains in (True, False, True, False):
            rank.training = trains or how != "eval"
            mode = getattr(torch, how) if how != "eval" and not trains else torch.enable_grad
            with mode():
                for batch in loader:
                    rank.take(batch)
                    if trains:
                        rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 2, 3, 6, 7})


def test_evaluation_that_was_taken_for_a_training_is_an_error() -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(16), batch_size=8)
        for trains in (True, False):
            for batch in loader:
                rank.take(batch)
                if trains:
                    rank.backward()

    with pytest.raises(NotPrepared, match=r"rank 0 of 2: the batches of loader .* torch\.no_grad\(\).*--strict"):
        run(program)

    def careless(rank: Rank) -> None:
        with contextlib.suppress(NotPrepared):
            program(rank)
        rank.got[:] = [torch.rand(2)]

    _, ranks = run(careless)

    assert torch.equal(ranks[0].got[0], ranks[1].got[0])


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_evaluation_that_is_left_early_has_not_trained(persistent_workers: bool) -> None:
    def program(rank: Rank) -> None:
        options = {"num_workers": 1, "persistent_workers": True} if persistent_workers else {}
        train, valid = DataLoader(numbers(), batch_size=8), DataLoader(Rows(), batch_size=8, **options)
        for _ in range(3):
            rank.training = False
            for batch in valid:
                rank.take(batch)
                break
            rank.training = True
            rank.train(train)

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1, 4, 8})


def test_batch_that_is_looked_at_stays_whole() -> None:
    def program(rank: Rank) -> None:
        train, valid = DataLoader(numbers(), batch_size=8), iter(DataLoader(Rows(80), batch_size=8))
        for _ in range(2):
            rank.take(next(iter(train)))
            for batch in train:
                rank.take(batch)
                with torch.no_grad():
                    rank.take(next(valid))
                rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1, 7} | {2, 4, 6, 9, 11, 13})


def test_look_at_a_loader_with_persistent_workers_stays_whole() -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(16), batch_size=8, num_workers=1, persistent_workers=True)
        for _ in range(2):
            for batch in loader:
                rank.take(batch)
                break
            rank.train(loader)

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1, 3})


def test_batches_that_were_listed_before_stay_whole() -> None:
    def program(rank: Rank) -> None:
        for batch in list(DataLoader(numbers(), batch_size=7)) * 2:
            rank.take(batch)
            rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole=set(range(8)))
    assert not ranks[0].said
    assert not ranks[0].handed[5].is_part


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_whose_loss_forbids_it_stays_whole(num_workers: int) -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(), batch_size=7, num_workers=num_workers)
        for _ in range(2):
            for batch in loader:
                rank.take(batch)
                rank.backward()
                rank.backward("a root of a mean")

    plain, ranks = run(program)

    check(plain, ranks, whole=set(range(8)))
    assert ranks[0].said == [Split("loader", 4, 7, False, "a root of a mean")]


def test_batches_smaller_than_the_world_are_told_at_the_end() -> None:
    plain, ranks = run(lambda rank: rank.train(DataLoader(numbers(3), batch_size=1)))

    check(plain, ranks, whole={0, 1, 2})
    assert [(each.is_split, "fewer than 2 samples" in each.why) for each in ranks[0].said] == [(False, True)]


def test_sampler_that_shares_out_by_itself_is_untouched() -> None:
    def program(rank: Rank) -> None:
        data = numbers(24)
        sampler = DistributedSampler(data, 2, max(0, rank.rank), shuffle=False)
        rank.train(DataLoader(data, batch_size=4, sampler=sampler))
        rank.train(DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False)))

    _, ranks = run(program)

    assert [[batch[1].tolist() for batch in rank.got[:2]] for rank in ranks] == [
        [[0, 2, 4, 6], [8, 10, 12, 14]],
        [[1, 3, 5, 7], [9, 11, 13, 15]],
    ]
    assert all(len(batch[1]) == 4 for rank in ranks for batch in rank.got)
    assert not ranks[0].said


def test_loader_within_a_data_set_is_left_alone() -> None:
    data = Stream(DataLoader(numbers(), batch_size=4))
    plain, ranks = run(lambda rank: rank.train(DataLoader(data, batch_size=None)))

    check(plain, ranks, whole={0})
    assert [(each.name, each.batches) for each in ranks[0].said] == [("loader", None)]


def test_loader_that_no_variable_holds_is_named_by_what_it_reads() -> None:
    def program(rank: Rank) -> None:
        for batch in DataLoader(numbers(), batch_size=4):
            rank.take(batch)
            rank.backward()
        for batch in DataLoader([torch.ones(2)] * 9, batch_size=4):  # type: ignore[arg-type]
            rank.take(batch)
            rank.backward()

    _, ranks = run(program)
    assert [each.name for each in ranks[0].said] == ["a DataLoader over a TensorDataset", "a DataLoader over a list"]


def test_thread_that_takes_batches_gets_them_whole() -> None:
    def program(rank: Rank) -> None:
        batches = iter(DataLoader(numbers(), batch_size=7))
        for _ in range(4):
            thread = threading.Thread(target=lambda: rank.take(next(batches)))
            thread.start()
            thread.join()
            rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1, 2, 3})


def test_after_stepping_back_batches_are_torchs() -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(), batch_size=7)
        rank.train(loader)
        rank.passes.step_back()
        rank.train(loader)
        if rank.rank >= 0:
            rank.passes.begin()
        rank.train(loader)

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 3, 4, 5, 6, 7, 8, 11})


def test_iterator_of_an_older_task_begins_whole_again() -> None:
    def program(rank: Rank) -> None:
        batches = iter(DataLoader(numbers(), batch_size=4))
        for number in range(5):
            if number == 2 and rank.rank >= 0:
                rank.passes.begin()
            rank.take(next(batches))
            rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 2})


def test_iterator_of_an_older_task_with_workers_stays_whole() -> None:
    def program(rank: Rank) -> None:
        sampler = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11, 12, 13], [14, 15]]
        batches = iter(DataLoader(Rows(), batch_sampler=sampler, num_workers=1))
        if rank.rank >= 0:
            rank.passes.begin()
        for batch in batches:
            rank.take(batch)
            rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole=set(range(5)))


# Batches of each rank's own -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_rank_takes_every_nth_batch(num_workers: int) -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(11), batch_size=2, num_workers=num_workers)
        for _ in range(2):
            rank.train(loader)

    plain, ranks = run(program, world_size=2, mode="each")

    got = [[batch[1].tolist() for batch in rank.got] for rank in ranks]
    ahead = 4 if num_workers else 0  # whole ones that workers had begun
    whole = [batch[1].tolist() for batch in plain[: 1 + ahead]]
    assert [each[: 1 + ahead] for each in got] == [whole, whole]
    assert [each[-3:] for each in got] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]]
    assert len(got[0]) == len(got[1])
    assert not any(each.is_part for each in ranks[0].handed)
    assert ranks[0].own == [n > ahead for n in range(1 + ahead)] + [True] * (len(got[0]) - 1 - ahead)
    assert ranks[0].passes.has_split
    (said,) = ranks[0].said
    assert said.is_split
    assert "fewer steps than the length of loader" in said.why


@pytest.mark.parametrize("data", [numbers(10), Stream(list(numbers(10)))])
def test_each_rank_makes_as_many_steps(data: Any) -> None:
    _, ranks = run(lambda rank: rank.train(DataLoader(data, batch_size=2)), world_size=3, mode="each")

    assert [[batch[1].tolist() for batch in rank.got] for rank in ranks] == [
        [[0, 1], [2, 3], [8, 9]],
        [[0, 1], [4, 5], [0, 1]],
        [[0, 1], [6, 7], [2, 3]],
    ]


# Random numbers -------------------------------------------------------------------------------------------------------


def test_dropout_differs_between_ranks_and_the_order_does_not() -> None:
    drawn: list[list[float]] = []

    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(21), batch_size=6, shuffle=True)
        mine = []
        for _ in range(3):
            for batch in loader:
                rank.take(batch)
                if rank.rank >= 0:
                    mine.append(torch.rand(len(batch[1]))[0].item())  # as often as there are samples
                rank.backward()
            rank.take(torch.rand(1))
        if rank.rank >= 0:
            drawn.append(mine)

    _, ranks = run(program)

    firsts, seconds = drawn
    assert firsts[0] == seconds[0]
    assert not set(firsts[1:]) & set(seconds[1:])
    rows = torch.cat([rank.got[n][1] for n in range(5, 9) for rank in ranks])
    assert sorted(rows.tolist()) == list(range(21))
    assert all(torch.equal(ranks[0].got[n], ranks[1].got[n]) for n in (4, 9, 14))  # between passes it is common


@pytest.mark.parametrize("leaves_early", [False, True])
def test_program_that_seeds_in_each_epoch_has_the_order_of_one_process(leaves_early: bool) -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(), batch_size=7, shuffle=True)
        for epoch in range(3):
            torch.manual_seed(epoch)
            rank.take(torch.rand(2).expand(2, 2))
            for batch in loader:
                rank.take(batch)
                if rank.rank >= 0:
                    torch.rand(rank.rank + 1)
                rank.backward()
                if leaves_early and len(rank.got) % 3 == 0:
                    break

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 1, 3, 6} if leaves_early else {0, 1, 4, 5, 9, 10, 14})


def test_seeding_within_a_step_does_not_part_the_ranks() -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(numbers(21), batch_size=7, shuffle=True)
        for epoch in range(3):
            for batch in loader:
                rank.take(batch)
                torch.manual_seed(8 + epoch)
                torch.rand(len(batch[1]))
                rank.backward()

    _, ranks = run(program)

    for first in (3, 6):
        rows = torch.cat([rank.got[n][1] for n in range(first, first + 3) for rank in ranks])
        assert sorted(rows.tolist()) == list(range(21))


def test_part_that_waits_for_its_backward_keeps_its_stream() -> None:
    """An evaluation in between ends, and what is drawn for the part must still not move the order."""

    def program(rank: Rank) -> None:
        loader, valid = DataLoader(numbers(20), batch_size=5, shuffle=True), DataLoader(Rows(4), batch_size=2)
        for _ in range(3):
            for batch in loader:
                with torch.no_grad():
                    list(valid)
                torch.rand(len(batch[1]))
                rank.take(batch)
                rank.backward()

    _, ranks = run(program)

    for n in (4, 8):
        rows = torch.cat([rank.got[m][1] for m in range(n, n + 4) for rank in ranks])
        assert sorted(rows.tolist()) == list(range(20))


class Noisy(Rows):
    """Draws for each sample, from all generators."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), random.random(), np.random.rand(), torch.rand(1).item()])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_data_sets_that_draw_do_not_part_the_ranks(num_workers: int) -> None:
    def program(rank: Rank) -> None:
        loader = DataLoader(Noisy(21), batch_size=7, shuffle=True, num_workers=num_workers)
        for _ in range(3):
            for batch in loader:
                rank.take(batch)
                rank.take(torch.tensor([[random.random(), np.random.rand()]]))
                rank.backward()

    _, ranks = run(program)

    assert all(torch.equal(ranks[0].got[n], ranks[1].got[n]) for n in range(1, 18, 2))
    for epoch in (6, 12):
        rows = torch.cat([rank.got[n] for n in range(epoch, epoch + 6, 2) for rank in ranks])
        assert sorted(rows[:, 0].tolist()) == list(range(21))
        assert all(len(set(rows[:, column].tolist())) == 21 for column in (1, 2, 3))


def test_end_gives_the_common_stream_back() -> None:
    states = []

    def program(rank: Rank) -> None:
        for batch in (batches := iter(DataLoader(numbers(), batch_size=7))):
            rank.backward()
            if len(batch[1]) < 7:
                break
        torch.rand(3)
        rank.passes.end()
        states.append(torch.rand(1))
        del batches

    run(program)

    assert states[1] == states[2]


# What must not be disturbed -------------------------------------------------------------------------------------------


def test_iterators_go_as_soon_as_nobody_holds_them() -> None:
    rank = Rank(0, 2)
    loader = DataLoader(numbers(), batch_size=4, num_workers=1)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
        rank.backward()
    workers, gone = batches._workers, weakref.ref(batches)
    gc.disable()
    try:
        del batches
        assert gone() is None
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


def test_loaders_are_copied_and_pickled_as_they_were() -> None:
    rank = Rank(0, 2)
    loader = DataLoader(numbers(), batch_size=4)
    before = set(vars(loader))
    rank.train(loader)

    assert set(vars(loader)) == before
    assert len(list(pickle.loads(pickle.dumps(loader)))) == 6
    assert len(list(copy.copy(loader))) == 6


def test_error_in_a_data_set_leaves_the_labels_in_order() -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> Tensor:
            if index == 9:
                raise KeyError(index)
            return super().__getitem__(index)

    def program(rank: Rank) -> None:
        indices = [[0, 1], [2, 3], [9, 9, 9], [4, 5, 6, 7], [8]]
        batches = iter(DataLoader(Broken(), batch_sampler=indices, num_workers=1))
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            except KeyError:
                continue
            rank.take(batch)
            rank.backward()

    plain, ranks = run(program)

    check(plain, ranks, whole={0, 3})
    assert [each.whole for each in ranks[0].handed] == [2, 2, 4, 1]


def test_several_installs_hook_once() -> None:
    Rank(0, 2)
    hooks = {name: getattr(_BaseDataLoaderIter, name) for name in HOOKED}
    Rank(1, 2)

    assert hooks == {name: getattr(_BaseDataLoaderIter, name) for name in HOOKED}


@pytest.mark.slow
@pytest.mark.timed
def test_costs_little_per_batch() -> None:
    def seconds(rank: Rank | None, loader: DataLoader[Any], steps: bool) -> float:
        begin = time.perf_counter()
        for _ in loader:
            if rank is not None and steps:
                rank.passes.note_backward()
        return (time.perf_counter() - begin) / len(loader)

    rows: Any = list(range(20000))
    loader: DataLoader[Any] = DataLoader(rows, batch_size=4, collate_fn=len)  # no work at all
    plain = min(seconds(None, loader, False) for _ in range(3))
    rank = Rank(0, 2)
    whole = min(seconds(rank, loader, False) for _ in range(3))
    split = min(seconds(rank, loader, True) for _ in range(3))

    assert whole - plain < 300e-6  # 30 on an idle machine: a pass over the data set, or a copy, would be milliseconds
    assert split - plain < 600e-6


# Other people's loaders -----------------------------------------------------------------------------------------------


class LikeFastai:
    """Hands itself to torch's iterators, as fastai's loader does, with a data set that makes the batches."""

    def __init__(self, batches: list[Any]) -> None:
        self._index_sampler = itertools.count()
        self._IterableDataset_len_called = self.generator = None
        self._auto_collation = self.drop_last = self.pin_memory = self.persistent_workers = False
        self._dataset_kind = _DatasetKind.Iterable
        self.num_workers = self.timeout = 0
        self.pin_memory_device = ""
        self.collate_fn = lambda batch: batch
        self.dataset = Stream(batches)

    def __iter__(self) -> Iterator[Any]:
        yield from _SingleProcessDataLoaderIter(self)  # type: ignore[arg-type]


def test_loader_that_only_uses_torchs_iterators() -> None:
    batches = [(torch.randn(4, 3), torch.arange(4)) for _ in range(3)]

    def program(rank: Rank) -> None:
        loader = LikeFastai(batches)
        for _ in range(2):
            rank.train(loader)

    plain, ranks = run(program)

    check(plain, ranks, whole={0})


def test_fastai() -> None:
    data = pytest.importorskip("fastai.data.load")

    def program(rank: Rank) -> None:
        loader = data.DataLoader(list(numbers(20)), bs=6)
        for _ in range(2):
            rank.train(loader)

    plain, ranks = run(program)

    check(plain, ranks, whole={0})


# How far it is --------------------------------------------------------------------------------------------------------


def test_each_pass_tells_how_far_it_is_and_where_it_ended() -> None:
    heard: list[Event] = []

    def program(rank: Rank) -> None:
        train, test = DataLoader(numbers(), batch_size=8), DataLoader(Rows(9), batch_size=4)
        for _ in range(2):
            for at, batch in enumerate(train):
                rank.take(batch)
                if rank.rank == 0 and at == 1:
                    progress = [event.read() for event in heard if isinstance(event, Gauge)][-1]
                    assert progress is not None
                    assert (progress.batch, progress.batches, progress.is_over) == (2, 3, False)
                rank.backward()
            with torch.no_grad():
                for batch in test:
                    rank.take(batch)
        next(iter(train))

    with outlet(heard.append):
        run(program, world_size=1)

    ended = [event for event in heard if isinstance(event, Progress)]
    assert [(each.batch, each.batches, each.epoch, each.is_training) for each in ended] == [
        (3, 3, 0, True),
        (3, 3, 0, False),
        (3, 3, 1, True),
        (3, 3, 0, False),
        (1, 3, 0, False),  # a look, which was left
    ]
    assert all(event.read() is None for event in heard if isinstance(event, Gauge))


@pytest.mark.parametrize(("mode", "samples"), [("split", [4, 4, 5, 5]), ("each", [9, 9, 9, 9])])
def test_the_samples_of_a_rank_are_its_share_also_of_batches_that_all_have(mode: str, samples: list[int]) -> None:
    """Otherwise the first pass, whose first batch is whole in each rank, would look faster than it is."""
    heard: list[Event] = []

    def program(rank: Rank) -> None:
        for _ in range(2):
            rank.train(DataLoader(Rows(36), batch_size=9))

    with outlet(heard.append):
        run(program, mode=mode)

    ended = [event.samples or 0 for event in heard if isinstance(event, Progress) and event.is_training]
    assert sorted(ended) == samples


def test_the_loop_that_a_rank_is_in_says_what_there_is_to_cut() -> None:
    heard: list[Event] = []

    def program(rank: Rank) -> None:
        rank.train(DataLoader(numbers(), batch_size=8))
        with torch.no_grad():
            list(DataLoader(Rows(9), batch_size=4))
        rank.train(DataLoader(Rows(6), batch_size=2))

    with outlet(heard.append):
        run(program)

    loops = [event for event in heard if isinstance(event, LoopEntered)]
    assert [(each.samples, each.parts, each.sharing_ranks) for each in loops[:3]] == [(8, 1, 2), (4, 1, 2), (2, 1, 2)]
    assert [bool(each.obstacle) for each in loops[:3]] == [False, True, False]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("turns", [2, 3, 4, 7])
def test_the_first_part_is_longer_in_rank_0_and_none_than_even_ones_nor_of_one_sample(size: int, turns: int) -> None:
    for count in range(4 * size * turns, 4 * size * turns + 2 * size * turns):
        borders = [rank * count // size for rank in range(size + 1)]
        longest = max(-(-(end - begin) // turns) for begin, end in itertools.pairwise(borders))
        ranks = [[end - begin for begin, end in itertools.pairwise(edges)] for edges in _uneven_turns(borders, turns)]
        assert [sum(parts) for parts in ranks] == [end - begin for begin, end in itertools.pairwise(borders)]
        assert len({len(parts) for parts in ranks}) == 1
        assert all(2 <= part <= longest for parts in ranks for part in parts)
        assert [parts[0] for parts in ranks] == [longest] + [longest - 1] * (size - 1)
