"""Rows: the values that a program logged, in the order of logging, in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

__all__ = ["Rows"]

_MOST_ROWS = 12_000
_MOST_VALUES = 48_000
"""Number of values beyond which rows are thinned.

A row takes 170 bytes and 32 for each value, so wide rows go first.
"""


class Rows(Sequence[dict[str, Any]]):
    """Rows of (step, values) in the order in which they were logged.

    Beyond 12,000 rows, or 48,000 values, every second row is dropped, and from then on only every second new row is
    kept; the next time every fourth, and so on. The first and the last row are always there.

    >>> rows = Rows()
    >>> rows.add(0, {"loss": 1.0}); rows.add(1, {"loss": 0.5})
    >>> list(rows)
    [{'step': 0, 'loss': 1.0}, {'step': 1, 'loss': 0.5}]
    """

    def __init__(self, most_rows: int = _MOST_ROWS, most_values: int = _MOST_VALUES) -> None:
        self._most_rows = most_rows
        self._most_values = most_values
        self._rows: list[tuple[int, tuple[str, ...], tuple[Any, ...]]] = []
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._last: tuple[int, tuple[str, ...], tuple[Any, ...]] | None = None
        self._seen = self._values = 0
        self._stride = 1

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the newest row."""
        names = tuple(values)
        row = (step, self._names.setdefault(names, names), tuple(values.values()))
        self._last = row
        if self._seen % self._stride == 0:
            self._rows.append(row)
            self._values += len(names)
            while len(self._rows) > self._most_rows or (self._values > self._most_values and len(self._rows) > 2):
                self._thin()
        self._seen += 1

    def _thin(self) -> None:
        del self._rows[1::2]
        self._stride *= 2
        self._values = sum(len(names) for _, names, _ in self._rows)
        used = {names for _, names, _ in self._rows}
        self._names = {names: names for names in used}

    @property
    def seen(self) -> int:
        """Return the number of rows that were ever added."""
        return self._seen

    def __len__(self) -> int:
        return len(self._rows) + self._last_is_extra

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]  # IndexError as a list would raise it
        row = self._rows[at] if at < len(self._rows) else self._last
        assert row is not None
        step, names, values = row
        return {"step": step, **dict(zip(names, values, strict=True))}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is a sequence of the same rows."""
        return isinstance(other, Sequence) and not isinstance(other, str) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)!r})"

    @property
    def _last_is_extra(self) -> bool:
        return self._last is not None and (not self._rows or self._rows[-1] is not self._last)
