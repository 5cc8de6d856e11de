"""LiveBars: the progress bars that ranks draw at this moment. Runs in the kernel; pure.

A bar that is over is a line of text like any other, and not handled here. A running bar is shown where the front end
can replace it: as a row of the run's panel, which every notebook updates in place and saves in one state only, however
often it changed; or all bars in the last line of text, the only way in terminals and with `--plain`. Rows never move
the cursor upwards: notebooks do not follow that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

__all__ = ["LiveBars"]

_WIDEST, _NARROWEST = 200, 24
_MOST_ROWS = 16
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class LiveBars:
    """The rows that are being rewritten, by rank and stream.

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
    def stream(self) -> str:
        """Return the stream on which the bars were printed."""
        return min(self._rows)[1] if self._rows else "stderr"

    def rows(self, speakers: Collection[int] = ()) -> list[str]:
        """Return the rows in the order of ranks, each with its rank as soon as several have drawn or printed.

        speakers: the ranks that have printed lines.
        """
        rows = [f"{tag}{row}" for tag, group in self._tagged(speakers) for row in group]
        if len(rows) > _MOST_ROWS:
            rows[_MOST_ROWS - 1 :] = [f"… {len(rows) - _MOST_ROWS + 1} more bars"]
        return rows

    def line(self, columns: int, speakers: Collection[int] = ()) -> str:
        """Return all bars in one line: a single one whole; several cut to fit `columns`, or the first of them."""
        bars = [f"{tag}{'  '.join(group)}" for tag, group in self._tagged(speakers)]
        if len(bars) < 2:
            return "".join(bars)
        fitting = max(1, min(len(bars), columns // (_NARROWEST + 2)))
        more = f"  +{len(bars) - fitting}" if fitting < len(bars) else ""
        each = (columns - len(more) + 2) // fitting - 2
        return "  ".join(bar[:each].ljust(each) for bar in bars[:fitting]).rstrip() + more

    def _tagged(self, speakers: Collection[int]) -> list[tuple[str, list[str]]]:
        is_tagged = len(self._ranks.union(speakers)) > 1
        return [(f"[rank {rank}] " if is_tagged else "", rows) for (rank, _), rows in sorted(self._rows.items())]
