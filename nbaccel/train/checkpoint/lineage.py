"""Lineage: records which run has written a checkpoint, and which runs it continues. Runs in ranks; opens no file.

A run counts, replaces and deletes only checkpoints of its own and of the runs that it continues, up to the checkpoint
that it has loaded. It does not touch what another run has saved in the same folder: neither what the same program
saved when it was started before, nor what another continuation of the same checkpoint saves.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from nbaccel.train.checkpoint.manifest import Manifest

__all__ = ["Lineage"]


def _new_name() -> str:
    return secrets.token_hex(6)


@dataclass(slots=True)
class Lineage:
    """One run of a program, and the runs that it continues.

    run: its name. Before the ranks have agreed on one, each has a name of its own.
    ancestors: the names of those runs, the latest last, each with the time when the checkpoint that was continued was
    saved, in seconds since 1970.
    is_agreed: every rank has this name.
    turns: how often the run went back to an earlier step, equally on all ranks: it repeats steps then.
    """

    run: str = field(default_factory=_new_name)
    ancestors: Mapping[str, float] = field(default_factory=dict)
    is_agreed: bool = False
    turns: int = 0

    def agree(self, run: str) -> None:
        """Take the name on which all ranks agree."""
        self.run, self.is_agreed = run, True

    def follow(self, loaded: Manifest | None) -> None:
        """Continue from a checkpoint.  loaded: its manifest; None for a folder of Accelerate's, which names no run."""
        self.turns += 1
        if loaded is None:
            self.ancestors = {}
        elif loaded.run != self.run:  # otherwise the run went back to an earlier checkpoint of its own
            parent = {loaded.run: loaded.saved_at} if loaded.run else {}
            self.ancestors = {**loaded.ancestors, **parent}

    def holds(self, saved: Manifest) -> bool:
        """Return whether the checkpoint with this manifest is of this run, or one that led to it.

        >>> first = Manifest("step 1", 1, 0, 0, 1, run="a", saved_at=10.0)
        >>> later = Manifest("step 2", 2, 0, 0, 1, run="a", saved_at=20.0)
        >>> lineage = Lineage("b")
        >>> lineage.follow(first)
        >>> lineage.holds(first), lineage.holds(later)
        (True, False)
        """
        if saved.run == self.run:
            return True
        until = self.ancestors.get(saved.run)
        return until is not None and saved.saved_at <= until
