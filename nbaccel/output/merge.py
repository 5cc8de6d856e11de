"""Merge: puts lines of several ranks in one order, and identical lines of all ranks into one. Runs in the kernel; pure.

A line waits at most a second for the same line of the other ranks, and not at all if that cannot come any more. The
waiting lines are bounded: of a rank that prints faster than lines leave, the first and the last lines are kept, and a
line between them says how many are missing. It writes nothing and reads no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

__all__ = [
    "NOTICE",
    "LineMerger",
    "Merged",
    "Unshared",
    "cost",
    "is_unshared",
]

NOTICE = "nbaccel: "
"""Begins the lines that the project prints in one rank, about all of them."""
_NOTICE = NOTICE.encode()
_HOLD_S = 1.0
_PATIENCE = 3
"""Number of lines that wait in vain before a rank stops waiting, until another rank prints."""
_MOST_BYTES, _MOST_LINES = 1_000_000, 20_000
"""Limits of the waiting lines of one rank."""
_TAIL_BYTES = 2048
_LOOK_AHEAD = 64
_QUIET_S = 0.3


_LEAST_COST = 32
"""Bytes. A line takes some 10 us to merge and show, whatever it holds: were an empty one cheaper, a flood of them would
take longer than the budget needs to refill, and never end."""


def cost(text: bytes, tag: str = "") -> int:
    """Return the share of a budget of bytes that a line takes.

    Example:
        >>> cost(b""), cost(b"x" * 80)
        (32, 81)
    """
    return max(len(tag) + len(text) + 1, _LEAST_COST)


class Unshared(bytes):
    """A line that other ranks do not print, by the project's doing: it waits for none, and belongs to no one rank."""


def is_unshared(text: bytes) -> bool:
    """Return whether a line is `Unshared`, or a notice that the project prints in one rank, about all of them."""
    return isinstance(text, Unshared) or text.startswith(_NOTICE)


class Merged(NamedTuple):
    """A line to show.

    Args:
        rank: The rank that printed it, None for all.
    """

    rank: int | None
    stream: str
    text: bytes


class _Held(NamedTuple):
    key: tuple[str, bytes]
    since: float
    order: int


class _Gap:
    """Lines that came while the queue was full: the last ones, and the number of those before them."""

    def __init__(self) -> None:
        self.hidden = 0
        self.tail: deque[tuple[str, bytes]] = deque()
        self._nbytes = 0

    def absorb(self, stream: str, lines: Sequence[bytes]) -> None:
        recent = lines[-_TAIL_BYTES:]  # a line has at least its newline
        self.hidden += len(lines) - len(recent)
        self.tail.extend((stream, line) for line in recent)
        self._nbytes += sum(map(len, recent)) + len(recent)
        while len(self.tail) > 1 and self._nbytes > _TAIL_BYTES:
            self._nbytes -= len(self.tail.popleft()[1]) + 1
            self.hidden += 1

    def lines(self, note: Callable[[int], bytes]) -> list[tuple[str, bytes]]:
        """Return the lines to show in place of all of them."""
        first = [(self.tail[0][0], note(self.hidden))] if self.hidden else []
        return [*first, *self.tail]


class _Queue:
    """Waiting lines of one rank.

    Attributes:
        keys: How often each line waits, for a quick look-up.
        went_alone: The last lines that left without those of the other ranks, since the last line of all ranks.
        misses: Number of lines that have waited in vain since another rank printed.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.held: deque[_Held] = deque()
        self.keys: Counter[tuple[str, bytes]] = Counter()
        self.went_alone: deque[int] = deque(maxlen=_LOOK_AHEAD)  # hashes: lines may be long
        self.nbytes = 0
        self.gap: _Gap | None = None
        self.last_fed = 0.0
        self.misses = 0
        self.is_done = False

    @property
    def is_full(self) -> bool:
        return self.gap is not None or self.nbytes > _MOST_BYTES or len(self.held) > _MOST_LINES

    def append(self, held: _Held) -> None:
        self.held.append(held)
        self.keys[held.key] += 1
        self.nbytes += len(held.key[1]) + 1

    def first_of(self, stream: str) -> int | None:
        """Return the index of the first waiting line of `stream` that ranks share; only first lines are searched."""
        first = enumerate(held.key for held in islice(self.held, _LOOK_AHEAD))
        return next((at for at, (of, text) in first if of == stream and not is_unshared(text)), None)

    def pop(self, at: int = 0) -> tuple[str, bytes]:
        key = self.held[at].key
        del self.held[at]
        self.nbytes -= len(key[1]) + 1
        self.keys[key] -= 1
        if not self.keys[key]:
            del self.keys[key]
        return key

    def shrink(self) -> None:
        """Keep only the last of the waiting lines."""
        later, self.gap = self.gap, _Gap()
        while self.held:
            stream, line = self.pop()
            self.gap.absorb(stream, (line,))
        if later is not None:
            self.gap.hidden += later.hidden
            for stream, line in later.tail:
                self.gap.absorb(stream, (line,))


class LineMerger:
    """Brings the lines of `ranks` into one order.

    Args:
        note: Returns the line that stands for a number of hidden ones.
        match: Whether equal lines of all `ranks` may become one.
    """

    def __init__(self, ranks: Collection[int], note: Callable[[int], bytes], *, match: bool = True) -> None:
        self._queues = {rank: _Queue(rank) for rank in ranks}
        self._note = note
        self._match = match and len(ranks) > 1
        self._order = 0
        self.speakers: set[int] = set()

    def push(self, rank: int, stream: str, lines: Sequence[bytes], now: float) -> None:
        """Add `lines` that `rank` completed now."""
        queue = self._queues[rank]
        self.speakers.add(rank)
        queue.last_fed = now
        for other in self._queues.values():
            if other is not queue:
                other.misses = 0
        if queue.is_full:
            queue.gap = queue.gap or _Gap()
            queue.gap.absorb(stream, lines)
        else:
            self._append(queue, ((stream, line) for line in lines), now)

    def done(self, rank: int) -> None:
        """Record that no more lines come from `rank`."""
        self._queues[rank].is_done = True

    def release(self, now: float, budget: float, *, has_room: bool = False) -> list[Merged]:
        """Return lines that need not wait any longer, at most about `budget` bytes of them.

        Args:
            has_room: Whether the end of a flood may be shown although it goes on.
        """
        merged: list[Merged] = []
        while budget > 0:
            if lines := self._next(now):
                merged += lines
                budget -= sum(cost(line.text) for line in lines)
            elif not self._close_a_gap(now, has_room):
                break
        return merged

    def force(self, rank: int, budget: float) -> list[Merged]:
        """Return all waiting lines of `rank`; if they exceed `budget` bytes, only the last ones."""
        queue = self._queues[rank]
        if queue.nbytes > budget:
            queue.shrink()
        merged = [Merged(rank, *queue.pop()) for _ in range(len(queue.held))]
        if queue.gap is not None:
            merged += [Merged(rank, *line) for line in queue.gap.lines(self._note)]
            queue.gap = None
        return merged

    def due(self) -> float | None:
        """Return the time at which `release` may have lines, given a budget; None when nothing waits."""
        heads = [(queue.held[0].since, queue) for queue in self._queues.values() if queue.held]
        times = [since if self._may_go(queue) else since + _HOLD_S for since, queue in heads]
        times += [queue.last_fed + _QUIET_S for queue in self._queues.values() if queue.gap is not None]
        return min(times, default=None)

    def _append(self, queue: _Queue, keys: Iterable[tuple[str, bytes]], now: float) -> None:
        for key in keys:
            self._order += 1
            queue.append(_Held(key, now, self._order))

    def _next(self, now: float) -> list[Merged]:
        """Return the lines to show next; none if every first line should wait."""
        queues = self._queues.values()
        waiting = [queue for queue in queues if queue.held]
        if unshared := [queue for queue in waiting if is_unshared(queue.held[0].key[1])]:  # no other rank prints it
            queue = min(unshared, key=_age)
            return [Merged(queue.rank, *queue.pop())]
        if not waiting or not self._match:
            return self._take_oldest(waiting)
        if len(waiting) == len(queues):
            alone = sorted((queue for queue in waiting if self._cannot_match(queue)), key=_age)
            crossed = [queue for queue in waiting if self._occurs_elsewhere(queue)]
            # A rank that is a line behind catches up first: otherwise no line of all ranks could be merged any more.
            behind = [queue for queue in alone if self._comes_late(queue)]
            first = [_take_alone(queue) for queue in behind or alone]
            if lines := first or self._take_together(waiting) or self._take_oldest(crossed):
                return lines
        if any(queue.is_done and not queue.held for queue in queues):
            return self._take_oldest(waiting)
        ready = [queue for queue in waiting if queue.misses >= _PATIENCE or now >= queue.held[0].since + _HOLD_S]
        for queue in ready:
            queue.misses += 1
        return self._take_oldest(ready)

    def _cannot_match(self, queue: _Queue) -> bool:
        """Return whether another rank has passed the first line of `queue` by printing another line on that stream."""
        key = queue.held[0].key
        return any(
            key not in other.keys and (other.is_done or other.first_of(key[0]) is not None)
            for other in self._queues.values()
            if other is not queue
        )

    def _occurs_elsewhere(self, queue: _Queue) -> bool:
        key = queue.held[0].key
        return any(key in other.keys for other in self._queues.values() if other is not queue)

    def _comes_late(self, queue: _Queue) -> bool:
        """Return whether another rank's line like the first one of `queue` has left already."""
        key = hash(queue.held[0].key)
        return any(key in other.went_alone for other in self._queues.values() if other is not queue)

    def _take_oldest(self, queues: Sequence[_Queue]) -> list[Merged]:
        return [_take_alone(min(queues, key=_age))] if queues else []

    def _take_together(self, waiting: Sequence[_Queue]) -> list[Merged]:
        """Return a line that every rank printed next on that stream, as one line; none if there is no such line.

        A rank's stdout and stderr come through two pipes, so the order between lines of the two is random.
        """
        for queue in sorted(waiting, key=_age):
            stream = queue.held[0].key[0]
            places = [other.first_of(stream) for other in waiting]
            keys = {None if at is None else other.held[at].key for other, at in zip(waiting, places, strict=True)}
            if len(keys) == 1:
                before: list[Merged] = []  # on that stream, in the order of their rank
                for other, at in zip(waiting, places, strict=True):
                    notices = _take_notices(other, at or 0, stream)
                    before += notices
                    other.pop((at or 0) - len(notices))
                    other.went_alone.clear()
                    other.misses = 0
                return [*before, *(Merged(None, *key) for key in keys if key is not None)]
        return []

    def _may_go(self, queue: _Queue) -> bool:
        """Return whether the first line of `queue` waits only for the budget."""
        others = [other for other in self._queues.values() if other is not queue]
        return (
            not self._match
            or is_unshared(queue.held[0].key[1])
            or queue.misses >= _PATIENCE
            or any(other.is_done and not other.held for other in others)
            or (all(other.held for other in others) and (self._cannot_match(queue) or self._occurs_elsewhere(queue)))
        )

    def _close_a_gap(self, now: float, has_room: bool) -> bool:
        """Append the end of a flood to the part of its beginning that was shown."""
        for queue in self._queues.values():
            if queue.gap is None or queue.held:
                continue
            if has_room or queue.is_done or now >= queue.last_fed + _QUIET_S:
                self._append(queue, queue.gap.lines(self._note), now)
                queue.gap = None
                return True
        return False


def _take_alone(queue: _Queue) -> Merged:
    key = queue.pop()
    queue.went_alone.append(hash(key))
    return Merged(queue.rank, *key)


def _take_notices(queue: _Queue, end: int, stream: str) -> list[Merged]:
    """Take the lines of `stream` before `end`, the first one that ranks share: it must not overtake them."""
    places = [at for at, held in enumerate(islice(queue.held, end)) if held.key[0] == stream]
    return [Merged(queue.rank, *queue.pop(at - taken)) for taken, at in enumerate(places)]


def _age(queue: _Queue) -> int:
    return queue.held[0].order
