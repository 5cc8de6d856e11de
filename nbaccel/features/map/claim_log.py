"""Claims: which worker works on which items, in a log that all workers of a map append to. Used in ranks.

A worker takes the lock of the log, reads the lines that are new, and appends its claim. The operating system frees the
locks of a process that dies: of the log, which is held for a moment, and of the worker's own file, which is held for
life. So a claim whose worker is dead is found by trying its lock, and what is not answered of it is claimed again.
Nothing here is a collective, and nobody waits for a worker that is gone.

Each line is a checksum and a JSON list. A torn line at the end, of a worker that died, is cut by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import uuid
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from nbaccel.base.values import frozen
from nbaccel.errors import CannotContinue
from nbaccel.features.map.records import AnswerIndex

__all__ = [
    "Claim",
    "ClaimLog",
    "Leftover",
    "LifeLock",
    "locked",
]

_CLAIM, _TAKE, _DEAD, _END, _AGAIN, _BLOCK, _TOTAL = "claim", "take", "dead", "end", "again", "block", "total"
_STOP = "stop"
_LOOK_FOR_DEAD_S = 5.0
_ALONE_AFTER = 2
_SHARE_OF_LEFT = 8
"""A claim that killed its worker is claimed again in parts of an eighth; what kills a worker twice is claimed alone."""


class LifeLock:
    """A lock on a file of its own that this process holds until `close`, or until it dies.

    Children that Python forks do not keep it; a program that is executed does not inherit it.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise
        held = weakref.ref(self)

        def let_go_in_child() -> None:
            if (lock := held()) is not None:
                lock._drop()

        os.register_at_fork(after_in_child=let_go_in_child)

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)  # a child's copy: the lock is still the parent's
            self._fd = -1

    def close(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._drop()


def is_held(path: Path) -> bool:
    """Return whether a living process holds the `LifeLock` at `path`."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two processes may look at once
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock at `path` during the block; waits for the process that holds it, which may die meanwhile.

    Raises:
        FileNotFoundError: Its folder is gone.
    """
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(fd), os.stat(path)):
                yield
                return
        finally:
            os.close(fd)


class Leftover(NamedTuple):
    """An item whose worker died.

    Args:
        deaths: Workers that died with it.
        alone: Those that had claimed nothing else.
    """

    item: int
    deaths: int = 0
    alone: int = 0


@frozen
class Claim:
    """Items that one worker works on.

    Args:
        indices: Their numbers; empty if others work on what is left, and this worker has to wait.
        alone: How many workers have died with nothing but this one item.
    """

    indices: Sequence[int] = ()
    alone: int = 0


@dataclass
class _State:
    """The sum of all lines.

    Args:
        cursor: Positions of the order before this one were claimed.
        available: Those before this one may be, in a stream.
        open: The claim of each worker that has neither claimed something else nor ended; bare numbers are claimed
            first.
        left: Items of dead workers that nobody has claimed since, by deaths and by number.
        round: How often failed items were asked again; tokens: the calls that asked.
        blocks: Those of a stream that were drawn, by their first item: the item after the last, checksum of the items.
        stopped: The calls that were stopped.
        finished: Items with an answer or an error; those of open claims not yet.
    """

    cursor: int = 0
    available: int = 0
    total: int | None = None
    open: dict[str, Sequence[Leftover | int]] = field(default_factory=dict)
    left: dict[int, dict[int, Leftover]] = field(default_factory=dict)
    round: int = 0
    tokens: set[str] = field(default_factory=set)
    blocks: dict[int, tuple[int, str]] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    finished: int = 0

    def begin(self, worker: str, claimed: Sequence[Leftover | int]) -> None:
        """Count a claim; what the worker had claimed before is finished."""
        self.finished += len(self.open.get(worker, ()))
        self.open[worker] = claimed

    def end(self, worker: str, unfinished: Sequence[Leftover] = ()) -> None:
        """Count the end of a worker, or of its claim."""
        self.finished += max(0, len(self.open.pop(worker, ())) - len(unfinished))
        self.leave(unfinished)

    def leave(self, items: Iterable[Leftover]) -> None:
        for item in items:
            self.left.setdefault(item.deaths, {})[item.item] = item

    def take(self, items: Iterable[Leftover]) -> None:
        for item in items:
            if (alike := self.left.get(item.deaths)) is not None:
                alike.pop(item.item, None)
                if not alike:
                    del self.left[item.deaths]


class ClaimLog:
    """The claims of a map, as one worker or the kernel sees them.

    Args:
        folder: The folder of the map.
        total: Number of items; None in a stream, whose items become available in blocks.
        order: The items in the order in which they are claimed; None for their own.
        call: Equal in all ranks of one call, which stop together.
    """

    def __init__(self, folder: Path, total: int | None, order: Sequence[int] | None = None, call: str = "") -> None:
        self._folder = folder
        self._call = call
        self._order = order
        self._path = folder / "claims"
        self._lock = folder / "claims.lock"
        self._state = _State(total=total)
        self._is_stream = total is None
        self._read_to = 0
        self._me = ""
        self._life: LifeLock | None = None
        self._looked = 0.0

    # -- one worker

    def enter(self) -> str:
        """Become a worker; return its name, which its records carry."""
        self._me = uuid.uuid4().hex[:12]
        self._life = self._lock_of(self._me)
        return self._me

    def beside(self) -> ClaimLog:
        """Return the claims as another thread of this worker sees them."""
        other = ClaimLog(self._folder, None if self._is_stream else self._state.total, self._order, self._call)
        other._me = self._me
        return other

    def attend(self) -> LifeLock:
        """Return a lock that shows that a process has this map open, though it may claim nothing."""
        return self._lock_of(f"open-{uuid.uuid4().hex[:12]}")

    def _lock_of(self, name: str) -> LifeLock:
        (self._folder / "workers").mkdir(exist_ok=True)
        return LifeLock(self._folder / "workers" / name)

    def leave(self) -> None:
        """End as a worker. What it has claimed and not answered is left to others."""
        if self._life is not None:
            self._life.close()
            self._life = None

    @property
    def round(self) -> int:
        return self._state.round

    @property
    def blocks(self) -> Mapping[int, tuple[int, str]]:
        """The blocks of a stream that were drawn, by their first item: the one after the last, their checksum."""
        return self._state.blocks

    def claim(self, most: int) -> Claim | None:
        """Claim up to `most` items; what this worker had claimed before is answered.

        None when all items are, or the call was stopped. Waits for nothing but the lock: the claim is empty while
        others work on what is left.
        """
        with locked(self._lock):
            self._read()
            if self.is_stopped:
                if self._me in self._state.open:
                    self._append([_END, self._me])
                return None
            if self._is_time_to_look():
                self._find_dead()
            claim = self._taken(most) or self._fresh(most)
            if claim is None:
                self._find_dead()
                claim = self._taken(most)
            if claim is None and self._me in self._state.open:
                self._append([_END, self._me])
            if claim is not None:
                return claim
            return None if self.is_complete else Claim()

    def stop(self, unanswered: Sequence[int]) -> bool:
        """Stop the call in all its ranks, unless all items are answered; return whether it is stopped.

        The log decides for all ranks alike: a rank that has left a finished map goes on to the next collective of its
        program, so no other rank may leave that map as one that was stopped.

        Args:
            unanswered: The items of this worker's claim that it leaves to others, as if it had not claimed them.
        """
        with locked(self._lock):
            self._read()
            held = self._state.open.get(self._me, ())
            if held:
                rest = set(unanswered)
                leftovers = (each if isinstance(each, Leftover) else Leftover(each) for each in held)
                self._append([_DEAD, self._me, [list(item) for item in leftovers if item.item in rest]])
            if not self.is_complete and not self.is_stopped:
                self._append([_STOP, self._call])
            return self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """True if a rank of this call has stopped it, as far as this worker has read."""
        return self._call in self._state.stopped

    @property
    def finished(self) -> int:
        """Return how many items were finished when this worker claimed last, by anyone."""
        return self._state.finished

    def remaining(self) -> int:
        """Return how many items nobody had claimed when this worker claimed last; in a stream those that are drawn."""
        state = self._state
        return (state.available if self._is_stream else state.total or 0) - state.cursor

    @property
    def is_complete(self) -> bool:
        """True if each item was claimed, and no claim of a living or dead worker is open."""
        state = self._state
        return state.total is not None and state.cursor >= state.total and not state.open and not state.left

    def _is_time_to_look(self) -> bool:
        now = time.monotonic()
        if now - self._looked < _LOOK_FOR_DEAD_S:
            return False
        self._looked = now
        return True

    def _fresh(self, most: int) -> Claim | None:
        state = self._state
        start = state.cursor
        stop = state.blocks.get(start, (start, ""))[0] if self._is_stream else min(start + most, state.total or 0)
        if stop <= start:
            return None
        self._append([_CLAIM, self._me, start, stop])
        return Claim(self._positions(start, stop))

    def _positions(self, start: int, stop: int) -> Sequence[int]:
        return range(start, stop) if self._order is None else self._order[start:stop]

    def _taken(self, most: int) -> Claim | None:
        """Claim items that dead workers left; those that have seen most deaths come last."""
        state = self._state
        if not state.left:
            return None
        deaths = min(state.left)
        if deaths >= _ALONE_AFTER and self.remaining() > 0:
            return None
        alike = state.left[deaths]
        if deaths == 0:
            count = most  # asked again: they have killed nobody
        elif deaths < _ALONE_AFTER:
            count = max(1, min(most, len(alike) // _SHARE_OF_LEFT))
        else:
            count = 1
        taken = list(islice(alike.values(), count))
        self._append([_TAKE, self._me, [[item.item, item.deaths, item.alone] for item in taken]])
        return Claim([item.item for item in taken], taken[0].alone if len(taken) == 1 else 0)

    def _find_dead(self, deaths: int = 1) -> None:
        """Give up the claims of workers that are dead.

        Args:
            deaths: 0 if their items are not to blame.
        """
        for worker, claimed in list(self._state.open.items()):
            if worker == self._me or is_held(self._folder / "workers" / worker):
                continue
            answered = AnswerIndex(0)
            path = self._folder / "records" / worker
            if path.exists():
                answered.read(path, grows=True)
            is_alone = len(claimed) == 1
            left = [
                [item.item, item.deaths + deaths, item.alone + is_alone * deaths]
                for item in (each if isinstance(each, Leftover) else Leftover(each) for each in claimed)
                if not answered.is_done(item.item, self._state.round)
            ]
            self._append([_DEAD, worker, left])

    # -- the map as a whole

    def anyone(self) -> bool:
        """Return whether a worker is alive."""
        workers = self._folder / "workers"
        return workers.exists() and any(is_held(path) for path in workers.iterdir())

    def give_up_all(self) -> None:
        """Leave to others what a run had claimed that has ended as a whole, by nothing that its items have done."""
        with locked(self._lock):
            self._read()
            self._find_dead(deaths=0)

    def ask_again(self, indices: Sequence[int], token: str, new_round: bool) -> None:
        """Let items be claimed again that are missing, or have failed: then `new_round`. Once for each `token`."""
        with locked(self._lock):
            self._read()
            if indices and token not in self._state.tokens:
                self._append([_AGAIN, token, self._state.round + new_round, list(indices)])

    def skip_to(self, total: int, blocks: Iterable[tuple[int, str]] = ()) -> None:
        """Count all items as claimed: their records are there.

        Args:
            blocks: Of a stream: the number of the item after the last, and the checksum of its items.
        """
        with locked(self._lock):
            self._read()
            if self._is_stream:
                for stop, checksum in blocks:
                    self._append([_BLOCK, self._state.available, stop, checksum])
                self._append([_TOTAL, total])
            self._append([_CLAIM, "", 0, total])
            self._append([_END, ""])

    def add_block(self, start: int, stop: int, checksum: str) -> None:
        """Say that items of a stream were drawn.

        Raises:
            CannotContinue: It had ended before them, in an earlier run.
        """
        with locked(self._lock):
            self._read()
            if self._state.total is not None and stop > self._state.total:
                raise CannotContinue(
                    f"the stream gives more items now than the {self._state.total:,} of before: it has to give the "
                    "same items each time, list(items) reads it once, overwrite=True starts anew"
                )
            self._append([_BLOCK, start, stop, checksum])

    def end_stream(self, total: int) -> None:
        """Say that a stream has no more items."""
        with locked(self._lock):
            self._read()
            if self._state.total is None:
                self._append([_TOTAL, total])

    def refresh(self) -> None:
        """Read the lines of others."""
        with locked(self._lock):
            self._read()

    @property
    def total(self) -> int | None:
        """The number of items; None in a stream that has not ended."""
        return self._state.total

    # -- lines

    def _append(self, line: list[object]) -> None:
        """Write a line, and count it. The lock is held, and all lines before it were read."""
        text = json.dumps(line, separators=(",", ":"))
        data = f"{zlib.crc32(text.encode()):08x} {text}\n".encode()
        fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, data) != len(data):
                os.ftruncate(fd, self._read_to)
                raise OSError(28, os.strerror(28), str(self._path))
        finally:
            os.close(fd)
        self._read_to += len(data)
        self._count(line)

    def _read(self) -> None:
        """Count the lines that are new, and cut a torn one off the end. The lock is held.

        Raises:
            FileNotFoundError: The map was joined, and its folder is gone, or is that of another map by now.
        """
        if self._me and not (life := self._folder / "workers" / self._me).exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(life))
        with suppress(FileNotFoundError), open(self._path, "r+b") as file:
            file.seek(self._read_to)
            for data in file:
                text = data[9:-1]
                if not data.endswith(b"\n") or data[:9] != b"%08x " % zlib.crc32(text):
                    file.truncate(self._read_to)
                    break
                self._read_to += len(data)
                self._count(json.loads(text))

    def _count(self, line: list[object]) -> None:
        state = self._state
        match line:
            case ["claim", str(worker), int(start), int(stop)]:
                state.begin(worker, self._positions(start, stop))
                state.cursor = max(state.cursor, stop)
            case ["take", str(worker), list(items)]:
                taken = [Leftover(*item) for item in items]
                state.begin(worker, taken)
                state.take(taken)
            case ["dead", str(worker), list(items)]:
                state.end(worker, [Leftover(*item) for item in items])
            case ["end", str(worker)]:
                state.end(worker)
            case ["stop", str(call)]:
                state.stopped.add(call)
            case ["again", str(token), int(turn), list(indices)]:
                state.tokens.add(token)
                state.round = turn
                state.finished = max(0, state.finished - len(indices))
                state.leave(Leftover(index) for index in indices)
            case ["block", int(start), int(stop), str(checksum)]:
                if start == state.available:  # another drawer was as far already
                    state.blocks[start] = stop, checksum
                    state.available = stop
            case ["total", int(total)]:
                state.total = total
