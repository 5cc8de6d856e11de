"""Records: events as they are stored in a ring. Both sides run it; a rank turns events into records, the kernel back.

A loss is a number in a slot. Every other event is its class's name and its fields as JSON, so that a new event needs no
line here. Nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nbaccel import events
from nbaccel.events import Event, Loss
from nbaccel.launch.wire.ring import Record, RingWriter

__all__ = ["LOSS", "RecordReader", "write_event", "write_loss"]

_JSON, LOSS = range(2)


def write_loss(ring: RingWriter, step: int, value: float, at: float | None = None) -> None:
    """Write a `Loss`; the short way, because there is one in every step."""
    ring.write(LOSS, step, value, at=at)


def write_event(ring: RingWriter, event: Event, at: float | None = None) -> None:
    """Write `event`.

    A value that is no number, string or container of them becomes a string; if that fails, it counts as lost.

    >>> from nbaccel.launch.wire.ring import RingReader, make_ring
    >>> import os
    >>> fd = make_ring()
    >>> writer, reader = RingWriter(fd), RingReader(fd)
    >>> write_event(writer, events.Phase("fold 2"))
    >>> [RecordReader().event(record) for record in reader.read()]
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


class RecordReader:
    """Turns records back into events, in the kernel."""

    def __init__(self) -> None:
        kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)]
        self._kinds = {kind.__name__: kind for kind in kinds}

    def event(self, record: Record) -> Event | None:
        """Return the event, its sequences as tuples; None for a record that is no event of this version."""
        if record.kind == LOSS:
            return Loss(record.value, record.step)
        try:
            name, fields = json.loads(record.text)
            return self._kinds[name](
                **{key: tuple(field) if type(field) is list else field for key, field in fields.items()}
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
