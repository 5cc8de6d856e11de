"""Output that finished runs leave in the notebook: one picture, and their numbers in words. Runs in the kernel."""

from __future__ import annotations

from collections.abc import Sequence

from nbaccel.view.board import Board
from nbaccel.view.figure import ANY_GROUND, draw, picture
from nbaccel.view.history import History
from nbaccel.view.panel import Panel
from nbaccel.view.picture import Bundle, Picture
from nbaccel.view.state import Facts, State
from nbaccel.view.sweep import draw_runs
from nbaccel.view.text import text

__all__ = ["kept", "kept_of_several", "shown_of"]


def shown_of(panel: Panel, seconds: float, state: State) -> Bundle:
    """Return data and metadata by MIME type: a PNG if there are curves, else the panel.

    There is no HTML beside the PNG: viewers that prefer HTML and then strip its style and pictures (GitHub, a notebook
    that is not trusted) would show neither.
    """
    history, facts = panel.history, panel.facts
    if not history.has_curves:
        return dict(panel.bundle(seconds, state)), {}
    return kept(history, facts, seconds, state).bundle()


def kept(history: History, facts: Facts, seconds: float, state: State, names: Sequence[str] | None = None) -> Picture:
    """Return the picture of a run that is over.

    names: the curves to draw; None for those that were chosen for the run.
    """
    title = ", ".join(filter(None, [f"{facts.title}: {state.sentence}", facts.setting]))
    figure = draw(history, facts, names=names, title=title, ground=ANY_GROUND)
    return picture(figure, text(history, facts, seconds, state))


def kept_of_several(board: Board) -> Bundle:
    """Return the output of all runs of a place: a PNG that compares them if any has a curve, else their table."""
    bundle = board.bundle()
    if not any(row.curve for row in board.rows):
        return dict(bundle), {}
    return picture(draw_runs(board), bundle["text/plain"]).bundle()
