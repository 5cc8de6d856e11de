"""ProjectConfiguration: the folders of a program's checkpoints and logs. Built by the user; pure, opens no file."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Counted", "ProjectConfiguration"]


class Counted(int):
    """A checkpoint number that was not set by hand: if it is taken, the next one will do as well."""


@dataclass(slots=True)
class ProjectConfiguration:
    """Folders of checkpoints and logs, and the names of checkpoints. The same fields as Accelerate's.

    project_dir: the project's folder.  logging_dir: where trackers write; by default the project's folder.
    automatic_checkpoint_naming: `save_state()` without a name writes ``<project_dir>/checkpoints/checkpoint_<n>``.
    total_limit: how many of those are kept; the oldest are deleted once a new one is complete. Those of this run count,
    and those that it continues after `load_state`; what another run has saved there stays.
    iteration: the number of the next one; each save increases it. By default numbers continue after the newest existing
    one; a number that is set is used, or refused where it exists.
    save_on_each_node: the first rank of each node writes, for nodes without a common file system.

    Not frozen: programs written for Accelerate set `iteration` to continue a numbering.

    >>> ProjectConfiguration("runs/1", automatic_checkpoint_naming=True).logging_dir
    'runs/1'
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = Counted(0)
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(f"total_limit must be at least 1 (checkpoints to keep), got {self.total_limit}")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Make `project_dir` the project's folder, and the logs' folder unless one is set."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
