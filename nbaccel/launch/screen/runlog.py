"""Run log: every line of every rank in one file. Runs in the kernel; the screen may leave lines out, the log does not.

Its work is per chunk, not per line: it has to keep up with a rank that prints 100 MB. The caller opens and closes the
file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

__all__ = ["RunLog"]

_LONGEST_PARTIAL = 64 * 1024


class RunLog:
    """Writes whole lines, prefixed ``[rank 1] ``; after an error in writing the log ends, and the run goes on.

    file: None logs nothing.
    """

    def __init__(self, file: BinaryIO | None) -> None:
        self._file = file
        self._partial: defaultdict[tuple[int, str], bytearray] = defaultdict(bytearray)
        self._trouble = ""

    @property
    def path(self) -> str:
        """Return the path of the log; empty if there is none."""
        name = getattr(self._file, "name", None)
        return name if isinstance(name, str) else ""

    def write(self, rank: int, stream: str, data: bytes) -> None:
        head, newline, tail = data.rpartition(b"\n")
        partial = self._partial[rank, stream]
        if newline:
            self._write_lines(rank, bytes(partial) + head)
            partial.clear()
        partial += tail
        if len(partial) > _LONGEST_PARTIAL:  # progress bars: megabytes may come without a newline
            self._write_lines(rank, bytes(partial))
            partial.clear()

    def remark(self, rank: int, text: str) -> None:
        """Write a line of the project about output that is no text."""
        self._write_lines(rank, f"({text})".encode())

    def finish(self, rank: int) -> None:
        """Complete a last line without newline."""
        for (of_rank, _), partial in self._partial.items():
            if of_rank == rank and partial:
                self._write_lines(rank, bytes(partial))
                partial.clear()

    def flush(self) -> None:
        if self._file is not None:
            with self._giving_up():
                self._file.flush()

    def take_trouble(self) -> str:
        """Return the error that ended the log, once; empty if there is none."""
        trouble, self._trouble = self._trouble, ""
        return trouble

    def _write_lines(self, rank: int, lines: bytes) -> None:
        if self._file is not None:
            prefix = b"[rank %d] " % rank
            with self._giving_up():
                self._file.write(prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n")

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """End the log, not the run, on an error such as a full disk."""
        try:
            yield
        except OSError as error:
            self._file, self._trouble = None, str(error)
