"""CheckpointPolicy: when a training saves automatically, where, and what it resumes. Pure; opens no file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nbaccel.intervals import Period, Steps, parse_interval
from nbaccel.settings import CHECKPOINT_DIR, RunSettings

__all__ = ["CheckpointPolicy"]

_KEPT = 3


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """The user's choices; by default nothing is saved automatically.

    every: when to save.  folder: where checkpoints go.  keep: how many of them.
    resume: the checkpoint, or the folder of checkpoints, to continue from; None to start from the beginning.

    >>> CheckpointPolicy.of(RunSettings(checkpoint_every="10min")).keep
    3
    """

    every: Steps | Period | None
    folder: Path
    keep: int
    resume: Path | None

    @classmethod
    def of(cls, settings: RunSettings) -> CheckpointPolicy:
        """Return the policy that `settings` describe.

        Raises:
            ValueError: a value is not valid.
        """
        folder = Path(settings.checkpoint_dir or CHECKPOINT_DIR).expanduser()
        keep = _KEPT if settings.keep is None else settings.keep
        if keep < 1:
            raise ValueError(f"keep must be at least 1 (checkpoints to keep), got {keep}")
        every = None if settings.checkpoint_every is None else parse_interval(settings.checkpoint_every)
        resume = None if settings.resume is None else Path(settings.resume or folder).expanduser()
        return cls(every, folder, keep, resume)
