"""Views of runs in a notebook: the panel, or lines and a picture where nobody watches. Runs in the kernel.

`NotebookViews` chooses the view, and owns what lasts from run to run: the place of the latest cell, and the button of
the run before.

Reasons: docs/design/screen.md
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from nbaccel.base.hardware import Platform
from nbaccel.display.attendance import runs_unattended
from nbaccel.display.run_view import PanelSink, RunView
from nbaccel.display.summary import RunFacts, RunState
from nbaccel.display.views import PeriodicText
from nbaccel.features.panel.display_slot import DisplaySlot
from nbaccel.features.panel.live_panel import LivePanel
from nbaccel.features.panel.panel import Panel
from nbaccel.features.panel.stop_control import FormerButton, StopControl, steered
from nbaccel.launching.processes.interaction import Pollable
from nbaccel.output.painter import Screen
from nbaccel.output.screens import JupyterScreen

__all__ = ["NotebookViews", "UnattendedText"]


class UnattendedText(PeriodicText):
    """Writes lines of text, and leaves the picture at `place`: nobody watches the run."""

    def __init__(self, screen: Screen, world_size: int, facts: RunFacts, place: DisplaySlot, **options: Any) -> None:
        super().__init__(screen, world_size, facts, **options)
        self._place = place

    def head(self, line: str) -> None:
        RunView.head(self, line)  # not written at once: the picture shows that there was a run

    @property
    def has_room_for_bars(self) -> bool:
        """Return True: the last state of a bar is enough.

        Programs that run notebooks save everything that was rewritten on a line, and four states a second would add up
        to megabytes.
        """
        return True

    def _conclude(self, seconds: float, state: RunState) -> None:
        if self._is_worth_a_word(seconds):
            self._place.conclude(self._screen, Panel(self.history, self.facts), seconds, state)
        super()._conclude(seconds, state)


class NotebookViews:
    """Chooses the view of this process's runs. It remembers the place that shows the runs of the latest cell."""

    def __init__(self) -> None:
        self._place: DisplaySlot | None = None
        self._former: FormerButton | None = None

    def show(
        self,
        shell: Any,
        world_size: int,
        facts: RunFacts,
        platform: Platform,
        *,
        says_end: bool = True,
        frames: PanelSink | None = None,
        screen: Screen | None = None,
    ) -> RunView:
        """Return the view of a run; the arguments are those of `Views.show`."""
        place = self.place_in(shell)
        if runs_unattended(platform):
            return UnattendedText(JupyterScreen(shell), world_size, facts, place)
        screen = screen or JupyterScreen(shell)
        return LivePanel(screen, world_size, facts, place, frames=frames, says_end=says_end)

    def place_in(self, shell: Any) -> DisplaySlot:
        """Return one place for all runs that a cell starts."""
        cell = _cell(shell)
        if self._place is None or cell is None or cell != self._place.cell:
            self._place = DisplaySlot(cell, functools.partial(_when_the_cell_ends, shell))
        return self._place

    def steered(self, shell: Any) -> AbstractContextManager[tuple[PanelSink, list[Pollable]]]:
        """Yield how the running cell is shown, and what is checked beside it."""
        return steered(shell, self._former_button(shell))

    def button_between_cells(self, shell: Any, otherwise: str) -> StopControl:
        """Return the button of a run that outlasts its cell: clicks come between cells, as all messages do.

        Args:
            otherwise: The panel's hint when there is no button.
        """
        return StopControl(None, set(), otherwise, self._former_button(shell))

    def close(self) -> None:
        """Close the button of the last run."""
        if self._former is not None:
            self._former.close()

    def _former_button(self, shell: Any) -> FormerButton:
        if self._former is None:
            self._former = FormerButton(getattr(shell, "kernel", None))
        return self._former


def _cell(shell: Any) -> str | None:
    """Return the id of the message that asked for this execution; it differs from that of every other execution."""
    parent = getattr(shell, "parent_header", None) or {}
    found: str | None = parent.get("header", parent).get("msg_id")
    return found


def _when_the_cell_ends(shell: Any, call: Callable[[], None]) -> None:
    """Call `call` once the code of the present cell is done; its output still belongs to the cell."""

    def once(result: Any) -> None:
        shell.events.unregister("post_run_cell", once)
        call()

    shell.events.register("post_run_cell", once)
