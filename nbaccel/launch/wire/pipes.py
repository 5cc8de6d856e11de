"""MarkedPipe: one output pipe of a rank, read as bytes with marks where rich messages belong. Runs in the kernel."""

from __future__ import annotations

import os

__all__ = ["MarkedPipe"]

_CHUNK = 1 << 18


class MarkedPipe:
    """The reading end of a rank's stdout or stderr.

    A rich message is sent by the rank's channel; in the pipe the rank leaves a mark (`worker.mark`), so that text and
    displays are shown in the order in which the rank produced them.
    """

    def __init__(self, fd: int, rank: int, stream: str, nonce: str) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.rank = rank
        self.stream = stream
        self.is_open = True
        self.was_empty = False
        self._opening = f"\x1e{nonce}:".encode()
        self._rest = b""

    def read(self) -> list[bytes | int] | None:
        """Return what has arrived: pieces of output and numbers of messages, in order; None at the stream's end."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            self.was_empty = True
            return []
        self.was_empty = False
        if not data:
            rest, self._rest = self._rest, b""
            return [rest] if rest else None
        return self._split(self._rest + data)

    def close(self) -> None:
        self.is_open = False
        os.close(self.fd)

    def _split(self, data: bytes) -> list[bytes | int]:
        pieces: list[bytes | int] = []
        while (at := data.find(self._opening)) >= 0:
            end = data.find(b"\x1e", at + len(self._opening))
            if end < 0:
                break
            if at:
                pieces.append(data[:at])
            pieces.append(int(data[at + len(self._opening) : end]))
            data = data[end + 1 :]
        keep = self._unfinished(data)
        self._rest = data[len(data) - keep :]
        if len(data) > keep:
            pieces.append(data[: len(data) - keep])
        return pieces

    def _unfinished(self, data: bytes) -> int:
        """Return the number of bytes at the end that may be the beginning of a mark."""
        at = data.rfind(b"\x1e")
        if at < 0:
            return 0
        tail = data[at:]
        is_mark = self._opening.startswith(tail[: len(self._opening)]) or tail.startswith(self._opening)
        return len(tail) if is_mark else 0
