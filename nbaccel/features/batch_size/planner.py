"""Planner: searches for the largest batch that fits on every rank. Runs on all ranks in lock step.

Ranks try the same sizes, each without waiting for another, and exchange the results after every trial. Their decisions
follow from the results alone, so they are equal on all ranks. A rank whose program fails reports that to the others
before it raises.

Where every forward is a collective (a sharded model), trials themselves run in lock step, and a rank that ran out of
memory would leave the others in a gather. There each size is one that the last trial shows to fit.

Plan: chooses the next batch size to try, and when to stop. Pure arithmetic; runs nothing, knows no memory or ranks.

Memory of a training step is a straight line over the batch size, ``used(n) = a + b * n``, with steps and a little
noise on top. Two tiny trials show the line, the third jumps close to the size where it reaches 1, and each further
one corrects. A size that was not run is never the result.

Parts: finds how much of one batch fits at a time, for the micro-batches of `forward_backward`. Runs in ranks.

Each rank searches for itself and waits for no other: micro-batches may differ between ranks. Errors here are left to
the step itself, which reports them to the peers.

BatchSizePlanner: the part behind `Accelerator.find_batch_size`. Runs in ranks, on all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.base.values import frozen
from nbaccel.errors import NotPrepared, PeerFailed
from nbaccel.features.batch_size.examples import Examples, examples_of
from nbaccel.features.batch_size.size_cache import FoundInFolder, Size, SizeCache
from nbaccel.features.batch_size.trial import TrialResult, TrialRun, TrialSetup
from nbaccel.features.memory.meters import PeakGauge
from nbaccel.train.distributed.collectives import Collectives
from nbaccel.train.oom.microbatch.slicing import Samples
from nbaccel.train.prepare.training_context import TrainingContext
from nbaccel.train.strategies import Strategy

__all__ = [
    "BatchSizePlanner",
    "CarefulSearch",
    "SizeSearch",
    "Trial",
    "find_micro_batch_size",
    "sure_size",
]

_CALL = "find_batch_size"

_TEXT_CHARACTERS = 160
"""Limit for the text of an error or a device in a `_Report`, which has to fit into half a kilobyte."""


@frozen
class _Report:
    """Report of one rank to the others.

    Args:
        fits, used, held, needed_bytes, limit_bytes, source, complaint: Those of a `TrialResult`.
        error: A mistake of the program, which ends the search.
        known: The size that an earlier search has found; 0 for none.
    """

    fits: bool = True
    used: float | None = None
    held: float | None = None
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    source: str = ""
    complaint: str = ""
    error: str = ""
    known: int = 0

    @classmethod
    def of(cls, outcome: TrialResult) -> _Report:
        return cls(**asdict(outcome) | {"complaint": _short(outcome.complaint)})

    @property
    def share(self) -> float:
        """The peak of the whole steps, as a share of the limit; 0 where it could not be measured."""
        return (self.needed_bytes or 0) / self.limit_bytes if self.limit_bytes else 0.0

    def sure_size(self, size: int) -> float:
        """Return `sure_size` of a trial of `size` with this report; 0 where it could not be measured."""
        return 0.0 if self.used is None else sure_size(size, self.used, self.held or 0.0)


def _search_batch_size(trial: TrialRun, cap: int, collectives: Collectives, found: SizeCache) -> int:
    """Return the largest size, at most `cap`, whose steps have run on every rank. Collective.

    Args:
        collectives: The collectives of the ranks that must agree.
        found: Results of earlier searches; this one is added.

    Raises:
        torch.OutOfMemoryError: Not one sample fits; on every rank, with the numbers of the rank that needs most.
        PeerFailed: Another rank's program failed in a trial. On that rank: its own error.
        NotImplementedError: Trials run in lock step, and a rank has no limit; on every rank.
    """
    with ExitStack() as stack:
        return _Planner(trial, collectives, found, stack).find(cap)


class _Planner:
    def __init__(self, trial: TrialRun, collectives: Collectives, found: SizeCache, stack: ExitStack) -> None:
        """Make the object.

        Args:
            stack: Closes what is opened for the search.
        """
        self._trial = trial
        self._collectives = collectives
        self._found = found
        self._stack = stack
        self._reports: Sequence[_Report] = ()  # of the last trial, by rank
        self._is_collective = trial.is_collective

    def find(self, cap: int) -> int:
        known = self._known(cap)
        if known is not None and self._is_confirmed(known):
            return known.size
        plan = CarefulSearch(cap) if self._is_collective else SizeSearch(cap)
        while (size := plan.next_size()) is not None:
            plan.note(trial := self._try(size))
            if self._is_collective and trial.fits and trial.used is None:
                raise NotImplementedError(
                    f"{_CALL}: the model is sharded, so no rank may run out of memory in a trial, and there is no "
                    f"limit to keep to ({self._limits()}). Give one, meter=MemLimit(…) on the CPU for example, or use "
                    "find_executable_batch_size, which tries sizes until one fits"
                )
        if not plan.best:
            raise self._nothing_fits()
        best = next(trial for trial in plan.trials if trial.fits and trial.size == plan.best)
        self._found.put(self._trial.signature, Size(best.size, best.used))
        return best.size

    def _known(self, cap: int) -> Size | None:
        """Return what every rank knows from an earlier search. Opens the trial."""
        reports = self._together(f"reading examples for up to {cap} samples", self._open)
        known = None if self._is_collective else self._found.get(self._trial.signature)
        if known is None or known.size > cap or any(report.known != known.size for report in reports):
            return None
        return known

    def _open(self) -> _Report:
        self._stack.enter_context(self._trial)
        known = self._found.get(self._trial.signature)
        return _Report(known=0 if known is None else known.size)

    def _is_confirmed(self, known: Size) -> bool:
        """Return whether the size still fits, and takes the share of memory that it took then."""
        trial = self._try(known.size)
        if trial.used is None or known.used is None:
            return trial.fits
        return trial.fits and abs(trial.used - known.used) <= TOLERANCE

    def _try(self, size: int) -> Trial:
        """Run one trial on every rank. It fits if it fits everywhere; the rank with the least free memory decides."""
        reports = self._together(f"trying {_samples(size)}", lambda: _Report.of(self._trial.run(size)))
        self._reports = reports
        shares = [report.used for report in reports if report.used is not None]
        fits = all(report.fits for report in reports)
        if not fits or len(shares) < len(reports):
            return Trial(size, fits)
        whole = max(report.share for report in reports)
        return Trial(size, fits, max(shares), whole, min(report.sure_size(size) for report in reports))

    def _together(self, doing: str, act: Callable[[], _Report]) -> Sequence[_Report]:
        """Return what `act` reports on each rank, by rank. An error is raised after every rank has received it.

        In a trial in lock step it is raised at once: the other ranks wait in the step, and not for a report.
        """
        error: Exception | None = None
        try:
            report = act()
        except Exception as raised:
            raised.add_note(f"This happened in {_CALL}, {doing}.")
            if self._is_collective and self._trial.is_running:
                raise
            report, error = _Report(error=_short(f"{type(raised).__name__}: {raised}")), raised
        said = self._collectives.announce(f"{_CALL}: {doing}", json.dumps(asdict(report)))
        reports = [_Report(**json.loads(text)) for text in said]
        if error is not None:
            raise error
        for rank, theirs in enumerate(reports):
            if theirs.error:
                raise PeerFailed(
                    f"rank {rank} failed in {_CALL}, {doing}, and this rank was waiting for it: {theirs.error}. "
                    f"Rank {rank}'s own error says where."
                )
        return reports

    def _limits(self) -> str:
        unknown = (rank for rank, report in enumerate(self._reports) if report.used is None)
        return ", ".join(f"rank {rank}: {self._reports[rank].source}" for rank in unknown)

    def _nothing_fits(self) -> torch.OutOfMemoryError:
        failed = [(report.needed_bytes or 0, rank) for rank, report in enumerate(self._reports) if not report.fits]
        rank = max(failed)[1]
        report = self._reports[rank]
        numbers = ""
        if report.needed_bytes is not None and report.limit_bytes is not None:
            numbers = (
                f": a step with one sample needs at least {_megabytes(report.needed_bytes)}, and the limit is "
                f"{_megabytes(report.limit_bytes)} ({report.source})"
            )
        return torch.OutOfMemoryError(
            f"{_CALL}: not even one sample fits on rank {rank}{numbers}. {report.complaint}\n"
            "  Shorter or smaller samples, accelerator.gradient_checkpointing(model), mixed_precision, an optimizer "
            "with less state, or frozen layers need less memory; accelerator.estimate(model, optimizer) says what "
            "takes how much, and whether strategy='fsdp' would fit."
        )


def _short(text: str) -> str:
    """Return the beginning of the first line, in ASCII, so that its length in bytes is known."""
    return text.partition("\n")[0].encode("ascii", "replace").decode()[:_TEXT_CHARACTERS]


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def _megabytes(count: int) -> str:
    """Format a number of bytes always in megabytes: the two of a sentence are compared."""
    return f"{count / 1e6:,.1f} MB"


FIRST = 2
"""Not 1: batch norm over features refuses a single sample, and kernels for vectors are not those for matrices."""

TOLERANCE = 0.03
"""A size this close to the largest one is good enough: a smaller gain is not worth a trial."""

HEADROOM = 0.985
"""Share of the predicted maximum to aim at: allocators round up, and a trial that fails teaches less."""

LESSON = 0.97
"""Factor of the headroom for each trial that did not fit although the line predicted it."""

LONGEST_JUMP = 16
"""A line through two points is used up to this many times the largest size that was run."""

BLIND_JUMP = 4
"""The jump where there is no line: memory cannot be measured, or has not grown with the batch yet."""

EXACT_BELOW = 64
"""Size below which one sample is more than 1.5 % of the batch: a trial may be spent on the very last sample."""

CAREFUL = 0.8
"""How much of what is left a trial in lock step may be expected to take. The rest is for what grows in steps."""

ENOUGH = 0.95
"""Share of the limit at which such a search ends: allocators round up, and a step that does not fit ends the run."""

DOUBT = 0.9
"""That trial is left out unless the line predicts at least this fraction of one more sample."""

MULTIPLE = 8
"""Sizes that suit matrix units (NVIDIA's guide to mixed precision); used where they cost less than `TOLERANCE`."""

MOST_TRIALS = 12


@frozen
class Trial:
    """Result of one trial.

    Args:
        size: Samples in its batch.
        fits: It ran, within the limit.
        used: The peak of what grows with the batch, as a share of the limit; None where it could not be measured.
        whole: The peak of the whole step, with the optimizer's, likewise; 0 where it is not known.
        sure: A size that fits by `sure_size`; 0 where nothing is known.
    """

    size: int
    fits: bool
    used: float | None = None
    whole: float = 0.0
    sure: float = 0.0


class SizeSearch:
    """Search for the largest size that fits, at most `cap`.

    Its state is `trials`. Everything else follows from them, so ranks that note the same trials choose the same sizes.

    Example:
        >>> plan = SizeSearch(cap=4096)
        >>> while (size := plan.next_size()) is not None:
        ...     plan.note(Trial(size, fits=size <= 1000, used=0.2 + 0.0008 * size))
        >>> plan.best, [trial.size for trial in plan.trials]
        (984, [2, 3, 48, 768, 984])
    """

    def __init__(self, cap: int) -> None:
        """Make the object.

        Args:
            cap: The largest useful size, at least 1.
        """
        if cap < 1:
            raise ValueError(f"cap must be at least 1, got {cap}")
        self.cap = cap
        self.trials: list[Trial] = []
        self._last: int | None = None  # the size of the last trial, once it is chosen

    @property
    def best(self) -> int:
        """The largest size that fitted; 0 before one has."""
        return max((trial.size for trial in self.trials if trial.fits), default=0)

    @property
    def too_large(self) -> int:
        """The smallest size that is known not to fit, or not to be wanted."""
        return min((trial.size for trial in self.trials if not trial.fits), default=self.cap + 1)

    def note(self, trial: Trial) -> None:
        """Add the result of the trial of `next_size`."""
        self.trials.append(trial)

    def next_size(self) -> int | None:
        """Return the next size to try, between `best` and `too_large` exclusive; None when the search is over."""
        best, too_large = self.best, self.too_large
        if too_large - best <= 1 or self._last is not None or len(self.trials) >= MOST_TRIALS:
            return None
        if not best:
            return too_large // 2 if self._has_failed else min(FIRST, self.cap)
        if not self._has_failed and best == FIRST:
            return best + 1
        reach = self._reach()
        if self._is_close_enough(reach):
            self._last = self._last_one(reach)
            return self._last
        return min(max(self._guess(reach), best + 1), too_large - 1)

    @property
    def _has_failed(self) -> bool:
        return any(not trial.fits for trial in self.trials)

    def _reach(self) -> float | None:
        """Return where the line through the measurements reaches the limit; None where there is no rising line."""
        points = sorted((trial.size, trial.used) for trial in self.trials if trial.fits and trial.used is not None)
        if len(points) < 2:
            return None
        size, used = points[-1]
        # The nearest point that is far enough away for noise not to tilt the line, otherwise the farthest one.
        apart = [point for point in points[:-1] if point[0] <= 0.8 * size]
        other_size, other_used = apart[-1] if apart else points[0]
        slope = (used - other_used) / (size - other_size)
        return size + (1 - used) / slope if slope > 0 else None

    def _is_close_enough(self, reach: float | None) -> bool:
        enough = self.best * (1 + TOLERANCE)
        if self._has_failed and self.too_large - 1 <= enough:
            return True
        return reach is not None and min(int(reach), self.cap) <= enough

    def _last_one(self, reach: float | None) -> int | None:
        """Return one trial for the last sample or two, where those are worth it and the line does not decide."""
        best = self.best
        if best >= EXACT_BELOW or (reach is not None and reach < best + DOUBT):
            return None
        return min(max(best + 1, int(reach or 0)), self.too_large - 1)

    def _guess(self, reach: float | None) -> int:
        best, too_large = self.best, self.too_large
        if not self._has_failed:
            if reach is None:
                return best * BLIND_JUMP
            return _rounded(min(HEADROOM * reach, best * LONGEST_JUMP, self.cap), at_least=(1 - TOLERANCE) * reach)
        failures = sum(not trial.fits for trial in self.trials)
        middle = (best + too_large) // 2
        # A line that was wrong is used again only when a later trial has given it a new point.
        if reach is None or not self.trials[-1].fits or not best < reach < too_large:
            return middle
        aim = max(HEADROOM * LESSON**failures * reach, (best + reach) / 2)
        return _rounded(aim, at_least=(1 - TOLERANCE) * reach)


class CarefulSearch(SizeSearch):
    """Search in which no trial is expected to run out of memory, since no rank could be called back from one.

    It follows no line of what grows with the batch: at small sizes gathered parameters hide the batch's memory, and
    such a line is too flat. Each trial takes a size that the last one shows to fit (`sure_size`), so there are more of
    them. What an optimizer's step takes is a line. The search ends at `ENOUGH`, or where a trial would gain little.

    Example:
        >>> plan = CarefulSearch(cap=4096)
        >>> while (size := plan.next_size()) is not None:
        ...     used = 0.2 + 0.0008 * size
        ...     plan.note(Trial(size, size <= 1000, used, sure=sure_size(size, used, held=0.1)))
        >>> plan.best, [trial.size for trial in plan.trials]
        (968, [2, 3, 21, 133, 488, 808, 936, 968])
    """

    def next_size(self) -> int | None:
        best, too_large = self.best, self.too_large
        if len(self.trials) >= MOST_TRIALS or too_large - best <= 1:
            return None
        if not best or (best == FIRST and not self._has_failed):
            return super().next_size()
        last = next(trial for trial in self.trials if trial.fits and trial.size == best)
        if last.used is None or last.used >= ENOUGH:
            return None
        most = min(last.sure, self._by_whole_steps(), best * LONGEST_JUMP, too_large - 1)
        size = _rounded(most, at_least=(1 - TOLERANCE) * most)
        return size if size > best * (1 + TOLERANCE) or size > best < EXACT_BELOW else None

    def _by_whole_steps(self) -> float:
        """Return how far the line of whole steps may be followed."""
        points = sorted((trial.size, trial.whole) for trial in self.trials if trial.fits)
        size, whole = points[-1]
        slope = max((whole - other_whole) / (size - other) for other, other_whole in points[:-1])
        return size + (_aim(whole) - whole) / slope if slope > 0 else float("inf")


def sure_size(size: int, used: float, held: float) -> float:
    """Return a size that takes at most the share `_aim(used)`, by a trial of `size` that took `used` at its peak.

    Args:
        held: The share that was in use before its forward: weights and states. Whatever a step takes beside that is at
            most proportional to the batch.

    Example:
        >>> sure_size(10, used=0.5, held=0.5)
        inf
    """
    return size * (_aim(used) - held) / (used - held) if used > held else float("inf")


def _aim(used: float) -> float:
    """Return the share that the next trial may be expected to take, after one that took `used`."""
    return min(max(used, HEADROOM), used + CAREFUL * (1 - used))


def _rounded(size: float, at_least: float) -> int:
    """Return `size` as a whole number: a multiple of eight, unless that would be less than `at_least`."""
    rounded = int(size) // MULTIPLE * MULTIPLE
    return rounded if rounded >= at_least else int(size)


@frozen
class _Parts(Examples):
    """The first samples of a batch, as micro-batches of it."""

    samples: Samples

    def take(self, size: int) -> Any:
        return self.samples.take(0, size)


def find_micro_batch_size(
    loss_fn: Callable[[Any], Tensor],
    read: Callable[[], Samples],
    models: Sequence[Module],
    optimizers: Sequence[Optimizer],
    strategy: Strategy,
) -> int | None:
    """Return the largest part of a batch whose step fits on this rank; None where its samples cannot be separated.

    Args:
        read: Returns the batch.
    """
    if strategy.forwards_are_collective:  # ranks do not search for themselves where they cannot step by themselves
        return None
    try:
        samples = read()
    except Exception:  # the step will raise it again, on all ranks
        return None
    alone = Collectives()
    try:
        scene = TrialSetup(loss_fn, lambda: _Parts(samples), models, optimizers, strategy, keeps_gradients=True)
        return _search_batch_size(TrialRun(scene), samples.count, alone, SizeCache())
    except Exception:  # likewise; and if memory ran out, the step continues in smaller parts
        return samples.count


class BatchSizePlanner:
    """Searches for the batch size of what one Accelerator has prepared, and keeps the sizes that were found."""

    def __init__(self, context: TrainingContext) -> None:
        self._context = context
        self._found = SizeCache()

    def find(
        self,
        loss_fn: Callable[[Any], Tensor],
        example: Any,
        max_batch_size: int,
        cache: str | os.PathLike[str] | None,
        meter: PeakGauge | None,
    ) -> int:
        """Return the largest batch per rank whose step fits everywhere; see `Accelerator.find_batch_size`. Collective.

        Raises:
            NotPrepared: No model or no optimizer is prepared.
        """
        if not (self._context.prepared.models and self._context.prepared.optimizers):
            kind = "optimizer" if self._context.prepared.models else "model"
            raise NotPrepared(
                f"find_batch_size: no {kind} is prepared, and its memory is part of what has to fit. Before it:\n"
                "    model, optimizer = accelerator.prepare(model, optimizer)"
            )
        for model in self._context.prepared.models:
            self._context.strategy.alone(model)  # refuses what cannot run a trial, before anything is read
        found = self._found
        if cache is not None:
            found = FoundInFolder(cache, is_writer=self._context.world.is_main_process)
        scene = TrialSetup(
            loss_fn,
            lambda: examples_of(example),
            self._context.prepared.models,
            [prepared.optimizer for prepared in self._context.prepared.optimizers],
            self._context.strategy,
            keeps_gradients=self._context.accumulation.steps > 1,
        )
        return _search_batch_size(TrialRun(scene, meter), max_batch_size, self._context.collectives, found)
