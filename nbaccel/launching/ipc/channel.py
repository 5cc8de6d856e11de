"""Channel between the kernel and one of its processes, and the output pipes of a rank. Both sides use it.

A `Channel` passes frames over an inherited socketpair. A frame is JSON with descriptors beside it; large objects are
sent as the descriptor of a memfd. There is no address, so no other process can connect, and this module unpickles
nothing that arrives. A `MarkedPipe`, in the kernel, reads one output pipe as bytes, with marks where rich messages
belong.

Reasons: docs/design/security.md
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = [
    "PIPE_BYTES",
    "PROMPT",
    "Channel",
    "Frame",
    "MarkedPipe",
]

Frame = tuple[dict[str, Any], list[int]]

_HEAD = struct.Struct("!II")  # bytes of JSON, descriptors
_MAX_FDS = 64
_CHUNK = 1 << 18
_RIGHTS_BYTES = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
# Numbers: to combine the flags of `socket` takes longer than to read. macOS lacks one, and has no ranks.
_AT_ONCE, _CLOSES_ON_EXEC = int(socket.MSG_DONTWAIT), int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


class Channel:
    """One end of the socketpair.

    Example:
        >>> here, there = Channel.pair()
        >>> here.send({"op": "hello"})
        >>> there.receive()
        ({'op': 'hello'}, [])
        >>> here.close(); there.close()
    """

    def __init__(self, connection: socket.SocketType) -> None:
        connection.settimeout(None)  # not the program's: `socket.setdefaulttimeout` is for its own connections
        self._socket = connection
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._sending = threading.Lock()
        self.is_open = True

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        mine, theirs = socket.socketpair()
        return cls(mine), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        return cls(socket.SocketType(fileno=fd))  # the class in C: Python's copies 20 pages of the kernel's in a rank

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.is_open = False
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one frame; block while the other side is slow.

        Raises:
            BrokenPipeError: The other side is gone.
        """
        body = json.dumps(message).encode()
        data = memoryview(_HEAD.pack(len(body), len(fds)) + body)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._sending:
            if (sent := self._socket.sendmsg([data], rights)) < len(data):
                self._socket.sendall(data[sent:])

    def receive(self, timeout_s: float | None = None) -> Frame | None:
        """Wait for the next frame; None when the other side is gone.

        Raises:
            TimeoutError: Nothing more came for `timeout_s` seconds.
        """
        while (frame := self._next()) is None:
            if timeout_s is not None and not select.select([self._socket], [], [], timeout_s)[0]:
                raise TimeoutError(f"nothing came for {timeout_s:.0f} s")
            if not self._read(0):
                return None
        return frame

    def drain(self) -> Iterator[Frame]:
        """Yield every frame that has arrived, without waiting; `is_open` becomes False at the end of the stream."""
        while self._read(_AT_ONCE):
            pass
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        if len(self._buffer) < _HEAD.size:
            return None
        size, count = _HEAD.unpack_from(self._buffer)
        if len(self._buffer) < _HEAD.size + size:
            return None
        message = json.loads(self._buffer[_HEAD.size : _HEAD.size + size].decode())
        del self._buffer[: _HEAD.size + size]
        return message, [self._fds.popleft() for _ in range(count)]

    def _read(self, flags: int) -> bool:
        """Read available data into the buffer; return False when there is none, or never will be."""
        if not self.is_open:
            return False
        try:
            data, rights, _, _ = self._socket.recvmsg(_CHUNK, _RIGHTS_BYTES, flags | _CLOSES_ON_EXEC)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data, rights = b"", []
        for level, kind, payload in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)
        if not data:
            self.is_open = False
            return False
        self._buffer += data
        return True


PROMPT = "prompt"
"""The kind of a message that is a question, {"kind", "prompt"}.

It has a place among the lines as a picture does, and the rank waits for its answer.
"""


PIPE_BYTES = 1 << 20
"""What a rank's output pipe holds, where the system allows it."""
_READ_AT_ONCE = 1 << 18


class MarkedPipe:
    """The reading end of a rank's stdout or stderr.

    A rich message is sent by the rank's channel; in the pipe the rank leaves a mark (`worker.mark`), so that text and
    displays are shown in the order in which the rank produced them. What Python prints to stderr comes through the pipe
    of stdout for the same reason, between two marks that name the streams.
    """

    def __init__(self, fd: int, rank: int, stream: str, nonce: str) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.rank = rank
        self.stream = stream
        self.is_open = True
        self.was_empty = False
        self.nbytes = 0  # read so far
        self._opening = f"\x1e{nonce}:".encode()
        self._rest = b""

    def read(self) -> list[tuple[str, bytes] | int] | None:
        """Return what has arrived, in order; None at the stream's end.

        Returns:
            Pieces of output with the name of their stream, and numbers of messages.
        """
        try:
            data = os.read(self.fd, _READ_AT_ONCE)
        except BlockingIOError:
            self.was_empty = True
            return []
        self.was_empty = False
        self.nbytes += len(data)
        if not data:
            rest, self._rest = self._rest, b""
            return [(self.stream, rest)] if rest else None
        return self._split(self._rest + data)

    def close(self) -> None:
        self.is_open = False
        os.close(self.fd)

    def _split(self, data: bytes) -> list[tuple[str, bytes] | int]:
        pieces: list[tuple[str, bytes] | int] = []
        while (at := data.find(self._opening)) >= 0:
            end = data.find(b"\x1e", at + len(self._opening))
            if end < 0:
                break
            if at:
                pieces.append((self.stream, data[:at]))
            marked = data[at + len(self._opening) : end].decode()
            if marked.isdecimal():
                pieces.append(int(marked))
            else:
                self.stream = marked
            data = data[end + 1 :]
        keep = self._unfinished(data)
        self._rest = data[len(data) - keep :]
        if len(data) > keep:
            pieces.append((self.stream, data[: len(data) - keep]))
        return pieces

    def _unfinished(self, data: bytes) -> int:
        """Return the number of bytes at the end that may be the beginning of a mark."""
        at = data.rfind(b"\x1e")
        if at < 0:
            return 0
        tail = data[at:]
        is_mark = self._opening.startswith(tail[: len(self._opening)]) or tail.startswith(self._opening)
        return len(tail) if is_mark else 0
