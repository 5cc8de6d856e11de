"""Telemetry: passes the reports of a run's ranks from their rings to the listeners. Runs in the kernel.

The group calls `tick` whenever it is awake and asks `due_in` how long it may sleep. Nothing here makes a rank wait, and
no listener can end a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nbaccel.events import Event, Listener, RecordsLost
from nbaccel.launch.wire.records import RecordReader
from nbaccel.launch.wire.ring import RingReader, make_ring

__all__ = ["Rings", "Telemetry"]

TICK_S = 0.5


class Rings:
    """The kernel's ends of the ranks' rings, in the order of ranks."""

    def __init__(self) -> None:
        self._readers: list[RingReader] = []

    def __iter__(self) -> Iterator[RingReader]:
        return iter(self._readers)

    def add(self) -> int:
        """Make a ring for the next rank; return a descriptor for the rank, which the caller closes."""
        fd = make_ring()
        self._readers.append(RingReader(fd))
        return fd

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._readers.clear()


class Telemetry:
    """The reports of one run.

    rings: those of its ranks; they still belong to the caller.  listeners: receive the events.  notice: shows one line
    of the project to the user.
    """

    def __init__(self, rings: Rings, listeners: Sequence[Listener], notice: Callable[[str], None]) -> None:
        self._rings = rings
        self._listeners = list(listeners)
        self._notice = notice
        self._told_lost = {rank: ring.lost for rank, ring in enumerate(rings)}  # by earlier runs
        self._records = RecordReader()
        self._due = 0.0

    def due_in(self, now: float) -> float:
        """Return the seconds until the next round of reading."""
        return max(0.0, self._due - now)

    def tick(self, now: float) -> None:
        """Read the new records, if it is time."""
        if now >= self._due:
            self._due = now + TICK_S
            self.read(now)

    def read(self, now: float, is_last: bool = False) -> None:
        """Read the new records. is_last: no rank is left that could write."""
        for rank, ring in enumerate(self._rings):
            events: list[tuple[float, Event]] = [
                (record.at, event)
                for record in ring.read(is_last)
                if (event := self._records.event(record)) is not None
            ]
            if ring.lost > self._told_lost.get(rank, 0):
                self._told_lost[rank] = ring.lost
                events.append((now, RecordsLost(ring.lost)))
            for listener in list(self._listeners):
                with self._without_harm(listener):
                    feed = listener.feed
                    for at, event in events:
                        feed(rank, at, event)
        for listener in list(self._listeners):
            with self._without_harm(listener):
                listener.tick(now)

    @contextmanager
    def _without_harm(self, listener: Listener) -> Iterator[None]:
        """Report an error in a listener once; the listener gets no more events."""
        try:
            yield
        except Exception as error:
            self._listeners.remove(listener)
            self._notice(
                f"{type(listener).__name__} failed and is off for the rest of this run, which goes on "
                f"({type(error).__name__}: {error})"
            )
