"""MetricLog: what a rank logged, in bounded memory however long the run. Pure; runs in the kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["MetricLog"]

_MOST_ROWS = 20_000


class MetricLog:
    """Rows of (step, values) in the order in which they were logged.

    Beyond 20,000 rows every second one is dropped, and from then on only every second new one is kept; and so on. The
    last row is always there.

    lost: rows that were logged and never arrived.

    >>> log = MetricLog()
    >>> log.extend([(0, {"loss": 1.0}), (1, {"loss": 0.5})])
    >>> list(log)
    [{'step': 0, 'loss': 1.0}, {'step': 1, 'loss': 0.5}]
    """

    def __init__(self, most_rows: int = _MOST_ROWS) -> None:
        self.lost = 0
        self._most_rows = most_rows
        self._rows: list[tuple[int, dict[str, Any]]] = []
        self._last: tuple[int, dict[str, Any]] | None = None
        self._seen = 0
        self._stride = 1

    def extend(self, rows: Iterable[tuple[int, dict[str, Any]]], lost: int = 0) -> None:
        self.lost = lost
        for row in rows:
            self._last = row
            if self._seen % self._stride == 0:
                self._rows.append(row)
                if len(self._rows) > self._most_rows:
                    del self._rows[1::2]
                    self._stride *= 2
            self._seen += 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from ({"step": step, **values} for step, values in self._rows)
        if self._last is not None and (not self._rows or self._rows[-1] is not self._last):
            step, values = self._last
            yield {"step": step, **values}
