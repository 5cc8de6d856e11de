"""Ring: shared memory in which one rank writes records and the kernel reads them. Both sides run it.

Neither side waits for the other. The rank overwrites its oldest records when the kernel does not read, because it is
busy or stopped; the kernel counts what it missed. Records stay readable after the rank died, however it died. This file
does not know what the records mean.

Each slot holds the number of its record at its beginning and at its end, written by one call. So the reader needs no
shared counter and no lock: the number it expects means "new", an older one "not yet", a newer one "overwritten". It
reads the last number before it copies a slot, and the first one after it: so the slot was complete, and stayed
complete. In the rank several threads may write: they draw numbers from one iterator, which is atomic, and a number that
was drawn and never written (its thread was interrupted in between) is given up when later ones exist.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

__all__ = [
    "Record",
    "RingReader",
    "RingWriter",
    "make_ring",
]

_TEXT_BYTES = 80
"""Bytes of text that one slot holds; longer texts take several slots."""

_SLOT = struct.Struct(f"@QdqdHHHH{_TEXT_BYTES}sQ")  # number, at, step, value, kind, bytes of text, part, parts after, …
_SLOT_BYTES = _SLOT.size
_NUMBER = struct.Struct("@Q")
_FIRST_NUMBER = struct.Struct(f"@Q{_SLOT_BYTES - _NUMBER.size}x")  # of a slot: written first, and cleared first
_LAST_NUMBER = struct.Struct(f"@{_SLOT_BYTES - _NUMBER.size}xQ")  # written when all the rest is there
_SLOTS = 8192  # 4 s of 2000 records; 1 MiB, shared with the kernel
_SLOTS_PER_COPY = 512
_SLOTS_OF_A_LOOK = 32  # a page: most often there are a few records, and memory that nobody has touched yet costs
_LOOK_AHEAD = 64  # slots in which a record shows that the one before it will not come
_HEAD_START = 64  # slots that a rank may fill while the reader that it has overtaken finds its place again

_Slot = tuple[int, float, int, float, int, int, int, int, bytes, int]


class Record(NamedTuple):
    """The record of one `RingWriter.write`.

    Args:
        at: `time.monotonic()` when it was written.
        kind, step, value, text: The writer's own.
    """

    at: float
    kind: int
    step: int
    value: float
    text: bytes


def make_ring(slots: int = _SLOTS) -> int:
    """Make memory for the records of one rank; return a descriptor, which the caller closes.

    Its pages exist once written to.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("nbaccel-ring", os.MFD_CLOEXEC)
    else:  # macOS, where the only rank is the kernel itself
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, slots * _SLOT_BYTES)
    return fd


class RingWriter:
    """The rank's end. A write takes less than a microsecond and waits for nothing.

    Example:
        >>> fd = make_ring()
        >>> writer, reader = RingWriter(fd), RingReader(fd)
        >>> writer.write(kind=1, step=7, value=0.5)
        >>> [(record.step, record.value) for record in reader.read()]
        [(7, 0.5)]
        >>> writer.close(); reader.close(); os.close(fd)
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._slots = len(self._map) // _SLOT_BYTES
        self._numbers = itertools.count(1)

    def write(self, kind: int, step: int = 0, value: float = 0.0, text: bytes = b"", at: float | None = None) -> None:
        """Write one record. A text that would fill more than a quarter of the ring is left out, and counts as lost.

        Args:
            at: The time of the event, in `time.monotonic()`; None for now.
        """
        if at is None:
            at = monotonic()
        if len(text) > _TEXT_BYTES:
            self._write_parts(kind, step, value, text, at)
            return
        number = next(self._numbers)
        where = number % self._slots * _SLOT_BYTES
        _SLOT.pack_into(self._map, where, number, at, step, value, kind, len(text), 0, 0, text, number)

    def write_number(self, kind: int, step: int, value: float) -> None:
        """Write one record without text, now: a short form of `write` for events in every step."""
        number = next(self._numbers)
        _SLOT.pack_into(
            self._map, number % self._slots * _SLOT_BYTES, number, monotonic(), step, value, kind, 0, 0, 0, b"", number
        )

    def _write_parts(self, kind: int, step: int, value: float, text: bytes, at: float) -> None:
        if len(text) > self._slots // 4 * _TEXT_BYTES:
            self.leave_out()
            return
        texts = [text[start : start + _TEXT_BYTES] for start in range(0, len(text), _TEXT_BYTES)]
        numbers = list(itertools.islice(self._numbers, len(texts)))  # in one call: no other thread's come between
        for part, (number, text) in enumerate(zip(numbers, texts, strict=True)):
            where, after = number % self._slots * _SLOT_BYTES, len(texts) - 1 - part
            _SLOT.pack_into(self._map, where, number, at, step, value, kind, len(text), part, after, text, number)

    def leave_out(self) -> None:
        """Make the reader count one record as lost."""
        next(self._numbers)  # it is never written

    def close(self) -> None:
        self._map.close()


class RingReader:
    """The kernel's end. It reads the memory as a file: most runs report little, and a mapped page costs a fault.

    Attributes:
        lost: Slots that were overwritten before they were read, or never written; a short record is one slot.
    """

    def __init__(self, fd: int) -> None:
        self._fd = os.dup(fd)
        self._slots = os.fstat(fd).st_size // _SLOT_BYTES
        self._next = 1
        self._missed_at = 0  # the number that an earlier read found missing
        self._parts: list[bytes] = []
        self.lost = 0

    def close(self) -> None:
        os.close(self._fd)

    def read(self, is_last: bool = False) -> Iterator[Record]:
        """Yield the records that have come since, oldest first; at most as many as fit, so that this ends.

        Args:
            is_last: No process writes any more; missing records will not come.
        """
        taken, most = 0, _SLOTS_OF_A_LOOK
        while taken < self._slots:
            slots = self._take(most)
            taken += len(slots)
            most = _SLOTS_PER_COPY if len(slots) == most else _SLOTS_OF_A_LOOK
            for _, at, step, value, kind, size, part, after, text, _ in slots:
                if not part and not after:
                    yield Record(at, kind, step, value, text[:size])
                elif (whole := self._joined(part, after, text[:size])) is not None:
                    yield Record(at, kind, step, value, whole)
            if not slots and not self._gave_up_one(is_last):
                return

    def _take(self, most: int) -> list[_Slot]:
        """Return copies of the available slots, in a row from the next one on; the rank may overwrite the slots."""
        first = self._next
        count = min(most, self._slots - first % self._slots)
        count = self._in_a_row(_LAST_NUMBER, first, self._copied(first, count))
        if count == 0:
            return []  # most often
        block = self._copied(first, count)
        count = self._in_a_row(_FIRST_NUMBER, first, self._copied(first, count))  # fewer: the rank has wrapped around
        self._next += count
        return list(itertools.islice(_SLOT.iter_unpack(block), count))

    @staticmethod
    def _in_a_row(layout: struct.Struct, first: int, block: bytes) -> int:
        """Return how many of the slots in `block`, which begins with that of `first`, hold their own number."""
        numbers = layout.iter_unpack(block)
        return next((row for row, (number,) in enumerate(numbers) if number != first + row), len(block) // _SLOT_BYTES)

    def _copied(self, first: int, count: int) -> bytes:
        start = first % self._slots
        here = min(count, self._slots - start)
        block = os.pread(self._fd, here * _SLOT_BYTES, start * _SLOT_BYTES)
        if (rest := min(count, self._slots) - here) > 0:
            block += os.pread(self._fd, rest * _SLOT_BYTES, 0)
        return block

    def _gave_up_one(self, is_last: bool) -> bool:
        """Skip records that can never be read; return False if the next record has just not been written yet."""
        number, there = self._next, self._number_at(self._next)
        if there > number:  # the oldest record that is left is the one after it
            self._lose(there + 1 - self._slots + _HEAD_START - number)
            return True
        if not self._is_any_there(number + 1, _LOOK_AHEAD):
            return False
        if self._missed_at != number and not is_last:
            self._missed_at = number  # its thread may be writing it at this moment
            return False
        self._lose(1)
        return True

    def _lose(self, count: int) -> None:
        self.lost += count
        self._next += count
        self._parts.clear()

    def _joined(self, part: int, after: int, text: bytes) -> bytes | None:
        """Return the text of a record in parts when its last one has come; None before, and if one of them was lost."""
        if part == 0:
            self._parts.clear()
        if part == len(self._parts):
            self._parts.append(text)
        whole = after == 0 and part + 1 == len(self._parts)
        return b"".join(self._parts) if whole else None

    def _is_any_there(self, first: int, count: int) -> bool:
        """Return whether one of `count` records from `first` on exists.

        They are read in one piece: most often there is none, and a short run would spend more on asking for each than
        on reading all its records.
        """
        block = self._copied(first, count)
        if not block.strip(b"\0"):  # nothing was ever written there
            return False
        numbers = _FIRST_NUMBER.iter_unpack(block)
        return any(number == later for later, (number,) in enumerate(numbers, first))

    def _number_at(self, number: int) -> int:
        return int(_NUMBER.unpack(os.pread(self._fd, _NUMBER.size, number % self._slots * _SLOT_BYTES))[0])
