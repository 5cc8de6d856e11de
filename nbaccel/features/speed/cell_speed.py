"""CellSpeed: runs the trials of a cell with `--speed` and shows the report as it grows. Runs in the kernel.

The notebook is only read: its history, for the statements to paste.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import Any

from nbaccel.base.hardware import Survey
from nbaccel.errors import LaunchRefused
from nbaccel.features.check.dry_run_ranks import interrupted
from nbaccel.features.speed.candidates import Machine
from nbaccel.features.speed.pasted_lines import NotebookCells, PastedLine, lines_to_paste
from nbaccel.features.speed.speed import SpeedSearch
from nbaccel.features.speed.speed_comparison import SpeedComparison, SpeedRow
from nbaccel.features.speed.speed_report import SpeedReport
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.output.screens import JupyterScreen

__all__ = ["CellSpeed"]

_CELL = re.compile(r"Cell In\[(\d+)\]")


class CellSpeed:
    """The search for faster settings of one cell.

    task: the cell as it would run.  setup: see `Session`.  say: prints a line of the project.
    """

    def __init__(
        self,
        shell: Any,
        launcher: Launcher,
        plan: LaunchPlan,
        task: CellTask,
        setup: str | None,
        survey: Survey,
        say: Callable[[str], None],
    ) -> None:
        self._shell = shell
        self._screen = JupyterScreen(shell)
        self._source = task.source
        self._display_id = f"nbaccel-speed-{uuid.uuid4().hex}"
        self._has_shown = False
        self._trials = SpeedSearch(
            launcher, plan, task, setup, plan.options.speed or 0.0, machine_of(plan, survey), say, self._show_trial
        )

    def run(self) -> SpeedReport:
        """Run the trials, and return the report, which has been shown.

        Raises:
            LaunchRefused: nothing was started, or the cell has no training that could be measured.
            KeyboardInterrupt: it was interrupted; the report of the trials until then has been shown.
            The cell's own error, if it fails as it is.
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
        return SpeedReport(self._trials.found, advised, lines, remarks=(*remarks, *changed))

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
    """Return what the ranks of a plan have."""
    ranks, gpus = plan.devices.num_processes, plan.devices.gpus
    capability = min((gpu.compute_capability for gpu in gpus), default=None)
    return Machine(ranks, max(1, survey.cpu_count // ranks), plan.threads, capability)


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
