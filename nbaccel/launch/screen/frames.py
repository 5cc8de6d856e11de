"""Frames: show the states of a panel while its run goes on. Runs in the kernel.

This class displays the states as they are; code that knows widgets can show them in an element that can be clicked.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Frames"]


class Frames:
    """Shows each state in place of the one before, in one display.

    >>> Frames().show({"text/plain": "running"})
    {'text/plain': 'running'}
    """

    @property
    def hint(self) -> str:
        """Return the panel's hint on how to end the run; empty if that is visible anyway."""
        return "Stop: interrupt the kernel"

    def get_ready(self) -> None:
        """Get ready for a state; only the first call may take a moment, which does not count as time of the panel."""

    def show(self, data: dict[str, Any]) -> dict[str, Any] | None:
        """Return the data to display of a state, by MIME type; None if it is on the screen already."""
        return data

    def close(self) -> None:
        """Release resources of the run; its last state has been displayed."""
