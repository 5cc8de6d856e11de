"""A cell with `--speed`: trials of the real cell with one change each, beside the cell as it is. Runs in the kernel.

Each trial runs the cell from its first line, in ranks that are discarded, until its training was measured for some
seconds. The cell as it is is tried again and again in between, so that a machine whose speed drifts does not decide.
First every change gets a trial; those that seem to help get more; then the best of each kind are tried together.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from nbaccel.base.settings import STOP
from nbaccel.features.check.dry_run.rank_records import read_records
from nbaccel.features.check.dry_run_ranks import PREFIX, DryRunRanks, unseen
from nbaccel.features.check.findings import error_of, unrun_lines
from nbaccel.features.speed.candidates import Machine, candidates, refinements
from nbaccel.features.speed.changes import SpeedChange
from nbaccel.features.speed.speed_comparison import SpeedComparison, SpeedRow, SpeedTrial
from nbaccel.features.speed.trial_task import TrialTask
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.run import Run
from nbaccel.launching.tasks.cell_task import CellTask

__all__ = ["SpeedSearch"]

_SEEMS = 1.03
"""Ratio from which on a change gets more trials."""

_FIRST_S, _LEAST_S, _MOST_S = 1.0, 0.5, 3.0
"""Seconds that are measured: in the first trial, and at least and at most in others."""

_MORE_SLOWLY = 3.0
"""How much longer than the cell as it is a trial may take; plus `_COMPILING_S`."""

_COMPILING_S = 20.0

_GROWS = 1.1
"""Ratio to the next smaller batch from which on a still larger one is tried."""

_MOST_REPEATS = 3
"""How often rows are tried once more that may be faster."""

_WORTH_A_CHANGE = 1.2
"""How much faster a change of the training has to be than the best that leaves it as it is."""

_ENOUGH = 0.95
"""Share of the best speed of a family that a smaller change of it needs to be taken instead."""


class SpeedSearch:
    """The trials of one cell.

    Args:
        task: The cell as it would run.
        setup: See `Session`.
        budget_s: For all trials.
        changed: Called with the comparison after each trial, and what is tried next.
    """

    def __init__(
        self,
        launcher: Launcher,
        plan: LaunchPlan,
        task: CellTask,
        setup: str | None,
        budget_s: float,
        machine: Machine,
        changed: Callable[[SpeedComparison, str], None] = lambda comparison, following: None,
    ) -> None:
        self._launcher = launcher
        self._plan = plan
        self._cell = task
        self._setup = setup
        self._budget_s = budget_s
        self._machine = machine
        self._changed = changed
        self._wanted_s = _FIRST_S
        self._ends_at = 0.0
        self._number = 0  # of the last trial
        self._changed_files: dict[str, None] = {}
        self._not_run: dict[str, None] = {}
        self._compiled = ""  # the folder of what compilers have made, which later trials need not make again
        self.found = SpeedComparison()

    # --- the order of trials

    def run(self) -> None:
        """Try all changes; `found` has what is known at any time.

        Raises:
            LaunchRefused: Nothing was started.
            KeyboardInterrupt: It was interrupted.
            The cell's own error, if it fails as it is.
        """
        try:
            self._search()
        finally:
            if self._compiled:
                shutil.rmtree(self._compiled, ignore_errors=True)
                self._launcher.resources.guard(f"-{self._compiled}")

    def _search(self) -> None:
        self._ends_at = time.monotonic() + self._budget_s
        found = self.found
        self._try(found.base)
        if not found.base.speeds:
            return
        precision = self._plan.settings.mixed_precision or "no"
        found.rows = candidates(found.facts, self._machine, precision, found.has_samples)
        self._choose_time(len(found.rows))
        self._try(found.base)
        self._screen(found.rows)
        self._repeat([row for row in found.rows if self._seems_faster(row)])
        if (best := self._best("workers")) is not None:
            further = refinements(found.facts, best)
            found.rows[found.rows.index(best) + 1 : found.rows.index(best) + 1] = further
            self._screen(further)
            self._repeat([row for row in further if found.ratio(row) > found.ratio(best) * _SEEMS])
        self._try_together()
        self._settle()

    def _settle(self) -> None:
        """Use the time that is left for rows that may be faster."""
        for _ in range(_MOST_REPEATS):
            rows = [row for row in self.found.rows if self.found.is_open(row) and self.found.numbers(row) != "no"]
            self._repeat(rows)

    def _choose_time(self, rows: int) -> None:
        """Choose the seconds of a trial so that each row gets two, and the cell as it is as many as half of them."""
        trials = 3 * rows + 6
        left = self._ends_at - time.monotonic()
        outside = max(0.0, self.found.base.trials[0].seconds - _FIRST_S)
        self._wanted_s = min(_MOST_S, max(_LEAST_S, left / trials - outside))

    def _screen(self, rows: Sequence[SpeedRow]) -> None:
        """Give each row a trial, and the cell as it is one after every second."""
        for number, row in enumerate(rows):
            if self._is_beyond_growth(row):
                row.note = "not tried: the next smaller one is no faster"
            if row.note:
                continue
            self._try(row)
            if number % 2:
                self._try(self.found.base)

    def _is_beyond_growth(self, row: SpeedRow) -> bool:
        """Return whether a batch size is not worth a trial, since one half as large has not gained."""
        factor = row.change.batch_factor
        smaller = [each for each in self.found.rows if 1 < each.change.batch_factor < factor]
        if factor <= 2 or not smaller:
            return False
        ratios = [1.0, *map(self.found.ratio, smaller)]
        return ratios[-1] < ratios[-2] * _GROWS

    def _repeat(self, rows: Sequence[SpeedRow]) -> None:
        """Give rows another trial, each beside the cell as it is; the fastest first."""
        for row in sorted(rows, key=lambda row: -self.found.ratio(row)):
            self._try(self.found.base)
            self._try(row)

    def _seems_faster(self, row: SpeedRow) -> bool:
        return bool(row.speeds) and self.found.ratio(row) >= _SEEMS and self.found.numbers(row) != "no"

    def _best(self, family: str) -> SpeedRow | None:
        """Return the fastest row of a family that may be advised, or an earlier one that is nearly as fast."""
        rows = [row for row in self.found.rows if row.family == family and self.found.may_be_advised(row)]
        fastest = max(map(self.found.ratio, rows), default=0.0)
        return next((row for row in rows if self.found.ratio(row) >= _ENOUGH * fastest), None)

    def _try_together(self) -> None:
        """Try the best of all families together: those that leave the training as it is, and then a batch size too."""
        best = self._best_of_families()
        alone = [row for row in best if not self.found.changes_training(row)]
        together = [alone] if len(alone) > 1 else []
        if len(best) > len(alone) > 0:
            together.append(best)
        for rows in together:
            change = SpeedChange()
            for row in rows:
                change = change.with_(row.change)
            if change in [row.change for row in self.found.rows]:
                continue
            found = SpeedRow(change, "together")
            self.found.rows.append(found)
            for _ in range(2):
                self._try(self.found.base)
                self._try(found)

    def _best_of_families(self) -> list[SpeedRow]:
        families = dict.fromkeys(row.family for row in self.found.rows)
        return [row for family in families if (row := self._best(family)) is not None]

    def advised(self) -> SpeedRow | None:
        """Return the row whose lines are to be pasted: the fastest one; None if nothing helps.

        One that changes the training has to be faster by `_WORTH_A_CHANGE` than the others.
        """
        rows = [*self._best_of_families(), *(row for row in self.found.rows if row.family == "together")]
        rows = [row for row in rows if self.found.may_be_advised(row)]
        alike = max((row for row in rows if not self.found.changes_training(row)), key=self.found.ratio, default=None)
        other = max((row for row in rows if self.found.changes_training(row)), key=self.found.ratio, default=None)
        if alike is None or other is None:
            return alike or other
        return other if self.found.ratio(other) > _WORTH_A_CHANGE * self.found.ratio(alike) else alike

    @property
    def changed_files(self) -> list[str]:
        """Return the files that trials have changed."""
        return list(self._changed_files)

    @property
    def not_run(self) -> list[str]:
        """Return a sentence for each line that trials did not run, since they cannot undo it."""
        return list(self._not_run)

    # --- one trial

    def _try(self, row: SpeedRow) -> None:
        """Give a row a trial, if there is time for one."""
        base = self.found.base.trials
        left_s = self._ends_at - time.monotonic()
        if base and (row.trials or base)[-1].seconds > left_s:
            return
        if row.trials and not row.speeds:  # it has failed
            return
        self._changed(self.found, str(row.change))
        self._number += 1
        began = time.monotonic()
        try:
            trial = self._trial(row.change, self._longest_s(left_s))
        except TimeoutError:
            is_late = time.monotonic() >= self._ends_at - 1.0
            trial = SpeedTrial(seconds=time.monotonic() - began, why_not="no time left" if is_late else "too slow")
        row.trials.append(replace(trial, at=self._number))
        self._changed(self.found, "")

    def _longest_s(self, left_s: float) -> float:
        """Return the time after which a trial is given up."""
        base = self.found.base.trials
        return min(left_s, _MORE_SLOWLY * base[0].seconds + _COMPILING_S) if base else left_s

    def _trial(self, change: SpeedChange, limit_s: float) -> SpeedTrial:
        """Run a trial.

        Raises:
            TimeoutError: It has taken `limit_s`.
        """
        cell, is_first = self._cell, not self.found.base.trials
        if change.compiles and not self._compiled:
            self._compiled = os.path.realpath(tempfile.mkdtemp(prefix=PREFIX))
            self._launcher.resources.guard(self._compiled)
        with DryRunRanks.start(self._launcher) as place:
            task = TrialTask(
                cell.source,
                cell.namespace,
                (),
                cell.extra,
                folder=str(place.records),
                change=change,
                wanted_s=self._wanted_s,
                compiled=self._compiled if change.compiles else "",
            )
            plan = self._machine.one_rank(self._plan) if change.ranks else self._plan
            spec = replace(place.spec(plan, task, cell, self._setup), oom=STOP).ending(timeout_s=limit_s)
            if change.precision:
                settings = replace(spec.settings, mixed_precision=change.precision, raw_precision=change.precision)
                spec = replace(spec, settings=settings)
            began = time.monotonic()
            run, ended = self._launcher.run(spec, unseen(self._plan, cell.source.name))
            try:
                seconds = time.monotonic() - began
                ranks = range(len(ended.reports))
                records = [read_records(place.records, rank) for rank in ranks]
            finally:
                ended.close()
                self._changed_files |= dict.fromkeys(place.changed_files())
        not_run = [line.said(cell.source.name, "a trial") for line in unrun_lines(records)]
        self._not_run |= dict.fromkeys(not_run)
        if ended.is_interrupted:
            raise KeyboardInterrupt
        if ended.is_timed_out:
            raise TimeoutError
        if run.error is not None:
            if is_first:
                for line in not_run:
                    run.error.add_note(line)
                raise run.error
            return SpeedTrial(seconds=seconds, why_not=_why_not(run, ended))
        trials = [record for rank in records for record in rank if record["kind"] == "trial"]
        return SpeedTrial.of(trials, seconds) if trials else SpeedTrial(seconds=seconds, why_not="no optimizer stepped")


def _why_not(run: Run, ended: RankResults) -> str:
    """Return why a trial has failed, in a few words."""
    error = error_of(run, ended)
    if error is None:
        return "failed"
    if error.is_memory:
        return "out of memory"
    if "InvalidCxxCompiler" in error.text or "compiler" in error.text.lower():
        return "no compiler"
    return error.text if len(error.text) <= 60 else f"{error.text[:59]}…"
