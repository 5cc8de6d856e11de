"""Give all ranks of a dry run the same decision, through small files in a folder that they share. Used in ranks; pure.

Rank 0 decides and does not wait. The others wait for its decision for some seconds, and then take a default, since
rank 0 may never come: a pass of one rank alone must not hang. Whoever writes a decision first has taken it for all,
also for a rank 0 that comes late, so that ranks never differ. A second run that finds the files takes the same.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["SharedDecisions"]

_PATIENCE_S = 10.0
_POLL_S = 0.005


class SharedDecisions:
    """Decisions of the ranks of one dry run.

    Args:
        folder: An empty one, that all ranks see.
        patience_s: For how long the others wait for rank 0.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, patience_s: float = _PATIENCE_S) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._patience_s = patience_s

    def take(self, name: str, decide: Callable[[], Any], default: Any) -> Any:
        """Return the decision of that name, a value of JSON.

        Args:
            decide: Rank 0's; it is not called in others.
            default: For all ranks, where rank 0 has not come in time.
        """
        is_alone = self._world_size == 1
        path = self._folder / (f"{name}-{self._rank}.json" if is_alone else f"{name}.json")
        if self._rank == 0 or is_alone:
            return self._taken(path, default) if path.exists() else self._write(path, decide())
        until = time.monotonic() + self._patience_s
        while not path.exists():
            if time.monotonic() > until:
                return self._write(path, default)
            time.sleep(_POLL_S)
        return self._taken(path, default)

    def _write(self, path: Path, value: Any) -> Any:
        """Write a decision unless there is one; return the one that is there."""
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(value), encoding="utf-8")
        with suppress(FileExistsError):
            os.link(beside, path)  # complete at once, and an error if another rank was first
        beside.unlink()
        return self._taken(path, value)

    def _taken(self, path: Path, default: Any) -> Any:
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except OSError:  # the folder is gone: the run is being ended
            return default
