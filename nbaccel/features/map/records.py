"""Records: the answers of one worker, in a file to which it only appends. Written in ranks; the kernel reads them too.

Layout of a record, little endian: two bytes that mark it, flags, the round, the index of the item, the length of the
payload, the CRC-32 of all this and of the payload, and the payload. A process that is killed leaves a torn record at
the end at most: reading stops there, and its items are asked again. Files are never changed otherwise.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "LONGEST_ANSWER",
    "AnswerIndex",
    "AnswerRecord",
    "RecordFile",
]

_HEADER = struct.Struct("<2sBBQII")  # mark, flags, round, index, bytes of the payload, checksum
_UNCHECKED = struct.Struct("<2sBBQI")
_MARK = b"nR"
_FAILED = 1
_LONGEST = 1 << 31
LONGEST_ANSWER = 2_000_000_000
"""Most bytes of an answer: readers take a record with a longer one for a damaged one."""

_READ_BYTES = 1 << 20
_SYNC_S = 1.0
_MOST_OPEN = 64


class AnswerRecord(NamedTuple):
    """The answer to one item.

    Args:
        item: Its number, 0-based.
        payload: The answer, or the error, as the format of the map writes it.
        is_failed: The payload is an error.
        round: How often the map had asked failed items again, see `ClaimLog`.
    """

    item: int
    payload: bytes
    is_failed: bool = False
    round: int = 0

    def packed(self) -> bytes:
        flags = _FAILED if self.is_failed else 0
        head = _UNCHECKED.pack(_MARK, flags, self.round, self.item, len(self.payload))
        return head + struct.pack("<I", zlib.crc32(self.payload, zlib.crc32(head))) + self.payload


class RecordFile:
    """The file to which one worker appends its records. Closed by its owner.

    Raises:
        OSError: The disk is full, or the folder is gone; what was complete before is still there.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._end = os.fstat(self._fd).st_size
        self._synced = time.monotonic()

    def append(self, records: Iterable[AnswerRecord]) -> None:
        """Write records with one call, so that they outlive this process; on the disk within a second of writing."""
        data = b"".join(record.packed() for record in records)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            os.ftruncate(self._fd, self._end)  # readers stop at a torn record, and would miss what follows it
            raise
        self._end += len(data)
        if time.monotonic() - self._synced >= _SYNC_S:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._fd)
        self._synced = time.monotonic()

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


class _Place(NamedTuple):
    """The place of a record in its file.

    Args:
        offset: The offset of its header, in bytes.
        size: The size of the payload.
    """

    offset: int
    item: int
    size: int
    is_failed: bool
    round: int


def _scan_records(path: Path) -> Iterator[_Place]:
    """Yield the place of each whole record; stop at the first one that is torn or damaged."""
    with open(path, "rb", buffering=_READ_BYTES) as file:
        offset = 0
        while len(head := file.read(_HEADER.size)) == _HEADER.size:
            mark, flags, turn, index, size, checksum = _HEADER.unpack(head)
            if mark != _MARK or size > _LONGEST:
                return
            payload = file.read(size)
            if len(payload) != size or checksum != zlib.crc32(payload, zlib.crc32(head[: _UNCHECKED.size])):
                return
            yield _Place(offset, index, size, bool(flags & _FAILED), turn)
            offset += _HEADER.size + size


def _read_record(fd: int, offset: int) -> AnswerRecord:
    """Return the record at `offset` of an open file, which `_scan_records` has found whole."""
    mark, flags, turn, index, size, _checksum = _HEADER.unpack(os.pread(fd, _HEADER.size, offset))
    assert mark == _MARK
    payload = os.pread(fd, size, offset + _HEADER.size)
    assert len(payload) == size
    return AnswerRecord(index, payload, bool(flags & _FAILED), turn)


_NOTHING, _HAS_FAILED, _ANSWERED = 0, 1, 2


class AnswerIndex:
    """An index of the answers by item: where each one lies, in twelve bytes an item.

    An answer counts once: of several for one item the first, and any answer before an error; of errors the newest.

    Attributes:
        failed: How many items have an error and no answer.
        answered: How many have an answer.
    """

    def __init__(self, total: int) -> None:
        self._states = bytearray(total)
        self._rounds = bytearray(total)
        self._files = array("H", bytes(2 * total))
        self._offsets = array("Q", bytes(8 * total))
        self._paths: list[Path] = []
        self.answered = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._states)

    @property
    def done(self) -> int:
        return self.answered + self.failed

    def _reach(self, total: int) -> None:
        more = total - len(self._states)
        if more > 0:
            self._states.extend(bytes(more))
            self._rounds.extend(bytes(more))
            self._files.frombytes(bytes(2 * more))
            self._offsets.frombytes(bytes(8 * more))

    def read(self, path: Path, grows: bool = False) -> None:
        """Add the records of a file.

        Args:
            grows: Items may have numbers beyond those that are known.
        """
        number = len(self._paths)
        self._paths.append(path)
        for place in _scan_records(path):
            if place.item >= len(self._states):
                if not grows:
                    continue  # of other items, whose folder it was
                self._reach(place.item + 1)
            self._take(number, place)

    def _take(self, number: int, place: _Place) -> None:
        index, before = place.item, self._states[place.item]
        if before == _ANSWERED or (place.is_failed and before == _HAS_FAILED and place.round < self._rounds[index]):
            return
        self.failed += place.is_failed - (before == _HAS_FAILED)
        self.answered += not place.is_failed
        self._states[index] = _HAS_FAILED if place.is_failed else _ANSWERED
        self._rounds[index] = place.round
        self._files[index], self._offsets[index] = number, place.offset

    def is_done(self, index: int, least_round: int = 0) -> bool:
        """Return whether an item has an answer, or an error of `least_round` or later."""
        if index >= len(self._states):
            return False
        state = self._states[index]
        return state == _ANSWERED or (state == _HAS_FAILED and self._rounds[index] >= least_round)

    def done_since(self, least_round: int) -> int:
        """Return how many items have an answer, or an error of `least_round` or later."""
        return self.answered + sum(self.is_done(index, least_round) for index in self.failures())

    def failures(self) -> list[int]:
        """Return the items that have an error and no answer."""
        return [index for index, state in enumerate(self._states) if state == _HAS_FAILED]

    def records(self) -> Iterator[AnswerRecord]:
        """Yield the record of each item that has one, in the order of the items."""
        fds: dict[int, int] = {}
        try:
            for index, state in enumerate(self._states):
                if state == _NOTHING:
                    continue
                number = self._files[index]
                if number not in fds:
                    if len(fds) >= _MOST_OPEN:
                        os.close(fds.pop(next(iter(fds))))
                    fds[number] = os.open(self._paths[number], os.O_RDONLY | os.O_CLOEXEC)
                yield _read_record(fds[number], self._offsets[index])
        finally:
            for fd in fds.values():
                os.close(fd)
