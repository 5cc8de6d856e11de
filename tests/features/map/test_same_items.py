"""Items in several ranks: what differs between them is refused by all, before anything is asked."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from nbaccel import Accelerator
from nbaccel.errors import PeerFailed
from nbaccel.features.map.item_list import ItemMark
from nbaccel.features.map.same_items import FirstItems, reader_of
from nbaccel.testing import run_ranks


def same(items: list[Any]) -> list[Any]:
    return items


def said(items: Callable[[Accelerator], Any], **options: Any) -> list[str]:
    """Return what two ranks say that map the items that each of them has."""

    def rank() -> str:
        accelerator = Accelerator(cpu=True)
        given = items(accelerator)
        try:
            answers = accelerator.map(same, given, **options)
        except (ValueError, PeerFailed, LookupError) as error:
            total = accelerator.reduce(torch.ones(1)).item()  # all of them are here
            return f"{type(error).__name__}: {error} ({total:.0f} ranks)"
        return f"{len(answers)} answers"

    return run_ranks(2, rank)


def numbers(count: int) -> DataLoader[Any]:
    return DataLoader(list(range(count)), batch_size=2)  # type: ignore[arg-type]


def test_a_prepared_loader_is_refused() -> None:
    first, second = said(lambda accelerator: accelerator.prepare(numbers(16)))
    assert first == second
    assert first == (
        "ValueError: items is a loader that was prepared, which gives each rank its own part of the data, and "
        "accelerator.map would lose the others: pass the data set, or the loader before prepare (2 ranks)"
    )


def test_a_loader_with_a_distributed_sampler_is_refused() -> None:
    def loader(accelerator: Accelerator) -> Any:
        data: Any = list(range(16))
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, accelerator.process_index))

    for words in said(loader):
        assert "with a DistributedSampler, which gives each rank its own part" in words
        assert "or a loader without it (2 ranks)" in words


def test_a_plain_loader_gives_all_its_batches() -> None:
    assert said(lambda accelerator: numbers(16)) == ["8 answers"] * 2


def test_a_prepared_loader_in_one_process_gives_all_its_batches() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(numbers(16))
    assert len(accelerator.map(lambda batches: [batch.tolist() for batch in batches], loader)) == 8
    assert [batch.tolist() for batch in loader] == [[n, n + 1] for n in range(0, 16, 2)]


@pytest.mark.parametrize("delay", [0, 5])
def test_a_part_of_a_stream_in_each_rank_is_refused_by_all(delay: int) -> None:
    def part(accelerator: Accelerator) -> Iterator[int]:
        yield from [0] * delay
        yield from range(accelerator.process_index, 16, 2)

    for words in said(part):
        assert f"compared with rank 0, rank 1 has another item number {delay}. It deals the items out itself" in words
        assert "no part for its own rank" in words


def test_streams_of_different_lengths_are_refused() -> None:
    for words in said(lambda accelerator: iter(range(3 + accelerator.process_index))):
        assert "rank 1 has 4 items in its stream" in words


def test_lists_of_different_lengths_or_contents_are_refused(tmp_path: Path) -> None:
    for words in said(lambda accelerator: list(range(16 + accelerator.process_index)), out=tmp_path / "a.jsonl"):
        assert "rank 1 has 17 items instead of 16 items" in words
    for words in said(lambda accelerator: list(range(accelerator.process_index, 32, 2))):
        assert "rank 1 has another item number 0" in words
    assert not list(tmp_path.iterdir())


def test_a_list_in_one_rank_and_a_stream_in_the_other_are_refused() -> None:
    for words in said(lambda accelerator: range(4) if accelerator.is_main_process else iter(range(4))):
        assert "rank 1 has a stream instead of 4 items" in words


def test_a_stream_that_fails_in_one_rank_ends_the_map_in_all() -> None:
    def failing(accelerator: Accelerator) -> Iterator[int]:
        yield 0
        if not accelerator.is_main_process:
            raise LookupError("the page is gone")

    first, second = said(failing)
    assert first == "PeerFailed: the items of rank 1 have failed: LookupError: the page is gone (2 ranks)"
    assert second == "LookupError: the page is gone (2 ranks)"


def test_a_stream_is_read_by_one_thread_also_where_ranks_compare_it(tmp_path: Path) -> None:
    def rows(accelerator: Accelerator) -> Iterator[int]:
        connection = sqlite3.connect(":memory:")  # which no other thread may use
        connection.execute("create table t (a)")
        connection.executemany("insert into t values (?)", [(number,) for number in range(100)])
        yield from (number for (number,) in connection.execute("select a from t"))
        connection.close()

    assert said(rows) == ["100 answers"] * 2


def test_a_reader_gives_back_what_it_has_looked_at() -> None:
    reader = reader_of(iter(range(40)))
    head, is_all = reader.look_ahead()
    assert (head, is_all) == (list(range(16)), False)
    assert reader.unused() is reader
    assert reader.take(3) == [0, 1, 2]
    assert reader.take(20) == list(range(3, 23))
    assert reader.take(99) == list(range(23, 40))
    assert reader.take(1) == []
    again = reader.unused()
    assert again is not reader
    again.close()
    reader.close()
    for each in (reader, again):
        each.join()


def test_a_slow_stream_is_compared_by_as_many_items_as_a_fast_one() -> None:
    """A clock that jumps, as on a machine whose cores are all busy, changes nothing."""
    is_next_wanted = threading.Event()

    def slow() -> Iterator[int]:
        for number in range(20):
            is_next_wanted.wait()
            yield number

    reader = reader_of(slow())
    later = threading.Timer(0.7, is_next_wanted.set)
    later.start()
    assert reader.look_ahead() == (list(range(16)), False)
    assert reader.take(99) == list(range(20))
    reader.close()
    reader.join()
    later.join()


def test_no_thread_of_a_reader_stays() -> None:
    assert Accelerator(cpu=True).map(same, iter(range(9))) == list(range(9))
    assert "nbaccel-stream-reader" not in [thread.name for thread in threading.enumerate()]


def test_lists_that_differ_late_are_refused_by_all_and_no_folder_is_made(tmp_path: Path) -> None:
    def late(accelerator: Accelerator) -> list[int]:
        return [*range(99), accelerator.process_index]

    for words in said(late, out=tmp_path / "a.jsonl"):
        assert "compared with rank 0, rank 1 has other items, as many. It deals the items out itself" in words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_finished_stream_is_compared_in_each_rank(tmp_path: Path, overwrite: bool) -> None:
    """Also where its first items were looked at before, and it is one that must give all of them again."""
    options: dict[str, Any] = {"out": tmp_path / "a.jsonl", "overwrite": overwrite}
    assert said(lambda accelerator: iter(range(60)), **options) == ["60 answers"] * 2
    assert said(lambda accelerator: iter(range(60)), **options) == ["60 answers"] * 2
    for words in said(lambda accelerator: iter([*range(50), 0]), **options):
        assert words == "51 answers" if overwrite else "has answers to other items (" in words


def test_how_two_ranks_may_differ() -> None:
    assert not FirstItems(ItemMark(None, ""), ("a", "b")).difference(
        FirstItems(ItemMark(None, ""), ("a",))
    )  # one of them was slower
    assert FirstItems(ItemMark(None, ""), ("a",), is_all=True).difference(
        FirstItems(ItemMark(None, ""), ("a", "b"))
    ) == ("2 items or more in its stream")
    assert (
        FirstItems(ItemMark(None, ""), ("a", "b"), is_all=True).difference(FirstItems(ItemMark(None, ""), ("a", "c")))
        == "another item number 1"
    )
