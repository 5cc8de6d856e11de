"""Batches that loops get of their loaders in a dry run, in one process."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from features.check.dry_run.fakes_of_loops import Cutting, Sentences, hooks_undone, padded
from nbaccel.features.check.dry_run.loop_log import DryRunEnded
from nbaccel.features.check.dry_run.worker_times import BatchesMade
from nbaccel.testing import run_ranks

LENGTHS = [3, 3, 9, 1, 4, 4, 1, 1, 2, 5, 6]
"""Batches of two have the sizes 6, 18, 8, 2, 10 and, the short one, 6."""


def sentences(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(Sentences(LENGTHS), 2, collate_fn=padded, **options)


def numbers(loader: Any) -> list[list[int]]:
    """Return the numbers of the items in each batch."""
    return [batch[:, 0].tolist() for batch in loader]


@pytest.fixture(autouse=True)
def worker_processes_have_ended() -> Iterator[None]:
    """Wait for the threads that close the pipes of worker processes, which do so after their loader is gone."""
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("QueueFeeder"):
            thread.join(5)  # not for ever: a test that has failed keeps its loader


def test_a_loop_gets_the_longest_batch_one_in_between_and_the_short_last_one() -> None:
    with Cutting() as cutting:
        assert numbers(sentences()) == [[2, 3], [4, 5], [10]]
    assert cutting.log.batches == [[(18.0, "longest"), (8.0, "between"), (6.0, "last")]]
    assert cutting.log.ended == [False]
    ((place, _, batches, mean_size),) = cutting.log.begun
    assert place.startswith("numbers:")
    assert batches == 6
    assert mean_size == pytest.approx(50 / 6)


def cuts_in(cutting: Cutting) -> list[tuple[int, int, int]]:
    return [
        (record["samples"], record["last_samples"], record["remainder"])
        for record in cutting.records
        if record["kind"] == "cut"
    ]


def test_the_samples_are_recorded_that_a_loop_had_of_a_loader_with_more() -> None:
    with Cutting() as cutting:
        for _ in sentences():
            pass
        for _ in sentences():
            break
        for _ in DataLoader(TensorDataset(torch.arange(6)), 2):
            pass
    assert cuts_in(cutting) == [(5, 1, -1)]


def test_the_length_stays_that_of_a_whole_epoch() -> None:
    loader = sentences()
    with Cutting():
        seen = [(number, len(loader)) for number, _ in enumerate(loader)]
    assert seen == [(0, 6), (1, 6), (2, 6)]


def test_a_pass_with_three_batches_is_whole() -> None:
    with Cutting() as cutting:
        assert len(numbers(DataLoader(TensorDataset(torch.arange(6)), 2, collate_fn=torch.tensor))) == 3
    assert cutting.log.ended == [True]


def test_afterwards_loaders_and_torch_are_as_before() -> None:
    loader = sentences()
    with hooks_undone(_BaseDataLoaderIter, "__init__", "_reset", "__next__"):
        with Cutting():
            numbers(loader)
        assert len(numbers(loader)) == 6


def test_hooks_upon_ours_stay_and_ours_do_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    with Cutting():
        ours = _BaseDataLoaderIter.__next__
        monkeypatch.setattr(_BaseDataLoaderIter, "__next__", lambda it: calls.append(1) or ours(it))
    assert len(numbers(sentences())) == 6
    assert len(calls) == 7
    monkeypatch.undo()
    _BaseDataLoaderIter.__next__ = ours.__wrapped__  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}])
def test_worker_processes_give_the_same(options: dict[str, Any]) -> None:
    loader = sentences(**options)
    with Cutting() as cutting:
        for _ in cutting.rounds(3):
            assert numbers(loader)[:2] == [[2, 3], [4, 5]]
    assert [kinds[-1] for kinds in cutting.log.kinds] == ["last"] * 3
    assert len(cutting.log.ended) == 3
    assert [len(batches) for batches in cutting.log.batches] == [3, 6, 3]
    assert len(numbers(loader)) == 6


@pytest.mark.parametrize("workers", [0, 2])
def test_of_a_shuffled_loader_the_longest_is_chosen_in_each_order(workers: int) -> None:
    with Cutting() as cutting:
        for _ in cutting.rounds(2):
            first, *_, last = numbers(sentences(shuffle=True, num_workers=workers))
            assert 2 in first + last
    for batches in cutting.log.batches:
        assert max(size for size, _ in batches if size) in (batches[0][0], batches[-1][0])


def test_the_order_is_that_of_torch() -> None:
    """The indices are drawn as without the cut, so the last batch is the same one."""
    torch.manual_seed(3)
    whole = numbers(sentences(shuffle=True))
    torch.manual_seed(3)
    with Cutting():
        given = numbers(sentences(shuffle=True))
    assert given[-1] == whole[-1]
    assert all(batch in whole for batch in given)


class SlowItems(Sentences):
    """Each item takes 20 ms."""

    def __getitem__(self, index: int) -> Tensor:
        threading.Event().wait(0.02)
        return super().__getitem__(index)


@pytest.mark.parametrize("persistent", [False, True])
def test_of_worker_processes_the_time_of_a_batch_is_known(persistent: bool) -> None:
    loader = DataLoader(SlowItems([3] * 12), 4, num_workers=1, collate_fn=padded, persistent_workers=persistent)
    with Cutting() as cutting:
        for _ in cutting.rounds(2):
            list(loader)
    assert all(seconds is not None and seconds >= 0.08 for seconds in cutting.log.made_s)


def test_a_worker_of_a_loader_that_is_not_cut_is_left_alone() -> None:
    made = BatchesMade(2)
    made.note(1, 0.5)
    made.note(2, 9.0)
    assert made.mean_s == 0.5


def test_without_worker_processes_it_is_not() -> None:
    with Cutting() as cutting:
        list(sentences())
    assert cutting.log.made_s == [None] * 3


class Stream(IterableDataset[Tensor]):
    def __init__(self, count: int = 400) -> None:
        self._count = count

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([number]) for number in range(self._count))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [4, None])
def test_of_a_stream_the_first_three_are_given(workers: int, batch_size: int | None) -> None:
    with Cutting() as cutting:
        assert len(list(DataLoader(Stream(), batch_size, num_workers=workers))) == 3
    assert cutting.log.kinds == [["first"] * 3]
    assert cutting.log.ended == [False]


def test_a_worker_without_samples_takes_no_batch_of_the_others() -> None:
    class Shard(Stream):
        def __iter__(self) -> Iterator[Tensor]:
            info = torch.utils.data.get_worker_info()
            return super().__iter__() if info is not None and info.id == 1 else iter(())

    with Cutting():
        assert len(list(DataLoader(Shard(), 2, num_workers=2))) == 3


def test_a_persistent_worker_of_a_stream_begins_again() -> None:
    loader = DataLoader(Stream(), 2, num_workers=1, persistent_workers=True)
    with Cutting() as cutting:
        lengths = [len(list(loader)) for _ in cutting.rounds(3)]
    assert lengths[0] == lengths[2] == 3
    assert lengths[1] > 3


def test_a_short_stream_ends_by_itself() -> None:
    with Cutting() as cutting:
        assert len(list(DataLoader(Stream(3), 2))) == 2
    assert cutting.log.kinds == [["first"] * 2]


class Endless(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return ([number % 11, (number + 1) % 11] for number in itertools.count())


def test_of_a_sampler_without_an_end_the_first_three_are_given() -> None:
    with Cutting() as cutting:
        assert numbers(DataLoader(Sentences(LENGTHS), batch_sampler=Endless(), collate_fn=padded)) == [
            [0, 1],
            [1, 2],
            [2, 3],
        ]
    assert cutting.log.kinds == [["first"] * 3]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_sampler": BatchSampler(RandomSampler(range(11)), 2, drop_last=False), "collate_fn": padded},
        {"batch_sampler": [[0, 1], [2, 3], [4, 5], [6], [10]], "collate_fn": padded},
        {"sampler": range(11), "batch_size": 2, "collate_fn": padded},
        {"batch_size": None},
        {"batch_size": None, "sampler": range(4, 11)},
    ],
    ids=["batch_sampler", "list of batches", "sampler", "no batches", "sampler without batches"],
)
def test_samplers_of_the_programs_own_are_cut(options: dict[str, Any]) -> None:
    with Cutting() as cutting:
        assert len(list(DataLoader(Sentences(LENGTHS), **options))) == 3
    assert cutting.log.kinds == [["longest", "between", "last"]]


def test_lists_of_lists_are_items() -> None:
    with Cutting() as cutting:
        given = list(DataLoader([[1], [2, 3], [4, 5, 6, 7], [8]], 1, collate_fn=list))
    assert given == [[[4, 5, 6, 7]], [[2, 3]], [[8]]]
    assert cutting.log.batches[0][0] == (4.0, "longest")


def test_cycle_repeats_the_three() -> None:
    with Cutting() as cutting:
        given = [batch[0, 0].item() for batch in itertools.islice(itertools.cycle(sentences()), 7)]
    assert given == [2, 4, 10, 2, 4, 10, 2]
    assert len(cutting.log.begun) == 1


def test_a_look_at_one_batch_is_a_pass_that_was_left() -> None:
    loader = sentences()
    with Cutting() as cutting:
        next(iter(loader))
        gc.collect()
        assert cutting.log.kinds == [["longest"]]
        assert cutting.log.ended == [False]


def test_the_second_pass_at_a_place_gives_more_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbaccel.features.check.dry_run.loader_cuts._MORE_SECONDS", 600.0)
    loader = DataLoader(TensorDataset(torch.arange(400)), 2)
    with Cutting() as cutting:
        given = [len(list(loader)) for _ in cutting.rounds(3)]
    assert given == [3, 160, 3]
    assert cutting.log.kinds[1] == ["longest", *["between"] * 158, "last"]


def test_the_second_pass_gives_no_more_where_batches_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbaccel.features.check.dry_run.loader_cuts._MORE_SECONDS", 1e-9)
    with Cutting() as cutting:
        assert [len(numbers(sentences())) for _ in cutting.rounds(2)] == [3, 3]


def test_another_place_begins_with_three() -> None:
    loader = sentences()
    with Cutting():
        assert len(list(loader)) == 3
        assert len(list(loader)) == 3


def test_a_rank_whose_sampler_gives_it_batches_of_its_own_asks_no_other_rank(tmp_path: Path) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Sentences(LENGTHS), num_replicas=2, rank=1, shuffle=False)
    with Cutting(tmp_path, rank=1, world_size=2):
        assert len(numbers(sentences(sampler=sampler))) == 3
    assert not list(tmp_path.iterdir())


def test_a_rank_whose_batches_are_split_takes_the_choice_of_rank_0(tmp_path: Path) -> None:
    given = []
    for rank, lengths in enumerate([LENGTHS, [1] * 11]):
        with Cutting(tmp_path, rank=rank, world_size=2):
            given.append(numbers(DataLoader(Sentences(lengths), 2, collate_fn=padded)))
    assert given == [[[2, 3], [4, 5], [10]]] * 2


# -- programs that draw by `next`


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loop_of_the_program_that_counts_its_steps_gets_what_it_draws(workers: int) -> None:
    """It would fail where the loader ends. The log ends it, after six rounds."""
    loader = DataLoader(TensorDataset(torch.arange(400)), 2, num_workers=workers)
    with Cutting() as cutting:
        iterator = iter(loader)
        given = [next(iterator)[0][0].item() for _ in cutting.rounds(9)]
        del iterator
    assert len(set(given)) == 9
    assert cutting.log.kinds == [["longest", "between", "last", *["between"] * 6]]
    assert cutting.log.ended == [False]


def test_two_lines_that_draw_get_what_they_draw() -> None:
    with Cutting():
        iterator = iter(sentences())
        first = next(iterator), next(iterator), next(iterator)
        second = next(iterator), next(iterator), next(iterator)
        assert next(iterator, None) is None
    assert len({batch[0, 0].item() for batch in first + second}) == 6


def test_of_a_stream_too() -> None:
    with Cutting() as cutting:
        iterator = iter(DataLoader(Stream(), 2))
        assert len([next(iterator) for _ in cutting.rounds(9)]) == 9


def test_a_list_of_batches_ends_with_the_loader() -> None:
    loader = sentences()
    with Cutting() as cutting:
        assert [len(list(loader)) for _ in cutting.rounds(1)] == [3]
        assert len([batch for _ in cutting.rounds(1) for batch in loader]) == 3
        assert len(list(enumerate(loader))) == 3
        assert len(list(zip(loader, range(9), strict=False))) == 3


def test_a_generator_around_a_loader_ends_with_it() -> None:
    def moved(loader: Any) -> Iterator[Any]:
        for batch in loader:
            yield batch + 1

    with Cutting() as cutting:
        seen = 0
        for _ in moved(sentences()):
            cutting.log.round += 1
            seen += 1
    assert seen == 3


# -- loops that are not the program's


def test_a_loop_of_a_library_is_left_where_it_begins_a_loader_for_the_third_time() -> None:
    loader, passes = sentences(), []
    with Cutting(), pytest.raises(DryRunEnded, match=r"has begun the same loader 2 times at test_a_loop_of_a_library"):
        for _ in range(9):
            passes.append(len(list(loader)))
    assert passes == [3, 6]


def test_with_worker_processes_it_is_left_quietly(recwarn: pytest.WarningsRecorder) -> None:
    loader = sentences(num_workers=1)
    with Cutting(), pytest.raises(DryRunEnded):
        for _ in range(9):
            list(loader)
    gc.collect()
    assert not recwarn.list


def test_loops_of_the_program_may_begin_a_loader_often() -> None:
    loader = sentences()
    with Cutting() as cutting:
        for _ in cutting.rounds(5):
            list(loader)
    assert len(cutting.log.begun) == 5


CELL = """
with Cutting():
    lengths = [len(list(loader)) for _ in range(5)]
assert lengths == [3, 6, 3, 3, 3]
"""

LIBRARY = """
try:
    with Cutting():
        for _ in range(5):
            numbers(loader)
except DryRunEnded:
    ended = True
assert ended
"""


@pytest.mark.parametrize("program", [CELL, LIBRARY], ids=["comprehension of a cell", "function of a library"])
def test_what_a_cell_does_alone_has_an_end(program: str) -> None:
    names = {"Cutting": Cutting, "DryRunEnded": DryRunEnded, "numbers": numbers, "loader": sentences()}
    run_ranks(1, exec, program, {"__name__": "__main__", **names})


def test_other_loaders_at_the_same_place_are_no_loop() -> None:
    with Cutting() as cutting:
        for loader in [sentences() for _ in range(4)]:
            list(loader)
    assert len(cutting.log.begun) == 4


def test_looks_may_be_many() -> None:
    loader = sentences()
    with Cutting() as cutting:
        for _ in range(20):
            next(iter(loader))
    assert len(cutting.log.begun) == 20


# -- what is left alone


def test_a_loader_within_a_data_set_is_read_as_it_is() -> None:
    class Nested(Dataset[int]):
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> int:
            return len(list(DataLoader(range(8), 2)))

    with Cutting() as cutting:
        assert [batch.tolist() for batch in DataLoader(Nested(), 1)] == [[4]] * 3
    assert len(cutting.log.begun) == 1


def test_other_threads_are_left_alone() -> None:
    found: list[int] = []
    with Cutting():
        thread = threading.Thread(target=lambda: found.append(len(numbers(sentences()))))
        thread.start()
        thread.join()
    assert found == [6]


def test_the_scan_draws_no_random_numbers_of_the_program() -> None:
    class Random(Sentences):
        def __getitem__(self, index: int) -> Tensor:
            return torch.full((1 + random.randrange(5) + int(torch.randint(5, ())),), index)

    random.seed(1)
    torch.manual_seed(1)
    with Cutting():
        next(iter(DataLoader(Random(LENGTHS), 2, collate_fn=padded)))
    drawn = random.random(), torch.rand(()).item()
    random.seed(1)
    torch.manual_seed(1)
    torch.empty((), dtype=torch.int64).random_()  # the seed of workers
    _ = [Random(LENGTHS)[0] for _ in range(2)]
    assert drawn == (random.random(), torch.rand(()).item())


def test_windows_are_given_as_a_whole() -> None:
    loader = DataLoader(TensorDataset(torch.arange(40)), 2, collate_fn=lambda items: [item[0].item() for item in items])
    with Cutting() as cutting:
        cutting.cuts.window_of(loader, 4)
        given = list(loader)
    assert [batch[0] for batch in given] == [0, 2, 4, 6, 16, 18, 20, 22, 32, 34, 36, 38]
    assert cutting.log.kinds == [["longest"] * 4 + ["between"] * 4 + ["last"] * 4]
