"""Planner: searches for the largest batch that fits on every rank. Runs on all ranks in lock step.

Ranks try the same sizes, each without waiting for another, and exchange the results after every trial. Their decisions
follow from the results alone, so they are equal on all ranks. A rank whose program fails reports that to the others
before it raises.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch

from nbaccel.errors import PeerFailed
from nbaccel.train.planning.found import Found, Size
from nbaccel.train.planning.plan import TOLERANCE, Plan, Trial
from nbaccel.train.planning.rehearsal import Outcome, Rehearsal
from nbaccel.train.talk.collectives import Collectives

__all__ = ["find_batch_size"]

_CALL = "find_batch_size"

_TEXT_CHARACTERS = 160
"""Limit for the text of an error or a device in a `_Report`, which has to fit into half a kilobyte."""


@dataclass(frozen=True, slots=True)
class _Report:
    """Report of one rank to the others.

    fits, used, needed_bytes, limit_bytes, source, complaint: of an `Outcome`.
    error: a mistake of the program, which ends the search.
    known: the size that an earlier search has found; 0 for none.
    """

    fits: bool = True
    used: float | None = None
    needed_bytes: int | None = None
    limit_bytes: int | None = None
    source: str = ""
    complaint: str = ""
    error: str = ""
    known: int = 0

    @classmethod
    def of(cls, outcome: Outcome) -> _Report:
        return cls(**asdict(outcome) | {"complaint": _short(outcome.complaint)})


def find_batch_size(rehearsal: Rehearsal, cap: int, collectives: Collectives, found: Found) -> int:
    """Return the largest size, at most `cap`, whose steps have run on every rank. Collective.

    collectives: of the ranks that must agree. found: results of earlier searches; this one is added.

    Raises:
        torch.OutOfMemoryError: not one sample fits; on every rank, with the numbers of the rank that needs most.
        PeerFailed: another rank's program failed in a trial. On that rank: its own error.
    """
    with ExitStack() as stack:
        return _Planner(rehearsal, collectives, found, stack).find(cap)


class _Planner:
    def __init__(self, rehearsal: Rehearsal, collectives: Collectives, found: Found, stack: ExitStack) -> None:
        """stack: closes what is opened for the search."""
        self._rehearsal = rehearsal
        self._collectives = collectives
        self._found = found
        self._stack = stack
        self._reports: Sequence[_Report] = ()  # of the last trial, by rank

    def find(self, cap: int) -> int:
        known = self._known(cap)
        if known is not None and self._is_confirmed(known):
            return known.size
        plan = Plan(cap)
        while (size := plan.next_size()) is not None:
            plan.note(self._try(size))
        if not plan.best:
            raise self._nothing_fits()
        best = next(trial for trial in plan.trials if trial.fits and trial.size == plan.best)
        self._found.put(self._rehearsal.signature, Size(best.size, best.used))
        return best.size

    def _known(self, cap: int) -> Size | None:
        """Return what every rank knows from an earlier search. Opens the rehearsal."""
        reports = self._together(f"reading examples for up to {cap} samples", self._open)
        known = self._found.get(self._rehearsal.signature)
        if known is None or known.size > cap or any(report.known != known.size for report in reports):
            return None
        return known

    def _open(self) -> _Report:
        self._stack.enter_context(self._rehearsal)
        known = self._found.get(self._rehearsal.signature)
        return _Report(known=0 if known is None else known.size)

    def _is_confirmed(self, known: Size) -> bool:
        """Return whether the size still fits, and takes the share of memory that it took then."""
        trial = self._try(known.size)
        if trial.used is None or known.used is None:
            return trial.fits
        return trial.fits and abs(trial.used - known.used) <= TOLERANCE

    def _try(self, size: int) -> Trial:
        """Run one trial on every rank. It fits if it fits everywhere; the rank with the least free memory decides."""
        reports = self._together(f"trying {_samples(size)}", lambda: _Report.of(self._rehearsal.run(size)))
        self._reports = reports
        shares = [report.used for report in reports if report.used is not None]
        fits = all(report.fits for report in reports)
        return Trial(size, fits, max(shares) if fits and len(shares) == len(reports) else None)

    def _together(self, doing: str, act: Callable[[], _Report]) -> Sequence[_Report]:
        """Return what `act` reports on each rank, by rank. An error is raised after every rank has received it."""
        error: Exception | None = None
        try:
            report = act()
        except Exception as raised:
            raised.add_note(f"This happened in {_CALL}, {doing}.")
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
            "with less state, or frozen layers need less memory."
        )


def _short(text: str) -> str:
    """Return the beginning of the first line, in ASCII, so that its length in bytes is known."""
    return text.partition("\n")[0].encode("ascii", "replace").decode()[:_TEXT_CHARACTERS]


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count} samples"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
