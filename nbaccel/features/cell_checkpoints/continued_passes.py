"""Passes of loaders that go on in another process: how they began, and what was taken of them. Runs in ranks.

What follows a loop that prepares nothing knows its passes (`loader_pass`): in a rank that shares its batches with
others they come in parts. Where nothing follows it, a pass is that of torch's iterator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nbaccel.train.raw_loop.loader_pass import LONE_PASS, SHARED_PASS, PassBegin, SharedPass
from nbaccel.train.raw_loop.loaders import asked

__all__ = [
    "batches_ahead",
    "batches_taken",
    "begin_of",
    "beginning_as",
    "further_parts",
    "note_passed",
    "pass_over",
    "takes_groups",
]


@contextmanager
def beginning_as(begin: PassBegin | None) -> Iterator[None]:
    """Let a pass that begins in the block begin as one in the process that this one continues."""
    if (passes := asked()) is None:
        yield
        return
    passes.next_begin = begin
    try:
        yield
    finally:
        passes.next_begin = None


def note_passed(iterator: Any) -> None:
    """Note that what `iterator` has handed out by now was trained in the process that this one continues."""
    if (passes := asked()) is not None and passes.minds(iterator):
        passes.note_passed(iterator)


def pass_over(iterator: Any, count: int) -> None:
    """Note that `count` batches of a pass were taken before, in a process that this one continues."""
    for name in (LONE_PASS, SHARED_PASS):
        if (this := iterator.__dict__.get(name)) is not None:
            this.gauge.taken += count
            this.gauge.passed_over += count
            if isinstance(this, SharedPass):
                this.drawn += count


def begin_of(iterator: Any) -> PassBegin | None:
    """Return how the pass of an iterator began; None in a rank that is alone."""
    this: SharedPass | None = iterator.__dict__.get(SHARED_PASS)
    if this is None:
        return None
    drawn, taken = (this.drawn, this.gauge.taken) if this.is_split else (None, None)
    cut_from = drawn if this.cut_from is None else this.cut_from
    return PassBegin(this.place, cut_from, taken if this.sliced_from is None else this.sliced_from, this.cuts)


def takes_groups(iterator: Any) -> bool:
    """Return whether one batch of each group that an iterator draws is this rank's."""
    this: SharedPass | None = iterator.__dict__.get(SHARED_PASS)
    return this is not None and this.gives_each


def batches_taken(iterator: Any) -> int:
    """Return how many batches of its loader an iterator has handed out, each once, in however many parts it came."""
    this: SharedPass | None = iterator.__dict__.get(SHARED_PASS)
    return int(iterator._num_yielded) if this is None else this.gauge.taken


def batches_ahead(iterator: Any) -> int:
    """Return how many batches of its loader a new iterator has drawn already, for its worker processes."""
    this: SharedPass | None = iterator.__dict__.get(SHARED_PASS)
    if this is None:
        return getattr(iterator, "_send_idx", 0)
    return sum(label.turn.is_first for label in this.labels)


def further_parts(iterator: Any) -> int:
    """Return how many parts of batches an iterator has handed out beside the first of each."""
    this: SharedPass | None = iterator.__dict__.get(SHARED_PASS)
    return 0 if this is None else this.taken - this.gauge.taken + this.gauge.passed_over
