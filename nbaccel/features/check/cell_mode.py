"""`--check`: a dry run of a cell. A mode of `%%accelerate`; runs in the kernel."""

from __future__ import annotations

from nbaccel.errors import CheckFailed, LaunchRefused
from nbaccel.features.check.check import CellCheck
from nbaccel.notebook.cell_plan import AskedCell, CellPlan
from nbaccel.notebook.cell_run import interrupts_in_one_line
from nbaccel.notebook.session import Session
from nbaccel.output.screens import JupyterScreen

__all__ = ["CheckMode", "plan_of_discarded_ranks"]


class CheckMode:
    """Tries a cell in a dry run, and shows what that says of the whole run; the notebook stays as it is."""

    def plan(self, session: Session, cell: AskedCell) -> CellPlan:
        return plan_of_discarded_ranks(session, cell, "a check")

    def run(self, session: Session, plan: CellPlan) -> None:
        """Try the cell, and show the report.

        Raises:
            KeyboardInterrupt: It was interrupted.
            CheckFailed: With `--strict`, if the cell would not end well.
        """
        with interrupts_in_one_line():
            platform = session.survey().platform
            report = CellCheck(session.launcher, plan.plan, plan.task, session.setup, platform).run()
        JupyterScreen(session.shell).publish({"kind": "display", "data": report.bundle()})
        if report.has_red and plan.plan.options.strict:
            raise CheckFailed(f"the check of {plan.source.name} found what would not end well: see its red lines.")


def plan_of_discarded_ranks(session: Session, cell: AskedCell, what: str) -> CellPlan:
    """Return the plan of a cell whose ranks are discarded.

    Args:
        what: The purpose, for messages.

    Raises:
        LaunchRefused: Ranks stay in this notebook, or no process can be started.
    """
    if session.has_ranks:
        raise LaunchRefused(f"ranks stay in this notebook, and {what} needs its own: %accelerate stop ends them.")
    plan = session.plan(cell)
    if plan.heading:
        session.say(plan.heading)
    if plan.plan.start.method == "inline":
        raise LaunchRefused(
            f"{what} needs processes that it can throw away, and here none can start: {plan.plan.start.reason}."
        )
    return plan
