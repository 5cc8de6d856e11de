"""Painter: writes text in few calls, and draws the progress bars on the screen's last line. Runs in the kernel; pure.

Text is collected and written at most every 50 ms, bars at most four times a second. A bar is on the stream to which it
was printed; new text on this stream is written over it, and the bar again below. A front end can overwrite only within
one stream, so text of the other stream first wipes the bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

__all__ = ["BATCH_S", "Bar", "Painter", "Screen"]

BATCH_S = 0.05
_REDRAW_S = 0.25
_STALE_S = 1.5
"""Most seconds that a finished bar stays: its last state comes as a line, which may wait a second for other ranks."""
_WIDEST_BAR = 500


class Screen(Protocol):
    """Destination of output."""

    def write(self, stream: str, text: str) -> None:
        """Write text to "stdout" or "stderr"."""

    def publish(self, message: dict[str, Any]) -> None:
        """Show a rich display: `kind` is "display" or "update", with `data`, `metadata` and `display_id`."""

    @property
    def has_room_for_bars(self) -> bool:
        """Return whether bars have a separate place here; otherwise they are on the last line of text."""

    def show_bars(self, rows: Sequence[str]) -> None:
        """Set the running bars, one per row, for their separate place. Called at every change; draws nothing yet."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A progress bar, as one line of text."""

    stream: str
    text: str

    @property
    def width(self) -> int:
        return len(self.text)


class Painter:
    """Writes to `screen`, and remembers the content of its last line."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._pending: list[tuple[str, str]] = []
        self._out: list[tuple[str, list[str]]] = []
        self._standing: Bar | None = None
        self._wanted: Bar | None = None
        self._painted_at = self._drawn_at = float("-inf")

    def add(self, stream: str, text: str) -> None:
        """Add text to the next batch; a line brings its newline."""
        self._pending.append((stream, text))

    def want(self, stream: str, text: str) -> None:
        """Set the bar to show from now on; empty text for none."""
        self._wanted = Bar(stream, text[:_WIDEST_BAR]) if text else None

    def paint(self, now: float, *, at_once: bool = False) -> None:
        """Write what is due, or everything."""
        if self._pending and (at_once or now >= self._text_due):
            self._write_text(now)
            self._draw(now)
        elif self._wanted != self._standing and (at_once or now >= self._bar_due):
            self._draw(now)
        self._flush()

    def publish(self, message: dict[str, Any], now: float) -> None:
        """Show a rich message after all text so far; the bar is drawn again below it."""
        self._write_text(now)
        self._wipe()
        self._flush()
        self._screen.publish(message)

    @property
    def due(self) -> float | None:
        """Return the time at which `paint` will have something to do."""
        if self._pending:
            return self._text_due
        return self._bar_due if self._wanted != self._standing else None

    @property
    def _text_due(self) -> float:
        return self._painted_at + BATCH_S

    @property
    def _bar_due(self) -> float:
        return self._drawn_at + (_STALE_S if self._wanted is None else _REDRAW_S)

    def _write_text(self, now: float) -> None:
        pending, self._pending = self._pending, []
        for stream, group in groupby(pending, key=itemgetter(0)):
            text = "".join(part for _, part in group)
            if self._standing is not None and self._standing.stream == stream:
                text = _over(self._standing, text)
                self._standing = None
            self._wipe()
            self._put(stream, text)
        self._painted_at = now

    def _draw(self, now: float) -> None:
        bar = self._wanted
        if bar is None or (self._standing is not None and self._standing.stream != bar.stream):
            self._wipe()
        if bar is not None:
            width = self._standing.width if self._standing is not None else 0
            self._put(bar.stream, "\r" + bar.text.ljust(width))
            self._standing = bar
            self._drawn_at = now

    def _wipe(self) -> None:
        if self._standing is not None:
            self._put(self._standing.stream, "\r" + " " * self._standing.width + "\r")
            self._standing = None

    def _put(self, stream: str, text: str) -> None:
        if self._out and self._out[-1][0] == stream:
            self._out[-1][1].append(text)
        else:
            self._out.append((stream, [text]))

    def _flush(self) -> None:
        out, self._out = self._out, []
        for stream, texts in out:
            self._screen.write(stream, "".join(texts))


def _over(bar: Bar, text: str) -> str:
    """Return `text` written over the bar; its first line covers all of it."""
    first, newline, rest = text.partition("\n")
    return "\r" + first.ljust(bar.width) + newline + rest
