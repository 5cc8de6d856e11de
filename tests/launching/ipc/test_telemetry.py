"""Events survive the ring: as they were, or as numbers and strings, or counted as lost."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from nbaccel.base import events
from nbaccel.base.events import Event, Loss, Memory, Metric, Phase, Progress
from nbaccel.launching.ipc.ring import RingReader, RingWriter, make_ring
from nbaccel.launching.ipc.telemetry import read_event, write_event, write_loss
from nbaccel.launching.rank.reporter import Reporter


class _Wire:
    """A ring with both ends in one place."""

    def __init__(self) -> None:
        fd = make_ring(256)
        self.writer, self.reader = RingWriter(fd), RingReader(fd)
        os.close(fd)

    def arrived(self) -> list[Event | None]:
        return [read_event(record) for record in self.reader.read(is_last=True)]

    def close(self) -> None:
        self.writer.close()
        self.reader.close()


@pytest.fixture
def wire() -> Iterator[_Wire]:
    wire = _Wire()
    yield wire
    wire.close()


@pytest.fixture(scope="module")
def answered() -> Collection[type[Event]]:
    """Events that go no further than the rank's reporter."""
    wire = _Wire()
    return Reporter(wire.writer, lambda event: None, lambda event: None, lambda event: None)._routes.keys() - {
        Loss,
        Metric,
    }


_names = st.text(max_size=20)
_numbers = st.floats(allow_nan=False) | st.integers(-(2**60), 2**60)
_events = st.one_of(
    st.builds(Metric, st.dictionaries(_names, _numbers | _names | st.none()), st.integers(0, 2**40)),
    st.builds(Phase, _names),
    st.builds(Memory, st.integers(0, 2**50), st.integers(0, 2**50), st.none() | st.integers(0, 2**50)),
    st.builds(Progress, st.integers(0, 2**40), st.integers(0, 2**40), st.none() | st.integers(0, 2**40)),
)


@given(st.lists(_events, max_size=10))
def test_events_survive_the_ring(sent: list[Event]) -> None:
    wire = _Wire()
    for event in sent:
        write_event(wire.writer, event)
    assert wire.arrived() == sent
    wire.close()


@given(st.integers(0, 2**62), st.floats(allow_nan=False))
def test_a_loss_keeps_every_bit(step: int, value: float) -> None:
    wire = _Wire()
    write_loss(wire.writer, step, value)
    assert wire.arrived() == [Loss(value, step)]
    wire.close()


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(events).values() if inspect.isclass(kind) and issubclass(kind, Event) and kind is not Event],
    ids=lambda kind: kind.__name__,
)
def test_every_event_that_nobody_in_the_rank_answers_travels(
    kind: type[Event], wire: _Wire, answered: Collection[type[Event]]
) -> None:
    """A new event needs defaults for its fields and no line in the wire, or a route of its own in the reporter."""
    if kind in answered:
        return
    write_event(wire.writer, kind())
    assert wire.arrived() == [kind()]


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (torch.tensor(2), 2.0),
        (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
        (torch.ones(2), "tensor([1., 1.])"),
        (object, "<class 'object'>"),
        ({"a": torch.tensor(1.0)}, {"a": 1.0}),
        (float("inf"), float("inf")),
    ],
)
def test_what_json_does_not_know_is_a_number_or_a_string_on_arrival(value: Any, arrives: Any, wire: _Wire) -> None:
    write_event(wire.writer, Metric({"x": value}))
    assert wire.arrived() == [Metric({"x": arrives})]


def test_what_cannot_be_written_counts_as_lost_and_does_not_fail(wire: _Wire) -> None:
    endless: list[Any] = []
    endless.append(endless)
    write_event(wire.writer, Metric({"x": endless}))
    write_event(wire.writer, Metric({(1, 2): 3.0}))  # type: ignore[dict-item]
    write_event(wire.writer, Phase("after"))
    assert wire.arrived() == [Phase("after")]
    assert wire.reader.lost == 2


@pytest.mark.parametrize("text", [b"", b"{", b'["Unknown", {}]', b'["Phase", {"colour": 1}]', b"[1, 2]", b"7"])
def test_a_record_that_is_no_event_is_passed_over(text: bytes, wire: _Wire) -> None:
    wire.writer.write(0, text=text)
    assert wire.arrived() == [None]
