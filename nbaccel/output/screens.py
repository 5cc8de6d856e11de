"""Default screens for the output of ranks: the notebook's cell, or the terminal. Runs in the kernel."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = [
    "ConsoleScreen",
    "JupyterScreen",
    "SilentScreen",
    "shell_here",
]


class ConsoleScreen:
    """A terminal, or the given text streams; shows rich messages by their plain text.

    The current `sys.stdout` and `sys.stderr` are looked up at each write, so redirections are honoured.
    """

    def __init__(self, stdout: Any = None, stderr: Any = None) -> None:
        self._given = {"stdout": stdout, "stderr": stderr}

    def write(self, stream: str, text: str) -> None:
        file = self._given[stream] or getattr(sys, stream)
        file.write(text)
        file.flush()

    has_room_for_bars = False

    def show_bars(self, rows: Sequence[str]) -> None:
        """Do nothing: bars are on the last line of text."""

    def publish(self, message: dict[str, Any]) -> None:
        if text := message["data"].get("text/plain"):
            self.write("stdout", f"{text}\n")


class JupyterScreen(ConsoleScreen):
    """The running cell: writes text to the kernel's streams, and rich messages to its display publisher."""

    def __init__(self, shell: Any) -> None:
        super().__init__()
        self._publisher = shell.display_pub
        self._payloads = shell.payload_manager

    def publish(self, message: dict[str, Any]) -> None:
        if message["kind"] == "payload":  # goes with the reply to the cell
            self._payloads.write_payload(message["payload"])
            return
        display_id = message.get("display_id")
        self._publisher.publish(
            message["data"],
            message.get("metadata") or {},
            transient={"display_id": display_id} if display_id else {},
            update=message["kind"] == "update",
        )


class SilentScreen:
    """A screen that shows nothing: the log of the run has what its ranks print."""

    has_room_for_bars: bool = False

    def write(self, stream: str, text: str) -> None:
        """Show nothing."""

    def publish(self, message: dict[str, Any]) -> None:
        """Show nothing."""

    def show_bars(self, rows: Sequence[str]) -> None:
        """Show nothing."""


def shell_here() -> Any:
    """Return IPython's shell in this process, None if there is none; imports nothing."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
