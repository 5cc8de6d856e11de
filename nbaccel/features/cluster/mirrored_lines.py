"""MirroredLines: a list that ranks of all nodes keep together, a file of the run on each node. Runs in agents.

On one machine the ranks append lines to one file, and read those of the others. Here each node has a file of its own,
and the agents pass the lines on: a line is on the other nodes some milliseconds later.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

__all__ = ["MirroredLines"]


class MirroredLines:
    """The file of one node.

    Args:
        path: The file; it need not exist.

    Example:
        >>> import tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "lines")
        >>> lines = MirroredLines(path)
        >>> lines.add(b"of another node\\n")
        >>> with open(path, "ab") as file: _ = file.write(b"own\\n")
        >>> lines.news()
        b'own\\n'
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._read = 0
        self._added: deque[tuple[int, int]] = deque()  # where lines of other nodes stand

    def add(self, lines: bytes) -> None:
        """Append lines of other nodes.

        Args:
            lines: Whole lines.
        """
        with open(self._path, "ab") as file:
            file.write(lines)
            file.flush()
            end = file.tell()  # where this write ended: ranks append meanwhile
        self._added.append((end - len(lines), end))

    def news(self) -> bytes:
        """Return the whole lines that ranks of this node have appended since the last call."""
        found = b""
        with suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._read)
            data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            start, self._read = self._read, self._read + len(data)
            found = _without(data, start, sorted(self._added))
            self._added = deque(each for each in self._added if each[1] > self._read)
        return found


def _without(data: bytes, start: int, parts: list[tuple[int, int]]) -> bytes:
    """Return `data`, which begins at `start` of a file, without parts of the file."""
    kept, at = b"", start
    for begin, end in parts:
        if begin >= start + len(data):
            break
        kept += data[max(at, start) - start : max(begin, start) - start]
        at = max(at, end)
    return kept + data[max(at, start) - start :]
