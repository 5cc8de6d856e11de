"""Records of a dry run: what each rank sees, a JSON object a line. Ranks write them, the kernel reads them.

A record is on the disk when `RankRecords.write` returns, so a rank that hangs, or is killed, leaves all until then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "INODES",
    "NEW_FOLDERS",
    "NONE",
    "NOT_RUN",
    "ORIGINALS",
    "RECORDS",
    "SAVES",
    "RankRecords",
    "inode_of",
    "read_records",
]

RECORDS = "records"
"""Name of the folder of the records."""

SAVES, ORIGINALS = "saves", "originals"
"""Names of folders beside that of the records: for what is saved, and for what is changed."""

NEW_FOLDERS = "new-folders"
"""Name of a file beside them: paths of folders that ranks have made, a line each."""

INODES = "inodes"
"""Name of a file beside them: device and inode of each file that a rank was about to change, and its path."""

NONE = "there was none"
"""Target of the link that stands for the original of a file which a rank has made."""

NOT_RUN = "not_run"
"""Kind of the records of lines that were not run, since they cannot be undone."""


def inode_of(known: os.stat_result) -> str:
    """Return device and number of a file, as `INODES` has them."""
    return f"{known.st_dev}:{known.st_ino}"


class RankRecords:
    """The file in which a rank records what it sees; several parts of a rank may append to it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = _path(folder, rank)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; "kind" says what it is about."""
        line = json.dumps(record, default=_plain) + "\n"
        # Opened each time, for a few hundred records: the descriptor of a file may be closed by the user's program.
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)


def read_records(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the records of a rank, oldest first; of a line that was cut off by its end, nothing."""
    try:
        text = _path(folder, rank).read_text()
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def _plain(value: Any) -> Any:
    """Return a number of another library as Python's, and anything else as text."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "size", 1) == 1 else str(value)
