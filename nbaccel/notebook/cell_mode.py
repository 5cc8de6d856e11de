"""CellMode: what becomes of a cell, as its flags say. Runs in the kernel.

`run_cell` has the mode plan the cell and then run it, and knows no mode by name. A cell without a flag for another
mode runs in ranks, see `InRanks`; the other modes are features, found by their flags.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

from nbaccel.display.run_view import PanelSink
from nbaccel.features import feature, mode_flag
from nbaccel.notebook.cell_plan import AskedCell, CellPlan
from nbaccel.notebook.cell_run import interrupts_in_one_line
from nbaccel.notebook.session import Session
from nbaccel.options.run_options import RunOptions

__all__ = ["CellMode", "run_cell"]


class CellMode(Protocol):
    """A way to run a cell."""

    def plan(self, session: Session, cell: AskedCell) -> Any:
        """Decide everything, refuse what cannot work, and print the notes before a run. Nothing is started.

        Args:
            session: The notebook's session.
            cell: The cell and its flags.

        Returns:
            Anything that `run` needs.

        Raises:
            LaunchRefused, UsageError, SyntaxError: The cell cannot run like this. The message says what to do instead.
        """

    def run(self, session: Session, plan: Any) -> Any:
        """Run a plan and show it.

        Args:
            session: The notebook's session.
            plan: What `plan` returned.

        Returns:
            The value of the cell.
        """


class InRanks:
    """Runs a cell in ranks: while the notebook waits, in the background, or, without processes, in the kernel."""

    def plan(self, session: Session, cell: AskedCell) -> CellPlan:
        return session.plan(cell)

    def run(self, session: Session, plan: CellPlan) -> Any:
        """Run the cell's body, bring its results back, and return the value of its last expression.

        Raises:
            The error of the first rank that failed; KeyboardInterrupt, TimeoutError: the run was stopped;
            ResultsMissing: It ended well, but a name of `--out` did not come. Values that came are in the notebook.
        """
        start = plan.plan.start
        if plan.plan.options.bg and feature("%%accelerate --bg")(session, plan):
            return None
        if start.method == "inline":
            from nbaccel.notebook.inline_cell import run_in_the_kernel  # few cells run there

            shown = session.show(plan, PanelSink())
            return run_in_the_kernel(plan, shown, session.launcher.remember, session.say)
        with session.views.steered(session.shell, is_plain=bool(plan.plan.options.plain)) as (frames, beside):
            run = session.begin(plan, session.show(plan, frames))
            is_freed = plan.plan.options.free_kernel
            freed = session.movable(plan.plan).freed(session.say) if is_freed else nullcontext()
            try:
                with interrupts_in_one_line(), freed:
                    run.go(plan.host, listeners=[session.rank_memory], beside=beside)
            finally:
                if run.is_over:  # also after an interrupt while models were moved back, raised after this
                    value = session.conclude_and_show(run)
            return value


def run_cell(session: Session, asked: RunOptions, body: str, typed: str = "") -> Any:
    """Run a cell as its flags say; return the value of its last expression, if it has one in this mode.

    Args:
        typed: The flags as they were typed.

    Raises:
        LaunchRefused, UsageError, SyntaxError: Nothing was started.
        FeatureMissing: A flag belongs to a feature that is not there; nothing was started.
        What the mode raises, see `InRanks.run`.
    """
    with interrupts_in_one_line():
        flag = mode_flag(asked)
        mode: CellMode = InRanks() if flag is None else feature(flag)()
        plan = mode.plan(session, AskedCell(asked, body, typed))
    return mode.run(session, plan)
