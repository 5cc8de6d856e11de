"""What a finished run leaves in the notebook: one picture, and its numbers in words. Runs in the kernel."""

from __future__ import annotations

from typing import Any

from nbaccel.view.figure import draw, picture
from nbaccel.view.history import History
from nbaccel.view.panel import Panel
from nbaccel.view.state import Facts, State
from nbaccel.view.text import text

__all__ = ["kept"]


def kept(history: History, facts: Facts, seconds: float, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
    """Data and metadata by MIME type: a PNG where there are curves, else the panel.

    No HTML beside the PNG: viewers that show HTML first and then strip its style and pictures (GitHub, a notebook that
    is not trusted) would show neither.
    """
    if not history.has_curves:
        return dict(Panel(history, facts).bundle(seconds, state)), {}
    title = ", ".join(filter(None, [f"{facts.title}: {state.sentence}", facts.setting]))
    return picture(draw(history, facts, title=title), text(history, facts, seconds, state)).bundle()
