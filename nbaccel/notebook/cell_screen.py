"""CellScreen: the output of one cell, also after its end and while others run. Runs in the kernel, in any thread.

Kernels send output to the cell that runs now, and each ipykernel has other rules for threads. Here every message names
its cell itself.
"""

from __future__ import annotations

from typing import Any

from nbaccel.launch.screen.router import ConsoleScreen

__all__ = ["CellScreen"]


class CellScreen(ConsoleScreen):
    """The screen of the cell that runs when this is made."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self._kernel = kernel
        self._cell = kernel.get_parent("shell")

    def write(self, stream: str, text: str) -> None:
        self._send("stream", {"name": stream, "text": text})

    def publish(self, message: dict[str, Any]) -> None:
        display_id = message.get("display_id")
        content = {
            "data": message["data"],
            "metadata": message.get("metadata") or {},
            "transient": {"display_id": display_id} if display_id else {},
        }
        self._send("update_display_data" if message["kind"] == "update" else "display_data", content)

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        kernel = self._kernel
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._cell, ident=kernel._topic(kind))
