"""Displays: the rich output of one rank, with separate display ids. Runs in the kernel; pure.

A rank may replace its own displays, by id or after ``clear_output``; it cannot touch displays of the notebook or of the
project's panel, because its ids carry a unique prefix. ``clear_output`` clears displays only: printed text stays where
it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["Displays"]

_NOTHING = {"text/plain": ""}


class Displays:
    """Turns the display messages of a rank into messages for the screen: "display" and "update", never "clear".

    prefix: unique among everything that the notebook displays.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0
        self._ids: dict[str, str] = {}  # by the rank's display id, the id on the screen
        self._shown: list[str] = []  # displayed since the last clear
        self._cleared: deque[str] = deque()  # places that the next displays take

    def translate(self, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the messages for the screen that follow from `message` of the rank."""
        kind = message["kind"]
        if kind == "clear":
            yield from self._clear(wait=bool(message.get("wait")))
        elif kind == "update":
            own_id = self._ids.get(message["display_id"], f"{self._prefix}-{message['display_id']}")
            yield _message("update", message, own_id)
        else:
            yield self._display(message)

    def close(self) -> Iterator[dict[str, Any]]:
        """Blank the places that were cleared and not used again."""
        for own_id in self._cleared:
            yield _message("update", {"data": _NOTHING}, own_id)
        self._cleared.clear()

    def _display(self, message: dict[str, Any]) -> dict[str, Any]:
        kind = "update" if self._cleared else "display"
        if self._cleared:
            own_id = self._cleared.popleft()
        else:
            self._count += 1
            own_id = f"{self._prefix}-{self._count}"
        self._shown.append(own_id)
        if message.get("display_id"):
            self._ids[message["display_id"]] = own_id
        return _message(kind, message, own_id)

    def _clear(self, *, wait: bool) -> Iterator[dict[str, Any]]:
        """Free the places of all displays; at once, or with the next display if `wait` is set."""
        if wait:
            yield from self.close()
        self._cleared.extend(self._shown)
        self._shown.clear()
        if not wait:
            for own_id in self._cleared:
                yield _message("update", {"data": _NOTHING}, own_id)


def _message(kind: str, message: dict[str, Any], own_id: str) -> dict[str, Any]:
    return {"kind": kind, "data": message["data"], "metadata": message.get("metadata") or {}, "display_id": own_id}
