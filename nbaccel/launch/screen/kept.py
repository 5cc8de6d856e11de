"""What finished runs leave in the notebook: one picture, and their numbers in words. Runs in the kernel."""

from __future__ import annotations

from typing import Any

from nbaccel.view.board import Board
from nbaccel.view.figure import ANY_GROUND, draw, picture
from nbaccel.view.panel import Panel
from nbaccel.view.state import State
from nbaccel.view.sweep import draw_runs
from nbaccel.view.text import text

__all__ = ["kept", "kept_of_several"]

Bundle = tuple[dict[str, Any], dict[str, Any]]


def kept(panel: Panel, seconds: float, state: State) -> Bundle:
    """Data and metadata by MIME type: a PNG where there are curves, else the panel.

    No HTML beside the PNG: viewers that show HTML first and then strip its style and pictures (GitHub, a notebook that
    is not trusted) would show neither.
    """
    history, facts = panel.history, panel.facts
    if not history.has_curves:
        return dict(panel.bundle(seconds, state)), {}
    title = ", ".join(filter(None, [f"{facts.title}: {state.sentence}", facts.setting]))
    return picture(draw(history, facts, title=title, ground=ANY_GROUND), text(history, facts, seconds, state)).bundle()


def kept_of_several(board: Board) -> Bundle:
    """The same of all runs of a place: a PNG that compares them where any has a curve, else their table."""
    bundle = board.bundle()
    if not any(row.curve for row in board.rows):
        return dict(bundle), {}
    return picture(draw_runs(board), bundle["text/plain"]).bundle()
