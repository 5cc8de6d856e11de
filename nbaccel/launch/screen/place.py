"""Place: where in the notebook the runs of one cell are shown, and what stays there. Runs in the kernel.

One display for all of them: updates replace it, and one state is saved. What stays is a picture and its numbers: of
one run when it ends, of several when their cell ends, since nobody knows before that which of them is the last.
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

    cell: what tells it from other cells.  when_it_ends: calls what it is given when the cell has ended, once.
    is_open: whether something is shown there.
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
        """Show this instead of what stands here."""
        kind, self.is_open = "update" if self.is_open else "display", True
        self._latest = {"data": data, "metadata": metadata or {}, "display_id": self._display_id}
        screen.publish({"kind": kind, **self._latest})

    def show_too(self, screen: Screen, now: Mapping[str, Any]) -> None:
        """Show it in another cell as well, from now on the same in both; nothing where nothing is shown yet.

        now: takes the place of what was displayed here last, type by type.
        """
        if self.is_open:
            screen.publish({"kind": "display", **self._latest, "data": {**self._latest["data"], **now}})

    def conclude(self, screen: Screen, panel: Panel, seconds: float, state: State) -> None:
        """The run of `panel` is over: its picture, or a row below those of the runs before it."""
        self.board.finish(panel, seconds, state)
        if self.board.runs == 1:
            self.show(screen, *shown_of(panel, seconds, state))
            return
        self.show(screen, dict(self.board.bundle()))
        if not self._is_promised:
            self._is_promised = True
            self._when_it_ends(lambda: self._draw_all(screen))

    def _draw_all(self, screen: Screen) -> None:
        """The picture of all runs. Without it the table stays."""
        self._is_promised = False
        try:
            self.show(screen, *kept_of_several(self.board))
        except Exception as trouble:
            screen.write("stderr", f"these runs could not be drawn ({type(trouble).__name__}: {trouble})\n")
