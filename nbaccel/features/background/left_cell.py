"""The way of a cell with `--bg`: its run begins, and the cell ends. Runs in the kernel."""

from __future__ import annotations

from dataclasses import replace

from nbaccel.display.run_view import PanelSink
from nbaccel.features.background.background_run import CellPlace, CellScreen, why_not_in_the_background
from nbaccel.notebook.cell_plan import CellPlan
from nbaccel.notebook.session import Session

__all__ = ["leave", "place_in_the_cell"]

_MAY_HAVE_CHANGED = "ranks of a second start would see a notebook that has changed since; without --bg"


def leave(session: Session, plan: CellPlan) -> bool:
    """Start the run of a cell and let the cell end; return False, after a line that says why, if it has to wait."""
    if why := why_not_in_the_background(plan.plan.start.method, session.shell, session.survey().platform):
        session.say(f"--bg: {why}, so this cell waits for its run")
        return False
    place = place_in_the_cell(session)
    plan = replace(plan, spec=replace(plan.spec, no_restart=_MAY_HAVE_CHANGED))
    shown = session.show(plan, place.frames, place.screen)
    shown.write_heading()
    run = session.begin(plan, shown)
    session.background.begin(run, lambda: session.conclude(run), plan.host, [session.rank_memory], place.beside)
    return True


def place_in_the_cell(session: Session) -> CellPlace:
    """Return where a run in the background is shown: in the cell that runs now, also after its end."""
    screen, drawn = CellScreen(session.shell.kernel), session.views.drawn()
    if drawn is None:
        return CellPlace(screen, PanelSink(), [])
    button = drawn.button_between_cells(session.shell, "Stop: %accelerate stop")
    return CellPlace(screen, button, [button])
