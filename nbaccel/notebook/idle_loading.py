"""Imports, between cells, what a cell in ranks needs, so that nobody waits for it. Runs in the kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from nbaccel.features import feature

if TYPE_CHECKING:
    import asyncio

__all__ = ["IdleLoading"]


class IdleLoading:
    """Imports what a cell in ranks needs while the kernel is idle: the first such cell begins a second earlier.

    It waits until the notebook has imported torch, since cells before that may still set variables that torch reads.
    A kernel that is idle ignores SIGINT, so no interrupt leaves a module half imported. A cell that comes meanwhile
    waits for one load at most; the others follow when it is over. Outside of a kernel no event loop runs, and nothing
    is imported.

    Args:
        loads: What it calls, each once.
        loop: Returns the event loop of the kernel, or raises RuntimeError.
    """

    def __init__(
        self,
        loads: Sequence[Callable[[], Any]] | None = None,
        loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self._left = list(_LOADS if loads is None else loads)
        self._loop = loop or _running_loop
        self._due: asyncio.TimerHandle | None = None

    def before_cell(self, *_: Any) -> None:
        """Wait for the end of this cell; handler of IPython's `pre_run_cell`."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def after_cell(self, *_: Any) -> None:
        """Load if no other cell follows at once; handler of IPython's `post_run_cell`."""
        self.before_cell()
        if not self._left or "torch" not in sys.modules:
            return
        try:
            loop = self._loop()
        except RuntimeError:
            return
        self._due = loop.call_later(_IDLE_S, self._load_next, loop)

    def _load_next(self, loop: asyncio.AbstractEventLoop) -> None:
        load = self._left.pop(0)
        with suppress(Exception):  # a cell in ranks meets it again, and says it
            load()
        self._due = loop.call_later(_BETWEEN_S, self._load_next, loop) if self._left else None


_IDLE_S = 0.5
"""Cells that were sent together follow each other within milliseconds."""

_BETWEEN_S = 0.01
"""A request that has arrived meanwhile is read before the next load."""


def _running_loop() -> asyncio.AbstractEventLoop:
    import asyncio  # a kernel has it; elsewhere `%load_ext` would wait for it

    return asyncio.get_running_loop()


def _load_for_cells() -> None:
    from nbaccel.launching.launcher import load_once
    from nbaccel.notebook.session import SETUP

    # Without torch._dynamo, which reads variables when it is imported: a later cell may set them.
    load_once([SETUP, "nbaccel.notebook.cell_mode:run_cell"], warm=())


_LOADS: tuple[Callable[[], Any], ...] = (
    _load_for_cells,
    partial(feature, "the panel of a run"),
    partial(feature, "the picture of a run"),  # matplotlib
    partial(feature, "the button of a run"),  # ipywidgets
)
