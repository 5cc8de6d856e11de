"""Frames: how the states of a panel get in front of a person while its run goes on. Runs in the kernel.

These are displayed as they are; a room that knows widgets can show them in something that can be clicked.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Frames"]


class Frames:
    """Each state takes the place of the one before, in one display.

    >>> Frames().show({"text/plain": "running"})
    {'text/plain': 'running'}
    """

    @property
    def hint(self) -> str:
        """What the panel says of how to end the run; empty where that is to be seen."""
        return "Stop: interrupt the kernel"

    def get_ready(self) -> None:
        """Before each state; only the first time it may take a moment, which is not the panel's to account for."""

    def show(self, data: dict[str, Any]) -> dict[str, Any] | None:
        """What to display of a state that is given by MIME type; None if it is on the screen by now."""
        return data

    def close(self) -> None:
        """The run's last state has been displayed, and what was there for the run alone may go."""
