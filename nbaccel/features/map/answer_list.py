"""Answers: the result of a map, in the order of its items. Read in the kernel, in ranks and scripts.

Those of a map without a file are in memory. Those in a file are read when they are asked for: a million of them take
eight bytes each.
"""

from __future__ import annotations

import json
import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, overload

from nbaccel.base.quantities import plural
from nbaccel.base.values import frozen
from nbaccel.errors import CannotContinue

__all__ = ["Answers", "Failed", "LinesOnDisk", "read_line"]

_SHOWN = 3
_SHOWN_CHARACTERS = 200
_READ_BYTES = 1 << 20


@frozen
class Failed:
    """The place of an answer to an item that failed each time it was tried.

    Args:
        index: The item's number.
        error: The class and the text of its last error.
    """

    index: int
    error: str

    def __str__(self) -> str:
        return f"item {self.index} failed: {self.error}"


class LinesOnDisk(Sequence[Any]):
    """The lines of a file of answers, each parsed when it is asked for.

    They stay those of the file that was opened, also when other answers replace it; who changes it in place changes
    them. A pickle has the path, and is read again as long as that file is there.

    Raises:
        CannotContinue: The file of a pickle was replaced or changed.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Any]) -> None:
        self._path = path
        self._parse = parse
        self._open()
        self._offsets = array("Q", [0])
        with open(self._fd, "rb", closefd=False) as file:
            for line in file:
                self._offsets.append(self._offsets[-1] + len(line))

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: Any) -> Any:
        start = self._offsets[number]
        return self._parse(os.pread(self._fd, self._offsets[number + 1] - start, start))

    def __iter__(self) -> Iterator[Any]:
        first = 0
        while first < len(self):
            last = max(first + 1, bisect_right(self._offsets, self._offsets[first] + _READ_BYTES) - 1)
            start = self._offsets[first]
            block = memoryview(os.pread(self._fd, self._offsets[last] - start, start))
            for number in range(first, last):
                yield self._parse(bytes(block[self._offsets[number] - start : self._offsets[number + 1] - start]))
            first = last

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _known: object) -> Self:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_fd": self._same()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        try:
            self._open()
        except OSError as error:
            raise CannotContinue(f"{self._path}, which has these answers, cannot be read: {error.strerror}") from error
        if self._same() != state["_fd"]:
            raise CannotContinue(
                f"{self._path} has other answers than when these were stored: nbaccel.map with the same arguments "
                "reads, or finds, its own"
            )

    def _same(self) -> tuple[int, int]:
        """Return what tells the open file from another one: its inode, and its size in bytes."""
        facts = os.fstat(self._fd)
        return facts.st_ino, facts.st_size


class Answers(Sequence[Any]):
    """The answers of a map, one for each item, in the order of the items; a `Failed` where there is none.

    Args:
        path: The file or folder that holds them; None for answers in memory.
        failed: The `Failed` among them.

    Example:
        >>> answers = Answers(["Yes.", Failed(1, "ValueError: too long")])
        >>> answers[0], answers.failed
        ('Yes.', [Failed(index=1, error='ValueError: too long')])
    """

    def __init__(self, values: Sequence[Any], path: Path | None = None, failed: Sequence[int] | None = None) -> None:
        self._values = values
        self.path = path
        self._failed = failed

    @property
    def failed(self) -> list[Failed]:
        if self._failed is not None:
            return [self._values[number] for number in self._failed]
        return [value for value in self._values if isinstance(value, Failed)]

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, number: int) -> Any: ...
    @overload
    def __getitem__(self, number: slice) -> list[Any]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self._values[each] for each in range(*number.indices(len(self)))]
        length = len(self)
        if not -length <= number < length:
            raise IndexError(f"there are {plural(length, 'answer')}, and no number {number}")
        return self._values[number % length]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        """Compare with another sequence of answers, item by item."""
        if not isinstance(other, Answers | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as a list has none

    def __repr__(self) -> str:
        shown = [_shortened(repr(value)) for value in self[:_SHOWN]]
        more = len(self) - len(shown)
        place = "" if self.path is None else f" in {self.path}"
        return f"[{', '.join(shown)}{f', … {more:,} more' if more > 0 else ''}]{place}"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def read_line(line: bytes) -> Any:
    """Return the answer in a line of a file, or a `Failed`.

    Example:
        >>> read_line(b'{"index": 7, "answer": "Yes."}'), read_line(b'{"index": 8, "error": "ValueError: too long"}')
        ('Yes.', Failed(index=8, error='ValueError: too long'))
    """
    found = json.loads(line)
    return Failed(found["index"], found["error"]) if "error" in found else found["answer"]
