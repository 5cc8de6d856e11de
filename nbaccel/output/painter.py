"""Write text to the screen in few calls, and draw the progress bars on its last line. Runs in the kernel; pure.

Text is collected and written at most every 50 ms, bars at most four times a second. A bar is on the stream to which it
was printed; new text on this stream is written over it, and the bar again below. A front end can overwrite only within
one stream, so text of the other stream first wipes the bar. `LiveBars` holds the bars that ranks draw at this moment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

__all__ = [
    "BATCH_S",
    "LiveBars",
    "Painter",
    "Screen",
    "ScreenBar",
]

BATCH_S = 0.05
_REDRAW_S = 0.25
_STALE_S = 1.5
"""Most seconds that a finished bar stays: its last state comes as a line, which may wait a second for other ranks."""
_WIDEST_BAR = 500


class Screen(Protocol):
    """Destination of output."""

    def write(self, stream: str, text: str) -> None:
        """Write a text.

        Args:
            stream: "stdout" or "stderr".
            text: The text, with its line ends.
        """

    def publish(self, message: dict[str, Any]) -> None:
        """Show a rich display.

        Args:
            message: `kind`, which is "display" or "update", with `data`, `metadata` and `display_id`.
        """

    @property
    def has_room_for_bars(self) -> bool:
        """Return whether bars have a separate place here; otherwise they are on the last line of text."""

    def show_bars(self, rows: Sequence[str]) -> None:
        """Set the running progress bars. Called at every change; draws nothing yet.

        Args:
            rows: One text per bar.
        """


@dataclass(frozen=True, slots=True)
class ScreenBar:
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
        self._position: ScreenBar | None = None
        self._wanted: ScreenBar | None = None
        self._painted_at = self._drawn_at = float("-inf")

    def add(self, stream: str, text: str) -> None:
        """Add text to the next batch; a line brings its newline."""
        self._pending.append((stream, text))

    def want(self, stream: str, text: str) -> None:
        """Set the bar to show from now on; empty text for none."""
        self._wanted = ScreenBar(stream, text[:_WIDEST_BAR]) if text else None

    def paint(self, now: float, *, at_once: bool = False) -> None:
        """Write what is due, or everything."""
        if self._pending and (at_once or now >= self._text_due):
            self._write_text(now)
            self._draw(now)
        elif self._wanted != self._position and (at_once or now >= self._bar_due):
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
        return self._bar_due if self._wanted != self._position else None

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
            if self._position is not None and self._position.stream == stream:
                text = _over(self._position, text)
                self._position = None
            self._wipe()
            self._put(stream, text)
        self._painted_at = now

    def _draw(self, now: float) -> None:
        bar = self._wanted
        if bar is None or (self._position is not None and self._position.stream != bar.stream):
            self._wipe()
        if bar is not None:
            width = self._position.width if self._position is not None else 0
            self._put(bar.stream, "\r" + bar.text.ljust(width))
            self._position = bar
            self._drawn_at = now

    def _wipe(self) -> None:
        if self._position is not None:
            self._put(self._position.stream, "\r" + " " * self._position.width + "\r")
            self._position = None

    def _put(self, stream: str, text: str) -> None:
        if self._out and self._out[-1][0] == stream:
            self._out[-1][1].append(text)
        else:
            self._out.append((stream, [text]))

    def _flush(self) -> None:
        out, self._out = self._out, []
        for stream, texts in out:
            self._screen.write(stream, "".join(texts))


def _over(bar: ScreenBar, text: str) -> str:
    """Return `text` written over the bar; its first line covers all of it."""
    first, newline, rest = text.partition("\n")
    return "\r" + first.ljust(bar.width) + newline + rest


_WIDEST, _NARROWEST = 200, 24
_MOST_ROWS = 16
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class LiveBars:
    """The rows that are being rewritten, by rank and stream.

    A bar that is over is a line of text like any other, and not handled here. A running bar is shown where the front
    end can replace it: as a row of the run's panel, which every notebook updates in place and saves in one state only,
    however often it changed; or all bars in the last line of text, the only way in terminals and with `--plain`. Rows
    never move the cursor upwards: notebooks do not follow that.

    Example:
        >>> bars = LiveBars()
        >>> bars.note(0, "stderr", ["50%|#####     |"])
        >>> bars.rows()
        ['50%|#####     |']
        >>> bars.note(1, "stderr", ["40%|####      |"])
        >>> bars.rows()
        ['[rank 0] 50%|#####     |', '[rank 1] 40%|####      |']
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], list[str]] = {}
        self._ranks: set[int] = set()

    def note(self, rank: int, stream: str, rows: Sequence[str]) -> None:
        """Set the rows that `rank` rewrites on `stream` from now on; none if `rows` is empty."""
        if not rows:
            self._rows.pop((rank, stream), None)
            return
        self._ranks.add(rank)
        self._rows[rank, stream] = [_COLOURS.sub("", row)[:_WIDEST] for row in rows]

    @property
    def are_there(self) -> bool:
        """Return whether a bar is running."""
        return bool(self._rows)

    @property
    def are_of_one_rank(self) -> bool:
        """Return whether one rank alone has drawn bars so far, as where the bars of other ranks are hidden."""
        return len(self._ranks) == 1

    @property
    def stream(self) -> str:
        """Return the stream on which the bars were printed."""
        return min(self._rows)[1] if self._rows else "stderr"

    def rows(self) -> list[str]:
        """Return the rows in the order of ranks, each with its rank as soon as several have drawn."""
        rows = [f"{tag}{row}" for tag, group in self._tagged() for row in group]
        if len(rows) > _MOST_ROWS:
            rows[_MOST_ROWS - 1 :] = [f"… {len(rows) - _MOST_ROWS + 1} more bars"]
        return rows

    def line(self, columns: int) -> str:
        """Return all bars in one line: a single one whole; several cut to fit `columns`, or the first of them."""
        bars = [f"{tag}{'  '.join(group)}" for tag, group in self._tagged()]
        if len(bars) < 2:
            return "".join(bars)
        fitting = max(1, min(len(bars), columns // (_NARROWEST + 2)))
        more = f"  +{len(bars) - fitting}" if fitting < len(bars) else ""
        each = (columns - len(more) + 2) // fitting - 2
        return "  ".join(bar[:each].ljust(each) for bar in bars[:fitting]).rstrip() + more

    def _tagged(self) -> list[tuple[str, list[str]]]:
        is_tagged = len(self._ranks) > 1
        return [(f"[rank {rank}] " if is_tagged else "", rows) for (rank, _), rows in sorted(self._rows.items())]
