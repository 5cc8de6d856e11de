"""Imports, between cells, what a cell in ranks needs, so that nobody waits for it. Runs in the kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

__all__ = ["IdleLoading"]


class IdleLoading:
    """Imports what a cell in ranks needs while the kernel is idle: the first such cell begins a second earlier.

    It waits until the notebook has imported torch, since cells before that may still set variables that torch reads.
    A kernel that is idle ignores SIGINT, so no interrupt leaves a module half imported. Outside of a kernel no event
    loop runs, and nothing is imported.

    Args:
        load: What it calls, once.
        loop: Returns the event loop of the kernel, or raises RuntimeError.
    """

    def __init__(
        self, load: Callable[[], None] | None = None, loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    ) -> None:
        self._load = load or _load_for_cells
        self._loop = loop or _running_loop
        self._due: asyncio.TimerHandle | None = None
        self._is_loaded = False

    def before_cell(self, *_: Any) -> None:
        """Wait for the end of this cell; handler of IPython's `pre_run_cell`."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def after_cell(self, *_: Any) -> None:
        """Load if no other cell follows at once; handler of IPython's `post_run_cell`."""
        self.before_cell()
        if self._is_loaded or "torch" not in sys.modules:
            return
        try:
            loop = self._loop()
        except RuntimeError:
            return
        self._due = loop.call_later(_IDLE_S, self._load_now)

    def _load_now(self) -> None:
        self._is_loaded = True
        with suppress(Exception):  # the first magic meets it again, and says it
            self._load()


_IDLE_S = 0.5
"""Cells that were sent together follow each other within milliseconds."""


def _running_loop() -> asyncio.AbstractEventLoop:
    import asyncio  # a kernel has it; elsewhere `%load_ext` would wait for it

    return asyncio.get_running_loop()


def _load_for_cells() -> None:
    from nbaccel.launching.launcher import load_once
    from nbaccel.notebook.session import SETUP

    # Without torch._dynamo, which reads variables when it is imported: a later cell may set them.
    load_once([SETUP, "nbaccel.notebook.cell_mode:run_cell"], warm=())
