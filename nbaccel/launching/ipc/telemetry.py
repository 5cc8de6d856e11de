"""Pass the reports of a run's ranks from their rings to the listeners. Runs in the kernel; ranks write the records.

The group calls `Telemetry.tick` whenever it is awake and asks `due_in` how long it may sleep. Nothing here makes a rank
wait, and no listener can end a run. A rank turns events into records of a ring, and the kernel turns them back. A loss
is a number in a slot. Every other event is its class's name and its fields as JSON, so that a new event needs no line
here. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from nbaccel.base import events
from nbaccel.base.events import Event, Listener, Loss, RecordsLost
from nbaccel.launching.ipc.ring import Record, RingReader, RingWriter, make_ring

__all__ = [
    "LOSS",
    "Rings",
    "Telemetry",
    "read_event",
    "write_event",
    "write_loss",
]

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

    def replace(self, rank: int) -> int:
        """Make a ring for a new process of `rank`; return a descriptor as `add` does. The old records are gone."""
        fd = make_ring()
        self._readers[rank].close()
        self._readers[rank] = RingReader(fd)
        return fd

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._readers.clear()


class Telemetry:
    """The reports of one run.

    Args:
        rings: Those of its ranks; they still belong to the caller.
        listeners: Receive the events.
        notice: Shows one line of the project to the user.
    """

    def __init__(self, rings: Rings, listeners: Sequence[Listener], notice: Callable[[str], None]) -> None:
        self._rings = rings
        self._listeners = list(listeners)
        self._notice = notice
        self._told_lost = {rank: ring.lost for rank, ring in enumerate(rings)}  # by earlier runs
        self._due = 0.0

    def begin(self, now: float) -> None:
        """Have the first round after half a second, since ranks that have just been started have reported nothing."""
        self._due = now + TICK_S

    def due_in(self, now: float) -> float:
        """Return the seconds until the next round of reading."""
        return max(0.0, self._due - now)

    def tick(self, now: float) -> None:
        """Read the new records, if it is time."""
        if now >= self._due:
            self._due = now + TICK_S
            self.read(now)

    def tell(self, rank: int, now: float, event: Event) -> None:
        """Tell the listeners of an event that the kernel itself reports about `rank`."""
        self._feed(rank, [(now, event)])

    def renew(self, rank: int) -> None:
        """Begin with the new ring of `rank`, whose old one was read to its end."""
        self._told_lost.pop(rank, None)

    def read(self, now: float, is_last: bool = False, ended: Collection[int] = ()) -> None:
        """Read the new records.

        Args:
            is_last: No rank is left that could write.
            ended: Ranks that cannot write any more.
        """
        for rank, ring in enumerate(self._rings):
            events: list[tuple[float, Event]] = [
                (record.at, event)
                for record in ring.read(is_last or rank in ended)
                if (event := read_event(record)) is not None
            ]
            if ring.lost > self._told_lost.get(rank, 0):
                self._told_lost[rank] = ring.lost
                events.append((now, RecordsLost(ring.lost)))
            if events:
                self._feed(rank, events)
        for listener in list(self._listeners):
            try:
                listener.tick(now)
            except Exception as error:
                self._dismiss(listener, error)

    def _feed(self, rank: int, events: Sequence[tuple[float, Event]]) -> None:
        for listener in list(self._listeners):
            try:
                feed = listener.feed
                for at, event in events:
                    feed(rank, at, event)
            except Exception as error:
                self._dismiss(listener, error)

    def _dismiss(self, listener: Listener, error: Exception) -> None:
        """Report an error in a listener once; the listener gets no more events."""
        self._listeners.remove(listener)
        self._notice(
            f"{type(listener).__name__} failed and is off for the rest of this run, which goes on "
            f"({type(error).__name__}: {error})"
        )


_JSON, LOSS = range(2)


def write_loss(ring: RingWriter, step: int, value: float, at: float | None = None) -> None:
    """Write a `Loss`; the short way, because there is one in every step."""
    ring.write(LOSS, step, value, at=at)


def write_event(ring: RingWriter, event: Event, at: float | None = None) -> None:
    """Write `event`.

    A value that is no number, string or container of them becomes a string; if that fails, it counts as lost.

    Example:
        >>> from nbaccel.launching.ipc.ring import RingReader, make_ring
        >>> import os
        >>> fd = make_ring()
        >>> writer, reader = RingWriter(fd), RingReader(fd)
        >>> write_event(writer, events.Phase("fold 2"))
        >>> [read_event(record) for record in reader.read()]
        [Phase(name='fold 2')]
        >>> writer.close(); reader.close(); os.close(fd)
    """
    fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
    try:
        text = json.dumps([type(event).__name__, fields], default=_plain)
    except (TypeError, ValueError):  # keys that are no text, or a container that holds itself
        ring.leave_out()
    else:
        ring.write(_JSON, text=text.encode(), at=at)


def _plain(value: Any) -> Any:
    """Return a value that JSON does not know as a number if possible, else as some characters of text."""
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)[:200]


_KINDS = {kind.__name__: kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)}


def read_event(record: Record) -> Event | None:
    """Turn a record back into an event, its sequences as tuples; None if it is no event of this version."""
    if record.kind == LOSS:
        return Loss(record.value, record.step)
    try:
        name, fields = json.loads(record.text.decode())
        return _KINDS[name](**{key: tuple(field) if type(field) is list else field for key, field in fields.items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
