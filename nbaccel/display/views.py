"""Choice between the views that follow a run, and lines of text, the plainest of them. Runs in the kernel.

`Views` chooses the view: in a notebook what `features/panel` has for it, `PeriodicText` in a terminal, where text is
asked for and where nothing else can be shown, and the output of ranks alone in a script. What draws is imported when it
is chosen.

Reasons: docs/design/screen.md
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from nbaccel.base.hardware import Platform
from nbaccel.base.world import is_notebook_kernel
from nbaccel.display.run_view import TICK_SLACK_S, PanelSink, RunView
from nbaccel.display.summary import RunFacts, RunState, line
from nbaccel.errors import FeatureMissing
from nbaccel.features import feature
from nbaccel.output.painter import Screen
from nbaccel.output.screens import ConsoleScreen, JupyterScreen

if TYPE_CHECKING:
    from nbaccel.features.panel.notebook_views import NotebookViews

__all__ = [
    "PeriodicText",
    "Views",
]

_EVERY_S = 30.0


class PeriodicText(RunView):
    """Writes lines of text, one more at the end.

    There is one line every half minute. Each line is complete and flushed, so that a reader of a remote log sees that
    the run goes on.
    """

    def __init__(
        self,
        screen: Screen,
        world_size: int,
        facts: RunFacts,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(screen, world_size, facts, clock)
        self._due = self._began + _EVERY_S
        self._unfinished = ("stdout", "")  # the content of the last line

    def head(self, line: str) -> None:
        super().head(line)
        self.write_heading()  # nothing else shows that a run has begun

    def write(self, stream: str, text: str) -> None:
        super().write(stream, text)
        before = self._unfinished[1] if "\n" not in text else ""
        row = before + text.rpartition("\n")[2]
        _, rewritten, state = row.rpartition("\r")
        self._unfinished = (stream, rewritten + state)

    def tick(self, now: float) -> None:
        if now >= self._due - TICK_SLACK_S:
            self._due = now + _EVERY_S
            self._say(line(self.history, self.facts, now - self._began))

    def _conclude(self, seconds: float, state: RunState) -> None:
        if not self._is_worth_a_word(seconds):
            super()._conclude(seconds, state)
            return
        self._say(state.sentence if state.is_written else line(self.history, self.facts, seconds, state))

    def _say(self, words: str) -> None:
        """Write a separate line: a bar is wiped, and drawn again below at its next change; other text is ended."""
        stream, unfinished = self._unfinished
        if "\r" in unfinished:
            width = len(unfinished.rpartition("\r")[2])
            super().write(stream, f"\r{' ' * width}\r")
        elif unfinished:
            super().write(stream, "\n")
        self.write("stdout", f"{words}\n")


class Views:
    """Chooses the view of this process's runs."""

    @functools.cached_property
    def in_notebook(self) -> NotebookViews | None:
        """Return what shows runs in a notebook; None where its folder is not there, which is said once."""
        made = _notebook_views()
        return None if made is None else made()

    def show(
        self,
        shell: Any,
        world_size: int,
        facts: RunFacts,
        platform: Platform,
        *,
        is_plain: bool = False,
        says_end: bool = True,
        frames: PanelSink | None = None,
        screen: Screen | None = None,
    ) -> RunView:
        """Return the view of a run.

        Args:
            shell: IPython's, None in a script, which shows only the output of its ranks.
            is_plain: Show text only.
            says_end: The end of a panel is also written as a line of text.
            frames: Shows the states of a panel.
            screen: The screen of a notebook; None for the cell that runs.
        """
        if shell is None:
            return RunView(ConsoleScreen(), world_size, facts)
        if is_plain:
            return PeriodicText(screen or ConsoleScreen(), world_size, facts)
        if (drawn := self.drawn()) is None:
            return PeriodicText(screen or JupyterScreen(shell), world_size, facts)
        return drawn.show(shell, world_size, facts, platform, says_end=says_end, frames=frames, screen=screen)

    def steered(self, shell: Any, *, is_plain: bool = False) -> AbstractContextManager[tuple[PanelSink, list[Any]]]:
        """Yield what shows the states of the running cell's panel, and what is checked beside the run."""
        drawn = self.drawn(is_plain=is_plain)
        return nullcontext((PanelSink(), [])) if drawn is None else drawn.steered(shell)

    def close(self) -> None:
        """Close what is left of the last run's panel."""
        if (drawn := vars(self).get("in_notebook")) is not None:
            drawn.close()

    def drawn(self, *, is_plain: bool = False) -> NotebookViews | None:
        """Return what draws; None for text, also in a terminal, which cannot take back what it has shown."""
        return None if is_plain or not is_notebook_kernel() else self.in_notebook


@functools.cache
def _notebook_views() -> Callable[[], NotebookViews] | None:
    """Return what makes the views of a notebook; None, after a sentence, where their folder is not there."""
    try:
        made: Callable[[], NotebookViews] = feature("the panel of a run")
    except FeatureMissing as missing:
        ConsoleScreen().write("stdout", f"{missing}\n")
        return None
    return made
