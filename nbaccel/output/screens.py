"""Default screens for the output of ranks: the notebook's cell, or the terminal. Runs in the kernel."""

from __future__ import annotations

import sys
from typing import Any

from nbaccel.output.router import ConsoleScreen

__all__ = [
    "JupyterScreen",
    "shell_here",
]


class JupyterScreen(ConsoleScreen):
    """The running cell: writes text to the kernel's streams, and rich messages to its display publisher."""

    def __init__(self, shell: Any) -> None:
        super().__init__()
        self._publisher = shell.display_pub

    def publish(self, message: dict[str, Any]) -> None:
        display_id = message.get("display_id")
        self._publisher.publish(
            message["data"],
            message.get("metadata") or {},
            transient={"display_id": display_id} if display_id else {},
            update=message["kind"] == "update",
        )


def shell_here() -> Any:
    """Return IPython's shell in this process, None if there is none; imports nothing."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()
