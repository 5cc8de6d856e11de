"""`--speed`: trials of what makes a cell faster. A mode of `%%accelerate`; runs in the kernel."""

from __future__ import annotations

from nbaccel.features.check.cell_mode import plan_of_discarded_ranks
from nbaccel.features.speed.cell_speed import CellSpeed
from nbaccel.notebook.cell_plan import AskedCell, CellPlan
from nbaccel.notebook.cell_run import interrupts_in_one_line
from nbaccel.notebook.session import Session

__all__ = ["SpeedMode"]


class SpeedMode:
    """Tries which changes make a cell faster, and shows the lines to paste; the notebook stays as it is."""

    def plan(self, session: Session, cell: AskedCell) -> CellPlan:
        return plan_of_discarded_ranks(session, cell, "a trial")

    def run(self, session: Session, plan: CellPlan) -> None:
        """Measure.

        Raises: see `CellSpeed.run`.
        """
        with interrupts_in_one_line():
            CellSpeed(session.shell, session.launcher, plan.plan, plan.task, session.setup, session.survey()).run()
