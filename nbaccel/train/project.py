"""ProjectConfiguration: where a program keeps its checkpoints and logs. Built by the user; pure, opens no file."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Counted", "ProjectConfiguration"]


class Counted(int):
    """A number of a checkpoint that nobody set by hand: the next one where that is taken will do as well."""


@dataclass(slots=True)
class ProjectConfiguration:
    """Where checkpoints and logs go, and how checkpoints are named. The same fields as Accelerate's.

    project_dir: the project's folder.  logging_dir: where trackers write; by default the project's folder.
    automatic_checkpoint_naming: `save_state()` without a name writes ``<project_dir>/checkpoints/checkpoint_<n>``.
    total_limit: how many of those are kept; the oldest go once a new one is complete. Those of this run count, and
    those that it goes on from after `load_state`: what another run has saved there stays.
    iteration: the number of the next one; it moves on with each save. By default numbers go on behind the newest that
    is there; a number that is set is taken, or refused where it exists.
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
        """Make `project_dir` the project's folder, and that of the logs unless they have one."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
