"""The place of a notebook that shows the runs of a cell, and the picture that stays there. Runs in the kernel.

All runs of a cell share one `DisplaySlot`: updates replace it, and the notebook saves one state. The result is one
picture, with its numbers in words: of one run when it ends, of several when their cell ends, since it is unknown before
that which of them is the last.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nbaccel.display.history import History
from nbaccel.display.summary import RunFacts, RunState, text
from nbaccel.features.panel.comparison import RunComparison, draw_runs
from nbaccel.features.panel.figure import Bundle, Picture, draw, picture
from nbaccel.features.panel.panel import Panel
from nbaccel.output.painter import Screen

__all__ = [
    "DisplaySlot",
    "kept",
    "kept_of_several",
    "shown_of",
]


def _at_once(draw: Callable[[], None]) -> None:
    draw()


class DisplaySlot:
    """One display of the notebook.

    Args:
        cell: What identifies the cell.
        when_it_ends: A function that calls its argument once, when the cell has ended.

    Attributes:
        is_open: Whether something is shown there.
    """

    def __init__(self, cell: str | None = None, when_it_ends: Callable[[Callable[[], None]], None] = _at_once) -> None:
        self.cell = cell
        self.comparison = RunComparison()
        self.is_open = False
        self._latest: dict[str, Any] = {}
        self._display_id = f"nbaccel-run-{uuid.uuid4().hex[:12]}"
        self._when_it_ends = when_it_ends
        self._is_promised = False

    def show(self, screen: Screen, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        """Show `data` in place of the present content."""
        kind, self.is_open = "update" if self.is_open else "display", True
        self._latest = {"data": data, "metadata": metadata or {}, "display_id": self._display_id}
        screen.publish({"kind": kind, **self._latest})

    def show_too(self, screen: Screen, now: Mapping[str, Any]) -> None:
        """Show the content in another cell as well, and update both from now on; do nothing if nothing is shown yet.

        Args:
            now: Content that replaces the one that was displayed here last, type by type.
        """
        if self.is_open:
            screen.publish({"kind": "display", **self._latest, "data": {**self._latest["data"], **now}})

    def conclude(self, screen: Screen, panel: Panel, seconds: float, state: RunState) -> None:
        """Conclude the run of `panel`: show its picture, or a row below those of the earlier runs."""
        self.comparison.finish(panel, seconds, state)
        if self.comparison.runs == 1:
            self.show(screen, *shown_of(panel, seconds, state))
            return
        self.show(screen, dict(self.comparison.bundle()))
        if not self._is_promised:
            self._is_promised = True
            self._when_it_ends(lambda: self._draw_all(screen))

    def conclude_all(
        self, screen: Screen, runs: Iterable[tuple[Panel, float, RunState]], table: Mapping[str, str]
    ) -> None:
        """Conclude several runs that went side by side: show one picture of all.

        Args:
            runs: The runs, each with its duration and its end.
            table: Replaces the picture if no run has a curve; its text always.
        """
        for panel, seconds, state in runs:
            self.comparison.finish(panel, seconds, state)
        data, metadata = kept_of_several(self.comparison)
        has_picture = any(row.curve for row in self.comparison.rows)
        self.show(screen, {**(data if has_picture else table), "text/plain": table["text/plain"]}, metadata)

    def _draw_all(self, screen: Screen) -> None:
        """Draw the picture of all runs. If that fails, the table stays."""
        self._is_promised = False
        try:
            self.show(screen, *kept_of_several(self.comparison))
        except Exception as trouble:
            screen.write("stderr", f"these runs could not be drawn ({type(trouble).__name__}: {trouble})\n")


def shown_of(panel: Panel, seconds: float, state: RunState) -> Bundle:
    """Return data and metadata by MIME type: a PNG if there are curves, else the panel.

    There is no HTML beside the PNG: viewers that prefer HTML and then strip its style and pictures (GitHub, a notebook
    that is not trusted) would show neither.
    """
    history, facts = panel.history, panel.facts
    if not history.has_curves:
        return dict(panel.bundle(seconds, state)), {}
    return kept(history, facts, seconds, state).bundle()


def kept(
    history: History, facts: RunFacts, seconds: float, state: RunState, names: Sequence[str] | None = None
) -> Picture:
    """Return the picture of a run that is over.

    Args:
        names: The curves to draw; None for those that were chosen for the run.
    """
    title = ", ".join(filter(None, [f"{facts.title}: {state.sentence}", facts.setting_of(history)]))
    figure = draw(history, facts, names=names, title=title)
    return picture(figure, text(history, facts, seconds, state))


def kept_of_several(comparison: RunComparison) -> Bundle:
    """Return the output of all runs of a place: a PNG that compares them if any has a curve, else their table."""
    bundle = comparison.bundle()
    if not any(row.curve for row in comparison.rows):
        return dict(bundle), {}
    return picture(draw_runs(comparison), bundle["text/plain"]).bundle()
