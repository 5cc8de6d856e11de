"""CellSpeed: runs the trials of a cell with `--speed` and shows the report as it grows. Runs in the kernel.

The notebook is only read: its history, for the statements to paste.
"""

from __future__ import annotations

import html
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import rate
from nbaccel.errors import LaunchRefused
from nbaccel.features.check.dry_run_ranks import interrupted
from nbaccel.features.speed.candidates import Machine
from nbaccel.features.speed.pasted_lines import NotebookCells, PastedLine, lines_to_paste
from nbaccel.features.speed.speed import SpeedSearch
from nbaccel.features.speed.speed_comparison import SpeedComparison, SpeedRow
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.output.screens import JupyterScreen

__all__ = ["CellSpeed", "SpeedReport"]


_HEAD = ("change", "speed", "x", "numbers equal")
_CODE = "white-space:pre-wrap;font-family:var(--jp-code-font-family,monospace)"
_NOTHING, _NOTHING_SURE = "nothing helps", "nothing is sure to help"


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """The report.

    Args:
        comparison: Of all rows.
        advised: The row whose lines are to be pasted; None if nothing helps.
        lines: These lines.
        now: What is tried at present; empty at the end.
        remarks: What else there is to say, a line each.
    """

    comparison: SpeedComparison
    advised: SpeedRow | None = None
    lines: Sequence[PastedLine] = ()
    now: str = ""
    remarks: Sequence[str] = ()

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, without its head; rows without a speed come last."""
        found = self.comparison
        rows = sorted(found.rows, key=lambda row: (not row.speeds, -found.ratio(row)))
        return [self._row(row) for row in (found.base, *rows) if row.trials or row.note or not self.now]

    def _row(self, row: SpeedRow) -> tuple[str, ...]:
        found = self.comparison
        if not row.speeds:
            return str(row.change), row.why_not, "", ""
        # Each ratio is to the cell as it is just before and after: the table shows it as a speed of today's base.
        per_s = found.rate(row) if row is found.base else found.rate(found.base) * found.ratio(row)
        speed = rate(per_s, "samples" if found.has_samples else "steps")
        if row is found.base:
            noise = f" (+-{found.noise:.0%})" if len(row.speeds) > 1 else ""
            return str(row.change), f"{speed}{noise}", "1.00", ""
        return str(row.change), speed, f"{found.ratio(row):.2f}", found.numbers(row)

    def below(self) -> list[str]:
        """Return the lines below the table."""
        lines = [f"trying: {self.now}"] if self.now else []
        if not self.now and self.comparison.base.speeds:
            if self.advised is None:
                lines.append(_NOTHING if not self._undecided() else _NOTHING_SURE)
            else:
                lines.append(f"{self.advised.change}: {self.comparison.ratio(self.advised):.2f} x as fast, by")
                lines += [f"  {line}" for line in self.lines]
            if undecided := self._undecided():
                lines.append(f"too few trials to decide about: {'; '.join(undecided)}")
        return [*lines, *self.remarks]

    def _undecided(self) -> list[str]:
        """Return the changes that had too little time; beside one that is advised, those without a trial."""
        found = self.comparison
        rows = [row for row in found.rows if found.is_undecided(row) and found.numbers(row) != "no"]
        return [str(row.change) for row in rows if self.advised is None or not row.trials]

    def __str__(self) -> str:
        table = [_HEAD, *self.rows()]
        widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([*lines, *self.below()])

    def _repr_html_(self) -> str:
        tags = ["th", *["td"] * len(self.rows())]
        rows = "".join(
            f"<tr{_weight(self._is_advised(row))}>"
            + "".join(f'<{tag} style="text-align:left">{html.escape(cell)}</{tag}>' for cell in row)
            + "</tr>"
            for tag, row in zip(tags, [_HEAD, *self.rows()], strict=True)
        )
        below = "".join(f'<div style="{_CODE}">{html.escape(line)}</div>' for line in self.below())
        return f'<div style="font-size:13px"><table>{rows}</table>{below}</div>'

    def _is_advised(self, row: tuple[str, ...]) -> bool:
        return self.advised is not None and row[0] == str(self.advised.change)

    def bundle(self) -> dict[str, str]:
        """Return the report as a notebook shows it."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}


def _weight(is_bold: bool) -> str:
    return ' style="font-weight:600"' if is_bold else ""


_CELL = re.compile(r"Cell In\[(\d+)\]")


class CellSpeed:
    """The search for faster settings of one cell.

    Args:
        task: The cell as it would run.
        setup: See `Session`.
    """

    def __init__(
        self,
        shell: Any,
        launcher: Launcher,
        plan: LaunchPlan,
        task: CellTask,
        setup: str | None,
        survey: Survey,
    ) -> None:
        self._shell = shell
        self._screen = JupyterScreen(shell)
        self._source = task.source
        self._display_id = f"nbaccel-speed-{uuid.uuid4().hex}"
        self._has_shown = False
        self._trials = SpeedSearch(
            launcher, plan, task, setup, plan.options.speed or 0.0, machine_of(plan, survey), self._show_trial
        )

    def run(self) -> SpeedReport:
        """Run the trials, and return the report, which has been shown.

        Raises:
            LaunchRefused: Nothing was started, or the cell has no training that could be measured.
            KeyboardInterrupt: It was interrupted; the report of the trials until then has been shown. The cell's own
                error, if it fails as it is.
        """
        try:
            self._trials.run()
        except KeyboardInterrupt:
            if self._trials.found.base.speeds:
                self._show(self._report(("interrupted",)))
            raise interrupted("the trials were", self._trials.changed_files) from None
        finally:
            if self._has_shown and not self._trials.found.base.speeds:
                self._show(SpeedReport(self._trials.found))  # nothing is being tried any more
        if not self._trials.found.base.speeds:
            raise LaunchRefused(
                f"--speed: the training of {self._source.name} could not be measured "
                f"({self._trials.found.base.why_not}). It needs ten steps or more of an optimizer of torch, soon "
                "after the beginning of the cell: put the loading of data and models into a cell before."
            )
        report = self._report(())
        self._show(report)
        return report

    def _report(self, remarks: tuple[str, ...]) -> SpeedReport:
        advised = self._trials.advised()
        changed = [f"changed by these trials: {path}" for path in self._trials.changed_files]
        lines = [] if advised is None else self._lines(advised)
        return SpeedReport(self._trials.found, advised, lines, remarks=(*remarks, *self._trials.not_run, *changed))

    def _lines(self, advised: SpeedRow) -> list[PastedLine]:
        cells = cells_of(self._shell, self._source)
        return lines_to_paste(advised.change, self._trials.found.facts, cells)

    def _show_trial(self, found: SpeedComparison, following: str) -> None:
        # Elsewhere each state would be printed below the last.
        if following and getattr(self._shell, "kernel", None) is not None:
            self._show(SpeedReport(found, now=following))

    def _show(self, report: SpeedReport) -> None:
        kind = "update" if self._has_shown else "display"
        self._has_shown = True
        self._screen.publish({"kind": kind, "data": report.bundle(), "display_id": self._display_id})


def machine_of(plan: LaunchPlan, survey: Survey) -> Machine:
    """Return the processors, threads and GPUs that one rank of a plan has."""
    ranks, gpus = plan.devices.num_processes, plan.devices.gpus
    capability = min((gpu.compute_capability for gpu in gpus), default=None)
    return Machine(ranks, survey.cpu_count, plan.threads, capability)


def cells_of(shell: Any, source: CellSource) -> NotebookCells:
    """Return the cells of the notebook, with the running one as it is compiled."""
    match = _CELL.fullmatch(source.name)
    running = int(match[1]) if match else 0
    typed = shell.history_manager.input_hist_raw
    texts = {number: str(text) for number, text in enumerate(typed) if 0 < number < running}
    return NotebookCells({**texts, running: source.code}, running, lambda file: _number_of(shell, file))


def _number_of(shell: Any, file: str) -> int | None:
    """Return the number of the cell that a file name stands for; None for another file."""
    match = _CELL.fullmatch(file)
    if match is None:
        name = getattr(shell.compile, "format_code_name", lambda file: None)(file)
        match = None if name is None else re.search(r"\[(\d+)\]", " ".join(map(str, name)))
    return int(match[1]) if match else None
