"""MetricLog: what a rank logged, in bounded memory however long the run. Pure; runs in the kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nbaccel.events import Event, Listener, Metric, RecordsLost

__all__ = ["MetricLog"]

_MOST_ROWS = 20_000


class MetricLog(Listener):
    """Rows of (step, values) in the order in which rank 0 logged them.

    Beyond 20,000 rows every second one is dropped, and from then on only every second new one is kept; and so on. The
    last row is always there.

    lost: records of rank 0 that never arrived; some of them may have been rows.

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

    def feed(self, rank: int, at: float, event: Event) -> None:
        if rank != 0:
            return
        if isinstance(event, Metric):
            self.extend([(event.step, dict(event.values))])
        elif isinstance(event, RecordsLost):
            self.lost = event.count

    def tick(self, now: float) -> None:
        """It shows nothing."""

    def extend(self, rows: Iterable[tuple[int, dict[str, Any]]]) -> None:
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
