"""Same items in all ranks: the ranks of one call compare theirs before they deal them out. Runs in ranks.

One rank draws a stream for all of them. If each rank's stream is a part of the data, as that of a prepared loader is,
the parts of the others would be lost without a word. So each rank reads the first items itself, and the ranks compare
their checksums.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from nbaccel.base.quantities import plural
from nbaccel.base.values import frozen
from nbaccel.base.world import World
from nbaccel.errors import PeerFailed
from nbaccel.features.map.item_list import ItemMark, ItemStream
from nbaccel.features.source.fingerprint import checksum_of
from nbaccel.train.data import PreparedLoader

__all__ = ["FirstItems", "StreamReader", "first_items_of", "reader_of", "refuse_different_items", "refuse_parts"]

_COMPARED = 16
"""Number of items that are compared. A slow stream is waited for: how many are compared must not depend on the load."""


class StreamReader(threading.Thread):
    """Reads a stream in one thread of its own, from the first item to the last.

    A generator may open what only the thread may use that has opened it, as a connection to SQLite. Gradients are
    off there: a loader that is iterated so trains nothing.

    Args:
        stream: Read once, by one reader.
    """

    def __init__(self, stream: Iterable[Any]) -> None:
        super().__init__(name="nbaccel-stream-reader", daemon=True)
        self._stream = stream
        self._head: list[Any] = []
        self._asked: SimpleQueue[int] = SimpleQueue()
        self._given: SimpleQueue[list[Any] | BaseException] = SimpleQueue()
        self._is_used = False

    def unused(self) -> StreamReader:
        """Return a reader from the first item on: this one, unless items were taken of it, or it was closed."""
        return reader_of(self._stream) if self._is_used else self

    def take(self, most: int) -> list[Any]:
        """Return the next items: `most`, or fewer at the end of the stream.

        Raises:
            The error of the stream.
        """
        self._is_used = True
        taken, self._head = self._head[:most], self._head[most:]
        return taken + self._next(most - len(taken)) if len(taken) < most else taken

    def look_ahead(self, count: int = _COMPARED) -> tuple[list[Any], bool]:
        """Return the first items, which stay in the stream, and whether there are no others."""
        while len(self._head) < count:
            more = self._next(1)
            if not more:
                return self._head, True
            self._head += more
        return self._head, False

    def difference(self, blocks: Iterable[tuple[int, str]], keeps: bool = False) -> str:
        """Compare all items with those of an earlier stream, as `ItemStream` does; with `keeps` they come again."""
        stream = ItemStream(self._one_by_one())
        found = stream.difference(blocks, keeps)
        if keeps:
            self._head = [*stream.drawn, *self._head]
            self._is_used = False
        return found

    is_drawn_once = True

    def _one_by_one(self) -> Iterator[Any]:
        while some := self.take(1):
            yield from some

    def close(self) -> None:
        """Let the thread end, once the stream has given what it was asked for."""
        self._is_used = True
        self._asked.put(0)

    def _next(self, count: int) -> list[Any]:
        """Return the next items.

        Raises:
            The error of the stream.
        """
        self._asked.put(count)
        found = self._given.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def run(self) -> None:
        stream: Any = None
        with torch.no_grad():
            while count := self._asked.get():
                try:
                    stream = iter(self._stream) if stream is None else stream
                    self._given.put(list(islice(stream, count)))
                except BaseException as error:
                    self._given.put(error)


def reader_of(stream: Iterable[Any]) -> StreamReader:
    """Return a reader of a stream, at work."""
    reader = StreamReader(stream)
    reader.start()
    return reader


def refuse_parts(items: Any, world: World) -> None:
    """Refuse a loader that gives this rank its own part of the data.

    Raises:
        ValueError: It does.
    """
    if not world.is_distributed:
        return
    sampler = getattr(items, "sampler", None) if isinstance(items, DataLoader) else None
    if isinstance(items, PreparedLoader):
        what = "items is a loader that was prepared, which gives each rank its own part of the data"
        instead = "the loader before prepare"
    elif isinstance(sampler, DistributedSampler):
        what = "items is a loader with a DistributedSampler, which gives each rank its own part of the data"
        instead = "a loader without it"
    else:
        return
    raise ValueError(f"{what}, and accelerator.map would lose the others: pass the data set, or {instead}")


@frozen
class FirstItems:
    """The facts about its items that a rank shows to the others.

    Args:
        mark: The mark that identifies the items.
        checksums: The checksums of the first items, one each; empty for items that are no sequence of Python's and no
            stream.
        is_all: A stream has no others.
        error: That they have raised, in words.
    """

    mark: ItemMark
    checksums: tuple[str, ...] = ()
    is_all: bool = False
    error: str = ""

    def difference(self, other: FirstItems) -> str:
        """Return in words how `other` differs; empty if it does not."""
        if self.mark.total != other.mark.total:
            here, there = (
                "a stream" if count is None else plural(count, "item") for count in (self.mark.total, other.mark.total)
            )
            return f"{there} instead of {here}"
        for number, (mine, its) in enumerate(zip(self.checksums, other.checksums, strict=False)):
            if mine != its:
                return f"another item number {number:,}"
        if self.mark != other.mark:
            return "other items, as many"
        shorter, longer = sorted((self, other), key=lambda one: len(one.checksums))
        if shorter.is_all and len(longer.checksums) > len(shorter.checksums):
            return f"{plural(len(other.checksums), 'item')} {'' if other.is_all else 'or more '}in its stream"
        return ""


def first_items_of(items: Any, count: int = _COMPARED) -> tuple[FirstItems, BaseException | None]:
    """Return the facts that this rank shows to the others, and the error that its items have raised.

    Args:
        count: Items of a stream that are waited for.
    """
    try:
        if not isinstance(items, StreamReader):
            some = items[:_COMPARED] if isinstance(items, list | tuple | range) else ()
            return FirstItems(ItemMark.of(items), _checksums(some)), None
        head, is_all = items.look_ahead(count)
        return FirstItems(ItemMark(None, ""), _checksums(head), is_all), None
    except Exception as error:
        return FirstItems(ItemMark(None, ""), error=f"{type(error).__name__}: {error}"), error


def _checksums(items: Sequence[Any]) -> tuple[str, ...]:
    return tuple(checksum_of([item]) for item in items)


def refuse_different_items(found: Sequence[FirstItems], error: BaseException | None) -> None:
    """Refuse items that are not the same in all ranks; each of them raises.

    Args:
        found: What was found on every rank.
        error: That those of this rank have raised.

    Raises:
        ValueError: They are not.
        PeerFailed: The items of another rank have raised an error.
        The error that this rank's own have raised.
    """
    if error is not None:
        raise error
    if failed := {rank: one.error for rank, one in enumerate(found) if one.error}:
        raise PeerFailed("; ".join(f"the items of rank {rank} have failed: {text}" for rank, text in failed.items()))
    different = {rank: found[0].difference(one) for rank, one in enumerate(found)}
    if said := [f"rank {rank} has {words}" for rank, words in different.items() if words]:
        raise ValueError(
            f"the ranks of accelerator.map have different items: compared with rank 0, {', '.join(said)}. It deals the "
            "items out itself, so each rank passes all of them, in one order: no part for its own rank, and no "
            "shuffling; list(items) in the notebook, before the ranks start, makes one list for all"
        )
