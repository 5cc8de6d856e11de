"""Item sources: where a rank of a map takes the items of its claims from. Runs in ranks and scripts.

The items of a list are here. Those of a stream are drawn by one rank, the drawer, a few blocks ahead, and lie in files
until they are answered. If the drawer dies, another rank draws from its own copy of the stream, from the beginning:
checksums of the blocks tell whether that gives the same items.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
import time
from bisect import bisect_right
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

from nbaccel.errors import CannotContinue
from nbaccel.features.map import MapJob
from nbaccel.features.map.claim_log import ClaimLog, LifeLock, is_held
from nbaccel.features.map.records import AnswerIndex
from nbaccel.features.map.same_items import StreamReader, reader_of
from nbaccel.features.source.fingerprint import checksum_of

__all__ = ["ItemSource", "ListedItems", "StreamedItems", "UsersError", "source_of_items"]

_POLL_S = 0.02
_BLOCKS_AHEAD = 4
_LEAVE_S = 1.0
_READ_IN_A_THREAD = (
    "map reads a stream in a thread of its own, while the function works: what may be used only in the thread that "
    "made it, as a connection to SQLite, is opened in the generator itself, or read before by list(items)"
)


class UsersError(Exception):
    """Carries an error of the user's code, which ends the map, past the handler of errors of our own files."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class ItemSource(Protocol):
    """Gives items by their numbers."""

    def tend(self, size: int) -> None:
        """Do what is due before a claim.

        Args:
            size: Items that a claim has now.

        Raises:
            UsersError: The stream has failed; this rank draws from it.
            Exception: This rank cannot keep what it has drawn, or it is not the same as before.
        """

    def load(self, indices: Sequence[int], look: Callable[[], None]) -> None:
        """Wait until the items of a claim can be read.

        Args:
            indices: The numbers of the items.
            look: Called now and then. What it raises ends the wait.

        Raises:
            Exception: As `tend` does.
            CannotContinue: The items do not come.
        """

    def get(self, indices: Sequence[int]) -> list[Any]:
        """Return items of the claim that was loaded last.

        Args:
            indices: The numbers of the items.
        """

    def drop(self, indices: Sequence[int]) -> None:
        """Forget the items of a claim, each of which has an answer. Items that failed may be asked for again.

        Args:
            indices: The numbers of the items.
        """

    def some(self, claimed: Sequence[int]) -> list[int]:
        """Return a few items of different lengths, for a function that has failed with those of its first claim.

        Args:
            claimed: The numbers of the items of that claim.
        """

    def close(self) -> None:
        """Release the items and the files that they come from."""


class ListedItems:
    """Items of a sequence, which each rank has."""

    def __init__(self, items: Sequence[Any], order: Sequence[int] | None) -> None:
        self._items = items
        self._order = order if order is not None else range(len(items))

    def tend(self, size: int) -> None:
        pass

    def load(self, indices: Sequence[int], look: Callable[[], None]) -> None:
        pass

    def get(self, indices: Sequence[int]) -> list[Any]:
        return [self._items[index] for index in indices]

    def drop(self, indices: Sequence[int]) -> None:
        pass

    def some(self, claimed: Sequence[int]) -> list[int]:
        order = self._order
        return list(dict.fromkeys([claimed[0], order[len(order) // 2], order[-1]]))

    def close(self) -> None:
        pass


class StreamedItems:
    """Items of a stream, which one of the ranks draws.

    Args:
        stream: Each rank has its own, with the same items.
        claims: This rank's view of the map.
    """

    def __init__(self, job: MapJob, stream: Iterable[Any] | StreamReader, claims: ClaimLog, ranks: int) -> None:
        self._job = job
        self._stream = stream
        self._claims = claims
        self._ranks = ranks
        self._folder = job.folder / "blocks"
        self._drawer: _Drawer | None = None
        self._held: dict[int, Any] = {}

    def tend(self, size: int) -> None:
        if self._drawer is None:
            with suppress(BlockingIOError):
                role = LifeLock(self._job.folder / "drawer")
                self._drawer = _Drawer(self._job, self._stream, role, self._claims.beside(), self._ranks)
                self._drawer.start()
        if self._drawer is not None:
            self._drawer.size = size
            if self._drawer.error is not None:
                raise self._drawer.error

    def load(self, indices: Sequence[int], look: Callable[[], None]) -> None:
        starts = sorted(self._claims.blocks)  # few: blocks grow with the speed of the function
        by_block: dict[int, list[int]] = {}
        for index in indices:
            by_block.setdefault(starts[bisect_right(starts, index) - 1], []).append(index)
        self._held = {}
        for start, wanted in by_block.items():
            block = self._block(start, look)
            self._held |= {index: block[index - start] for index in wanted}

    def _block(self, start: int, look: Callable[[], None]) -> list[Any]:
        """Return a block of items; waits for the drawer where an earlier session had drawn it."""
        while True:
            is_all_drawn = is_held(self._job.folder / "drawn")  # before the block is looked for: it may come last
            with suppress(FileNotFoundError):
                block: list[Any] = pickle.loads((self._folder / str(start)).read_bytes())
                return block
            if is_all_drawn:
                raise CannotContinue(
                    f"the items from number {start:,} on are gone from {self._folder}: stop all runs that write there, "
                    "and the same call draws them again"
                )
            self.tend(1)
            look()
            time.sleep(_POLL_S)

    def get(self, indices: Sequence[int]) -> list[Any]:
        return [self._held[index] for index in indices]

    def drop(self, indices: Sequence[int]) -> None:
        stop, _checksum = self._claims.blocks.get(indices[0], (0, ""))
        if stop - indices[0] == len(indices):
            (self._folder / str(indices[0])).unlink(missing_ok=True)

    def some(self, claimed: Sequence[int]) -> list[int]:
        return list(dict.fromkeys([claimed[0], claimed[len(claimed) // 2], claimed[-1]]))

    def close(self) -> None:
        if self._drawer is not None:
            self._drawer.leave()


class _Drawer(threading.Thread):
    """Draws a stream a few blocks ahead of the ranks, beside the function that works on earlier ones.

    Attributes:
        size: Items of the next block.
        error: The error of the stream; None so far.
    """

    def __init__(
        self, job: MapJob, stream: Iterable[Any] | StreamReader, role: LifeLock, claims: ClaimLog, ranks: int
    ) -> None:
        super().__init__(name="nbaccel-stream", daemon=True)
        self._folder = job.folder / "blocks"
        self._job = job
        self._reader = stream.unused() if isinstance(stream, StreamReader) else reader_of(stream)
        self._role = role
        self._drawn: LifeLock | None = None
        self._ahead = _BLOCKS_AHEAD * ranks
        self._claims = claims
        self._leaves = threading.Event()
        self.size = 1
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._folder.mkdir(exist_ok=True)
            self._draw()
        except BaseException as error:
            self.error = error
            users = error.error if isinstance(error, UsersError) else error
            with suppress(Exception):  # the class of an error, which may be the program's own, may fail to write it
                if "thread" in str(users):
                    users.add_note(_READ_IN_A_THREAD)

    def leave(self) -> None:
        self._leaves.set()
        self._reader.close()
        self.join(_LEAVE_S)  # the stream may be waiting for something that does not come
        if self._drawn is not None:
            self._drawn.close()
        self._role.close()

    def _say_all_is_drawn(self) -> None:
        """Hold a lock for as long as this drawer lives, which tells the others to wait for no block."""
        while self._drawn is None and not self._leaves.is_set():
            try:
                self._drawn = LifeLock(self._job.folder / "drawn")
            except BlockingIOError:  # another process looks at it
                self._leaves.wait(_POLL_S)

    def _draw(self) -> None:
        self._claims.refresh()
        found = self._job.records() if self._claims.blocks else AnswerIndex(0)
        failed = frozenset(found.failures())  # they may be asked again while this drawer lives
        start = 0
        while not self._leaves.is_set():
            known = self._claims.blocks.get(start)
            size = max(1, self.size) if known is None else known[0] - start
            try:
                block = self._reader.take(size)
            except BaseException as error:
                raise UsersError(error) from error
            if known is not None:
                self._compare(start, block, *known)
            if not block:
                self._claims.end_stream(start)
                return self._say_all_is_drawn()
            stop = start + len(block)
            if not all(found.is_done(index) and index not in failed for index in range(start, stop)):
                self._write(start, block)
            if known is None:
                self._claims.add_block(start, stop, checksum_of(block))
                self._wait(size)
            start = stop

    def _compare(self, start: int, block: Sequence[Any], stop: int, checksum: str) -> None:
        if checksum and (start + len(block) != stop or checksum_of(block) != checksum):
            raise CannotContinue(
                f"the stream gives other items now: those from number {start:,} to {stop - 1:,} were drawn before, "
                "and are not the same. A stream has to give the same items each time it is read, in each rank; "
                "list(items) reads it once, overwrite=True starts anew"
            )

    def _write(self, start: int, block: Sequence[Any]) -> None:
        unfinished = self._folder / f".{start}"
        unfinished.write_bytes(_packed(start, block))
        os.replace(unfinished, self._folder / str(start))

    def _wait(self, size: int) -> None:
        """Wait until the ranks have claimed most of what is drawn."""
        while self._claims.remaining() > self._ahead * size and not self._leaves.wait(_POLL_S):
            self._claims.refresh()


def _packed(start: int, block: Sequence[Any]) -> bytes:
    """Return the items of a block as bytes, by which another rank gets them.

    Raises:
        TypeError: An item cannot be pickled.
    """
    try:
        return _dumps(block)
    except Exception:
        for number, item in enumerate(block, start):
            try:
                _dumps(item)
            except Exception as error:
                kind = f"{type(item).__module__}.{type(item).__qualname__}"
                raise TypeError(
                    f"item number {number:,} of the stream is a {kind}, which cannot be handed to another process "
                    f"({error}): let the stream give texts, numbers, lists, dicts or arrays, such as os.fspath(entry)"
                ) from error
        raise


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _ItemPickler(file, 5).dump(value)
    return file.getvalue()


class _ItemPickler(pickle.Pickler):
    """Pickles also named tuples whose class no other process can import, as those of ``DataFrame.itertuples``."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if not issubclass(kind, tuple) or not hasattr(kind, "_fields"):
            return NotImplemented
        try:
            pickle.dumps(kind)
        except pickle.PicklingError:
            return _named_tuple, (kind.__name__, kind._fields, tuple(value))
        return NotImplemented


def _named_tuple(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _tuple_class(name, fields)._make(values)


@cache
def _tuple_class(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields, rename=True)  # made from data


def source_of_items(job: MapJob, items: Any, claims: ClaimLog, ranks: int) -> ItemSource:
    return StreamedItems(job, items, claims, ranks) if job.is_stream else ListedItems(items, job.order)
