"""Progress of one rank in one phase, its speed, and the time that is left. Pure; runs in the kernel.

A rank reports every loop over a prepared loader separately. `Course` combines the reports: the training, whose position
stays while an evaluation runs inside of it, the evaluation, and the times of both. `Pace` is the present speed. The
caller passes the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from nbaccel.base.events import Loss, Progress

__all__ = [
    "Bar",
    "Course",
    "Left",
    "Pace",
    "StepCount",
]

_UNHEARD_S = 3.0
"""Seconds without a report after which a loop counts as ended. A running loop reports several times per second."""
_MOST_OVERTAKEN = 2


def _place(progress: Progress) -> float | None:
    """Return the number of epochs done, with the part of the present one: 1.5; None if their length is unknown."""
    if not progress.batches:
        return None
    place = progress.epoch + min(1.0, progress.batch / progress.batches)
    return min(place, float(progress.epochs)) if progress.epochs else place


@dataclass(frozen=True, slots=True)
class Left:
    """Time that a training still takes.

    Args:
        of_epoch: The number of epochs is unknown, and this is the time left in the present one.
        is_least: An evaluation of unknown length is running, so this is a lower bound.
    """

    seconds: float
    of_epoch: bool = False
    is_least: bool = False


class StepCount:
    """Optimizer steps that one rank has done since it began to report.

    The steps of a persistent rank, or of one that resumed, do not begin at 0; those of a second trainer begin at 0
    again.

    Example:
        >>> count = StepCount()
        >>> count.take(Progress(step=70, first=64))
        >>> count.done
        6
    """

    __slots__ = ("_before", "_by_losses", "_newest", "_trains", "first")

    def __init__(self) -> None:
        self.first: int | None = None
        self._newest = 0
        self._before = 0
        self._by_losses = 0
        self._trains = False

    def take(self, event: Progress) -> None:
        if self.first is None or not self._trains:
            self.first = event.first if self.first is None else min(self.first, event.first)
        elif event.step < self._newest:  # another Accelerator or trainer, which counts by itself
            self._before += self._newest - self.first
            self.first = event.first
        self._newest = event.step
        self._trains |= event.is_training and not event.is_guess

    def take_loss(self, event: Loss) -> None:
        """Count a backward; this is the only count in a program whose loops report nothing."""
        if self.first is None:
            self.first = event.step
        self._by_losses = max(self._by_losses, event.step + 1)

    def resume(self) -> None:
        """Forget reports of loops that were passed over up to a checkpoint's place; they have not trained."""
        if not (self._trains or self._by_losses):
            self.first, self._newest = None, 0

    @property
    def done(self) -> int:
        newest = self._newest if self._trains else max(self._newest, self._by_losses)
        return self._before + max(0, newest - (self.first or 0))


class _Outermost:
    """Separates the reports of the outermost running loop from those of loops inside of it.

    It also ignores an iterator that the program holds but no longer uses: such a loop reports the same batch for ever.
    """

    __slots__ = ("_batches", "_heard_s", "_moves", "_overtaken", "loop")

    def __init__(self) -> None:
        self.loop: float | None = None  # the time at which it began
        self._batches: dict[float, int] = {}  # of the running loops, by the time at which they began
        self._moves = False
        self._overtaken = 0  # other loops that ended since this one handed out a batch
        self._heard_s = 0.0

    def is_about_it(self, at_s: float, event: Progress) -> bool:
        """Return whether `event`, reported at `at_s`, is about this loop, or about one that takes its place."""
        before = self._batches.get(event.began)
        moves = before is not None and event.batch > before
        if event.is_over:
            self._batches.pop(event.began, None)
        else:
            self._batches[event.began] = event.batch
        if event.began == self.loop:
            self._moves |= moves
            self._overtaken = 0 if moves else self._overtaken
        elif self.loop is None and (before is None or moves):
            self._moves, self._overtaken = moves, 0
        elif moves and (not self._moves or self._overtaken >= _MOST_OVERTAKEN or at_s - self._heard_s > _UNHEARD_S):
            self._moves, self._overtaken = True, 0
        else:
            self._overtaken += event.is_over
            return False
        self._heard_s = at_s
        self.loop = None if event.is_over else event.began
        return True

    def forget(self, began: float) -> None:
        """Remove the loop that began at `began`: it was taken for one of these by mistake."""
        self._batches.pop(began, None)
        self.loop = None if self.loop == began else self.loop


@dataclass(slots=True)
class _Evaluation:
    """One running evaluation.

    Args:
        began_s: Its beginning.
        heard_s: The time of `newest`, the latest report.  Both in seconds since the run began.
    """

    began_s: float
    heard_s: float
    newest: Progress

    @property
    def seconds(self) -> float:
        return max(0.0, self.heard_s - self.began_s)

    @property
    def left_s(self) -> float | None:
        """Return the time left, from the batches so far, of which the latest counts half; None if that is unknown."""
        newest = self.newest
        if not newest.batches or not newest.batch:
            return None
        done = newest.batch - 0.5
        return self.seconds * max(0.0, newest.batches - done) / done


class Course:
    """Reports of one rank in one phase.

    Attributes:
        training: The newest report of the outermost loop that trains; None before the first.
        guess: The same for a loop that may turn out to train, while nothing else is known.
        trainings: Number of trainings; a new one begins where the announced epochs or the steps begin again.
        passes: Number of loops over a loader that trained.
        said_at: When `training` was reported, in seconds since the run began.
        pace: Steps, and epochs, per second of training, evaluations excluded.
    """

    def __init__(self) -> None:
        self.training: Progress | None = None
        self.guess: Progress | None = None
        self.trainings = 0
        self.passes = 0
        self.said_at = 0.0
        self.pace = Pace()
        self._trains = _Outermost()
        self._evaluates = _Outermost()
        self._evaluation: _Evaluation | None = None
        self._ended = 0.0  # the time at which the evaluation that ended last had begun
        self._away_s = 0.0  # in evaluations, since the phase began
        self._began_at = 0.0  # the epoch in which the present training began
        self._evaluated_s = 0.0  # in evaluations of the present training
        self._evaluated_at = 0.0  # number of epochs that were done at the latest of these

    # --- feeding -----------------------------------------------------------------------------------------------

    def take(self, at_s: float, event: Progress, began_s: float | None = None) -> None:
        """Take the `event` that a loop reported at `at_s`.

        Args:
            began_s: The time at which the loop began, if known.  Both in seconds since the run began.
        """
        if event.is_guess:
            self.guess = event if self.training is None and self._evaluation is None else None
            return
        self.guess = None
        if event.is_training:
            self._train(at_s, event)
        else:
            self._evaluate(at_s, event, at_s if began_s is None else began_s)

    def _train(self, at_s: float, event: Progress) -> None:
        evaluation, before = self._evaluation, self.training
        if evaluation is not None and evaluation.newest.began == event.began != 0.0:
            self._evaluates.forget(event.began)
            self._evaluation = evaluation = None  # it was no evaluation: its steps are further apart than its batches
        if not self._trains.is_about_it(at_s, event):
            return
        if evaluation is not None and at_s - evaluation.heard_s > _UNHEARD_S:
            self._evaluates.forget(evaluation.newest.began)
            self._end(evaluation)
            evaluation = None
        if before is None or event.step < before.step or event.epoch < before.epoch:
            self._evaluated_s = self._evaluated_at = 0.0
            self._began_at = float(event.epoch)
            if before is None or event.step < before.step or event.epochs:
                self.trainings += 1
        if before is None or event.began != before.began or event.epoch != before.epoch:
            self.passes += 1
        self.training, self.said_at = event, at_s
        away_s = self._away_s + (0.0 if evaluation is None else at_s - evaluation.began_s)
        self.pace.add(at_s - away_s, event.step, _place(event))

    def _evaluate(self, at_s: float, event: Progress, began_s: float) -> None:
        if (event.began and event.began <= self._ended) or not self._evaluates.is_about_it(at_s, event):
            return
        current = self._evaluation
        if current is not None and current.newest.began != event.began:
            self._end(current)
            current = None
        if current is None:
            current = self._evaluation = _Evaluation(began_s, at_s, event)
        current.heard_s, current.newest = at_s, event
        if event.is_over:
            self._end(current)

    def _end(self, evaluation: _Evaluation) -> None:
        self._evaluation = None
        self._ended = evaluation.newest.began
        self._away_s += evaluation.seconds
        place = None if self.training is None else _place(self.training)
        if place is not None and place > self._began_at:
            self._evaluated_s += evaluation.seconds
            self._evaluated_at = place

    # --- reading -----------------------------------------------------------------------------------------------

    @property
    def evaluation(self) -> Progress | None:
        """Return the newest report of the running evaluation; None if there is none."""
        return None if self._evaluation is None else self._evaluation.newest

    @property
    def epoch_s(self) -> float | None:
        """Return the seconds of training that an epoch takes at the present pace; None if that is unknown."""
        return self.pace.seconds_for(1.0)

    @property
    def left(self) -> Left | None:
        """Return the time left; None if it is unknown.

        It is the sum of the rest of the training at its pace, the rest of the running evaluation, and the evaluations
        to come, if they take as long as the earlier ones.
        """
        evaluation, training = self._evaluation, self.training
        present_s = 0.0 if evaluation is None else evaluation.left_s
        if training is None:
            return None if evaluation is None or not present_s else Left(present_s)
        place = _place(training)
        if place is None:
            return None
        end = float(training.epochs or training.epoch + 1)
        if training.is_over and not training.epochs:
            end = place
        training_s = self.pace.seconds_for(end - place)
        if training_s is None:
            return None
        to_come_s = self._evaluations_s(place, 0.0 if present_s is None else present_s, end)
        return Left(training_s + (present_s or 0.0) + to_come_s, not training.epochs, present_s is None)

    def _evaluations_s(self, place: float, present_s: float, end: float) -> float:
        """Return the seconds that the evaluations to come take."""
        seconds, last = self._evaluated_s, self._evaluated_at
        if self._evaluation is not None and place > self._began_at:
            seconds, last = seconds + self._evaluation.seconds + present_s, place
        if last <= self._began_at:
            return 0.0
        return seconds / (last - self._began_at) * max(0.0, end - last)


class Bar:
    """Fraction of the work that is done, 0 to 1; it never decreases while it stands for the same work.

    The work is all epochs of a training, one epoch if their number is unknown, or an evaluation if nothing is trained.
    `of` names it.

    Attributes:
        value: None if unknown.
        of: "", "this epoch" or "this evaluation".

    Example:
        >>> bar, course = Bar(), Course()
        >>> for batch in (3, 2):
        ...     course.take(0.0, Progress(batch=batch, batches=10, epochs=2))
        ...     bar.follow(course)
        >>> bar.value
        0.15
    """

    __slots__ = ("_key", "of", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        self.of = ""
        self._key: tuple[str, float] = ("", 0)

    def follow(self, course: Course) -> None:
        """Update the bar after `course` took a report."""
        training, evaluation = course.training, course.evaluation
        part: float | None = None
        if training is not None:
            place = _place(training)
            if training.epochs:
                key = ("", float(course.trainings))
                part = None if place is None else place / training.epochs
            else:
                key = ("this epoch", float(course.passes))
                part = None if place is None else place - training.epoch
        elif evaluation is not None:
            key = ("this evaluation", evaluation.began)
            part = min(1.0, evaluation.batch / evaluation.batches) if evaluation.batches else None
        else:
            return
        if key != self._key:
            self._key, self.of, self.value = key, key[0], None
        if part is not None:
            self.value = part if self.value is None else max(self.value, part)


_WINDOW_S = 15.0
_EVERY_S = 0.25

_Sample = tuple[float, int, float | None]


class Pace:
    """Steps and epochs per second, over the last 15 seconds; a step that takes longer is measured alone.

    Example:
        >>> pace = Pace()
        >>> for step in range(11):
        ...     pace.add(at_s=step * 0.5, step=step, place=step / 40)
        >>> pace.steps_per_s, pace.seconds_for(0.75)
        (2.0, 15.0)
    """

    __slots__ = ("_newest", "_samples")

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._newest: _Sample | None = None

    def add(self, at_s: float, step: int, place: float | None = None) -> None:
        """Record that `step` steps and `place` epochs were done at `at_s`.

        If either falls, the measurement starts again.

        Time without a step counts, for example that of a save: it is part of the duration. The caller leaves out times
        that are to be counted separately.
        """
        newest = self._newest
        if newest is not None and (step < newest[1] or (place or 0.0) < (newest[2] or 0.0)):
            self._samples.clear()
        self._newest = (at_s, step, place)
        samples = self._samples
        if samples and at_s - samples[-1][0] < _EVERY_S:
            return
        samples.append(self._newest)
        while len(samples) > 2 and at_s - samples[1][0] > _WINDOW_S:
            samples.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """Return the speed; None until two reports with different steps and times are known."""
        if self._newest is None or not self._samples:
            return None
        seconds = self._newest[0] - self._samples[0][0]
        steps = self._newest[1] - self._samples[0][1]
        return steps / seconds if seconds > 0 and steps > 0 else None

    def seconds_for(self, epochs: float) -> float | None:
        """Return the seconds that `epochs` epochs take at this pace; None while that is unknown."""
        if epochs <= 0:
            return 0.0
        if self._newest is None or not self._samples:
            return None
        (began_s, _, before), (at_s, _, now) = self._samples[0], self._newest
        if before is None or now is None or now <= before or at_s <= began_s:
            return None
        return epochs / (now - before) * (at_s - began_s)
