"""PhaseRecord: one stretch of a run with curves of its own, such as a fold, or all of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbaccel.events import Progress
from nbaccel.view.pace import Pace
from nbaccel.view.series import Series

__all__ = ["PhaseRecord", "fraction"]

LOSS = "loss"


def fraction(progress: Progress) -> float | None:
    """How much is done, 0 to 1: of all epochs, or of this loop where their number is unknown; None if nobody knows.

    >>> fraction(Progress(batch=5, batches=10, epoch=1, epochs=2)), fraction(Progress(batch=5, batches=10))
    (0.75, 0.5)
    """
    if not progress.batches:
        return None
    part = min(1.0, progress.batch / progress.batches)
    if progress.epochs and progress.is_training:
        return min(1.0, (progress.epoch + part) / progress.epochs)
    return part


@dataclass(slots=True)
class PhaseRecord:
    """What happened in one phase.

    name: as the user called it; empty for a run without phases.  began_s: since the run began.
    loss: what `backward` was given, None until it was.  metrics: what was logged, by name.
    training, evaluation: the newest word of each rank on its loop over a loader.  said_at: when that on training was
        said, since the run began.
    pace: of the leader.  entered: when each rank named this phase, since the run began.
    """

    name: str = ""
    began_s: float = 0.0
    loss: Series | None = None
    metrics: dict[str, Series] = field(default_factory=dict)
    training: dict[int, Progress] = field(default_factory=dict)
    evaluation: dict[int, Progress] = field(default_factory=dict)
    said_at: dict[int, float] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    entered: dict[int, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded yet."""
        return not (self.loss or self.metrics or self.training or self.evaluation)

    @property
    def series(self) -> dict[str, Series]:
        """All curves by name. "loss" is that of every backward, where there is one.

        A logged "loss" then stands beside it as "logged loss", since it may be an average, or that of other data. It is
        left out where it only says the same again.
        """
        if self.loss is None:
            return dict(self.metrics)
        others = dict(self.metrics)
        logged = others.pop(LOSS, None)
        if logged is not None and any(self.loss.last.get(rank) != value for rank, value in logged.last.items()):
            others = {f"logged {LOSS}": logged, **others}
        return {LOSS: self.loss, **others}

    @property
    def leader(self) -> int | None:
        """The lowest rank that trains; it stands for all of them."""
        return min(self.training, default=None)

    @property
    def progress(self) -> Progress | None:
        """Where the run is: in an evaluation that has not ended, else in its training."""
        running = [rank for rank, progress in self.evaluation.items() if not progress.is_over]
        if running:
            return self.evaluation[min(running)]
        return None if self.leader is None else self.training[self.leader]

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank has done, as far as ranks have said."""
        said = [progress.step for progress in self.training.values()]
        logged = [max(series.newest.values()) + 1 for series in self.series.values() if series.newest]
        return min(said) if said else max(logged, default=0)

    def lag(self, rank: int) -> int:
        """Steps by which a rank is ahead of the leader, or behind it, when negative.

        Ranks say where they are at different moments: what the leader does in between is no lag, give or take half of
        it, and one step. While the pace is unknown nothing is said: what is heard first are all steps at once, of one
        rank after the other.
        """
        pace = self.pace.steps_per_s
        if pace is None or self.leader is None or rank not in self.training:
            return 0
        meanwhile = (self.said_at[rank] - self.said_at[self.leader]) * pace
        ahead = self.training[rank].step - self.training[self.leader].step - meanwhile
        return round(ahead) if abs(ahead) > 1 + abs(meanwhile) / 2 else 0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end of training, or of the epoch where the number of epochs is unknown; None if unknown."""
        return self.pace.eta_s

    @property
    def knows_its_end(self) -> bool:
        """Whether `eta_s` is that of the whole phase, not of one epoch."""
        return self.leader is not None and self.training[self.leader].epochs is not None
