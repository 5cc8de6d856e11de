"""Place: the display that shows the runs of one cell, and keeps their result. Runs in the kernel.

There is one display for all of them: updates replace it, and one state is saved. The result is a picture and its
numbers: of one run when it ends, of several when their cell ends, since it is unknown before that which of them is the
last.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from nbaccel.launch.screen.kept import kept_of_several, shown_of
from nbaccel.launch.screen.painter import Screen
from nbaccel.view.board import Board
from nbaccel.view.panel import Panel
from nbaccel.view.state import State

__all__ = ["Place"]


def _at_once(draw: Callable[[], None]) -> None:
    draw()


class Place:
    """One display of the notebook.

    cell: identifies the cell.  when_it_ends: calls its argument once, when the cell has ended.
    is_open: something is shown there.
    """

    def __init__(self, cell: str | None = None, when_it_ends: Callable[[Callable[[], None]], None] = _at_once) -> None:
        self.cell = cell
        self.board = Board()
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

        now: replaces the content that was displayed here last, type by type.
        """
        if self.is_open:
            screen.publish({"kind": "display", **self._latest, "data": {**self._latest["data"], **now}})

    def conclude(self, screen: Screen, panel: Panel, seconds: float, state: State) -> None:
        """Conclude the run of `panel`: show its picture, or a row below those of the earlier runs."""
        self.board.finish(panel, seconds, state)
        if self.board.runs == 1:
            self.show(screen, *shown_of(panel, seconds, state))
            return
        self.show(screen, dict(self.board.bundle()))
        if not self._is_promised:
            self._is_promised = True
            self._when_it_ends(lambda: self._draw_all(screen))

    def _draw_all(self, screen: Screen) -> None:
        """Draw the picture of all runs. If that fails, the table stays."""
        self._is_promised = False
        try:
            self.show(screen, *kept_of_several(self.board))
        except Exception as trouble:
            screen.write("stderr", f"these runs could not be drawn ({type(trouble).__name__}: {trouble})\n")
