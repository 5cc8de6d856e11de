"""Items of a stream: those that another process can be handed, and what is said of the others."""

from __future__ import annotations

import os
import pickle
import sqlite3
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nbaccel import Accelerator
from nbaccel.features.map import Answers
from nbaccel.features.map.item_source import _packed


class Point(NamedTuple):
    """One that any process can import."""

    x: int
    y: int


def mapped(function: Any, items: Any) -> Answers:
    return Accelerator(cpu=True).map(function, items)


def rows() -> Iterator[Any]:
    """Yield rows as ``DataFrame.itertuples`` does, whose class is in no module."""
    kind = namedtuple("Pandas", ["Index", "a", "b"])
    yield from (kind(number, number, 10) for number in range(9))


def test_named_tuples_of_a_table_are_handed_on() -> None:
    assert mapped(lambda some: [row.a * row.b + row[0] for row in some], rows()) == [11 * n for n in range(9)]


def test_those_of_a_module_keep_their_class() -> None:
    (point,) = pickle.loads(_packed(0, [Point(1, 2)]))
    assert type(point) is Point


def test_an_item_that_no_process_can_be_handed_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with os.scandir(tmp_path) as entries, pytest.raises(TypeError) as caught:
        mapped(lambda some: some, entries)
    assert str(caught.value) == (
        "item number 0 of the stream is a posix.DirEntry, which cannot be handed to another process (cannot pickle "
        "'posix.DirEntry' object): let the stream give texts, numbers, lists, dicts or arrays, such as os.fspath(entry)"
    )


def test_what_only_another_thread_may_use_is_told_what_to_do() -> None:
    connection = sqlite3.connect(":memory:")
    cursor = connection.execute("select 1")
    with pytest.raises(sqlite3.ProgrammingError) as caught:
        mapped(lambda some: some, cursor)
    assert "is opened in the generator itself, or read before by list(items)" in caught.value.__notes__[0]
    connection.close()


def test_what_the_generator_opens_itself_is_read() -> None:
    def numbers() -> Iterator[int]:
        connection = sqlite3.connect(":memory:")
        yield from (number for (number,) in connection.execute("values (1), (2), (3)"))
        connection.close()

    assert mapped(lambda some: some, numbers()) == [1, 2, 3]
