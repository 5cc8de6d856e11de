"""Frames between the relay and an agent: JSON with a blob behind it, over any stream of bytes. Both sides use it.

A frame is never unpickled here: blobs are output of ranks, or values that only the kernel or a rank unpacks.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Frame", "FrameReader", "FrameWriter", "pieces_of", "read_some"]

_HEAD = struct.Struct("!IQ")  # bytes of JSON, bytes of the blob
_READ_AT_ONCE = 1 << 18
_MOST_JSON = 1 << 26
_PIECE = 1 << 20
_MOST_WAITING = 1 << 23


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Args:
        op: Its kind; each side has a method for each kind that it takes.
        fields: Plain data.
        blob: Bytes that go as they are.

    Example:
        >>> reader = FrameReader()
        >>> [frame.op for frame in reader.feed(Frame("ping", {"at": 1.5}).encoded())]
        ['ping']
    """

    op: str
    fields: dict[str, Any] = field(default_factory=dict)
    blob: bytes | memoryview = b""

    def encoded(self) -> bytes:
        """Return the frame as bytes."""
        body = json.dumps([self.op, self.fields]).encode()
        return b"".join([_HEAD.pack(len(body), len(self.blob)), body, self.blob])


class FrameReader:
    """Makes frames of bytes that arrive in pieces of any length."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take more bytes, and yield the frames that are complete now.

        Args:
            data: What has arrived.

        Raises:
            ValueError: The other side speaks something else.
        """
        self._data += data
        while len(self._data) >= _HEAD.size:
            size, blob_size = _HEAD.unpack_from(self._data)
            if size > _MOST_JSON:
                raise ValueError(f"no frame of nbaccel: {bytes(self._data[:80])!r}")
            end = _HEAD.size + size + blob_size
            if len(self._data) < end:
                return
            op, fields = json.loads(self._data[_HEAD.size : _HEAD.size + size])
            frame = Frame(op, fields, bytes(self._data[_HEAD.size + size : end]))
            del self._data[:end]
            yield frame


class FrameWriter:
    """Writes frames, or any bytes, to a descriptor that never makes the writer wait.

    Args:
        fd: The descriptor, which becomes non-blocking.

    Attributes:
        is_open: False once the other side is gone: what is written then is dropped.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.is_open = True
        self._now = memoryview(b"")
        self._later: deque[bytes | Iterator[bytes]] = deque()
        self._waiting_bytes = 0

    @property
    def is_full(self) -> bool:
        """Return whether so much waits that what it comes from should be held back."""
        return self._waiting_bytes > _MOST_WAITING

    @property
    def has_waiting(self) -> bool:
        """Return whether bytes wait until the descriptor can take them."""
        return bool(self._now or self._later)

    def send(self, frame: Frame) -> None:
        """Write a frame, now or as soon as the descriptor takes it."""
        self.write(frame.encoded())

    def send_first(self, frame: Frame) -> None:
        """Write a frame before all that wait."""
        data = frame.encoded()
        self._waiting_bytes += len(data)
        self._later.appendleft(data)
        self.flush()

    def send_each(self, frames: Iterable[Frame]) -> None:
        """Write frames, each of them made when the descriptor can take it."""
        self._later.append(frame.encoded() for frame in frames)
        self.flush()

    def write(self, data: bytes) -> None:
        """Write bytes, now or as soon as the descriptor takes them."""
        self._waiting_bytes += len(data)
        self._later.append(data)
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as the descriptor takes it."""
        while self.is_open and (self._now or self._take()):
            try:
                self._now = self._now[os.write(self.fd, self._now) :]
            except BlockingIOError:
                return
            except OSError:  # nobody reads any more
                self.is_open = False
        if not self.is_open:
            self._now = memoryview(b"")
            self._later.clear()
            self._waiting_bytes = 0

    def _take(self) -> bool:
        while self._later:
            first = self._later[0]
            if isinstance(first, bytes):
                self._later.popleft()
                self._waiting_bytes -= len(first)
                data: bytes | None = first
            elif (data := next(first, None)) is None:
                self._later.popleft()
            if data:
                self._now = memoryview(data)
                return True
        return False

    def close(self) -> None:
        """Close the descriptor; what waits is dropped."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self.is_open = -1, False
        self.flush()


def pieces_of(fd: int, **fields: Any) -> Iterator[Frame]:
    """Yield the content of a file or of memory as frames, whose `op` is "piece".

    Args:
        fd: Its descriptor; it stays open until the last piece.
        **fields: Those of each frame.
    """
    size, at = os.fstat(fd).st_size, 0
    while at < size:
        data = os.pread(fd, min(_PIECE, size - at), at)
        at += len(data)
        yield Frame("piece", fields, data)


def read_some(fd: int) -> bytes | None:
    """Return what can be read now, b"" for nothing yet, None at the end of the stream.

    Args:
        fd: A descriptor that does not block.
    """
    try:
        return os.read(fd, _READ_AT_ONCE) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None
