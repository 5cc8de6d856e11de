"""Telemetry: what the ranks of a run report, from their rings to the listeners. Runs in the kernel.

The group calls `tick` whenever it is awake and asks `due_in` how long it may sleep. Nothing here makes a rank wait,
and no listener can end a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nbaccel.events import Event, Listener, RecordsLost
from nbaccel.launch.wire.records import RecordReader
from nbaccel.launch.wire.ring import RingReader, make_ring

__all__ = ["Telemetry"]

TICK_S = 0.5


class Telemetry:
    """The rings of one run.

    listeners: who is fed.  notice: shows one line of ours to the user.
    """

    def __init__(self, listeners: Sequence[Listener], notice: Callable[[str], None]) -> None:
        self._listeners = list(listeners)
        self._notice = notice
        self._rings: list[RingReader] = []
        self._told_lost: list[int] = []
        self._records = RecordReader()
        self._due = 0.0

    def add_ring(self) -> int:
        """A ring for the next rank, as a descriptor for it; the caller closes that."""
        fd = make_ring()
        self._rings.append(RingReader(fd))
        self._told_lost.append(0)
        return fd

    def due_in(self, now: float) -> float:
        """Seconds until the next round of reading."""
        return max(0.0, self._due - now)

    def tick(self, now: float) -> None:
        """Read what has come, if it is time."""
        if now >= self._due:
            self._due = now + TICK_S
            self.read(now)

    def read(self, now: float, is_last: bool = False) -> None:
        """Read what has come. is_last: no rank is left that could write."""
        for rank, ring in enumerate(self._rings):
            events: list[tuple[float, Event]] = [
                (record.at, event)
                for record in ring.read(is_last)
                if (event := self._records.event(record)) is not None
            ]
            if ring.lost > self._told_lost[rank]:
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
        """What goes wrong in a listener is said once; it hears nothing more."""
        try:
            yield
        except Exception as error:
            self._listeners.remove(listener)
            self._notice(
                f"{type(listener).__name__} failed and is off for the rest of this run, which goes on "
                f"({type(error).__name__}: {error})"
            )

    def close(self) -> None:
        for ring in self._rings:
            ring.close()
        self._rings.clear()
