"""The number of rounds that a `for` loop will have, read from what it iterates over before it begins. Runs in ranks.

Nothing is drawn from the iterable, and none of its state changes. Where the number is not known, it is None: of
generators, and of `itertools.count`.
"""

from __future__ import annotations

import itertools
import math
import operator
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nbaccel.base.notices import PACKAGE_DIR

__all__ = ["total_of"]

_DEEPEST = 5
"""Iterables inside of each other that are looked through, as in `enumerate(zip(tqdm(loader), names))`."""


def total_of(iterable: Any, depth: int = 0) -> int | None:
    """Return the number of rounds of a loop over `iterable`; None if it is unknown.

    Example:
        >>> total_of([1, 2]), total_of(range(9)), total_of(enumerate("abc")), total_of(zip(range(9), [1, 2]))
        (2, 9, 3, 2)
        >>> total_of(iter([1, 2])), total_of(map(str, range(4))), total_of(x for x in "ab")
        (2, 4, None)
    """
    if depth > _DEEPEST:
        return None
    with suppress(Exception):  # the user's `__len__` may raise anything
        return len(iterable.columns if type(iterable).__name__ == "DataFrame" else iterable)
    if isinstance(iterable, types.GeneratorType):
        return _total_of_generator(iterable, depth)
    with suppress(Exception):
        if (read := _PARTS.get(type(iterable))) is not None:
            return read(_parts_of(iterable), depth + 1)
        hint = operator.length_hint(iterable, -1)
        if hint >= 0:
            return hint
        total = iterable.total  # of progress bars
        return total if type(total) is int else None
    return None


def _total_of_generator(generator: Any, depth: int) -> int | None:
    """Return the total of `accelerator.epochs(n)`, or of what has begun to iterate over a progress bar or a loader.

    Of epochs it is less than n if the program is resumed.
    """
    frame = generator.gi_frame
    if frame is None:
        return None
    names, code = frame.f_locals, frame.f_code
    owner = names.get("self")
    if code.co_name == "__iter__":
        return total_of(owner, depth + 1)
    count = names.get("count")
    if not code.co_filename.startswith(PACKAGE_DIR) or type(count) is not int:
        return None
    first = getattr(owner, "under_way", 0) if getattr(owner, "_is_resumed", False) else 0
    return max(count - first, 0)


def _parts_of(iterable: Any) -> tuple[Any, ...]:
    """Return the arguments from which an iterator of Python's own would be made again."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # itertools warns of this since Python 3.12, and lacks it since 3.14
        parts: tuple[Any, ...] = iterable.__reduce__()
    return tuple(parts[1])


def _least(parts: Any, depth: int) -> int | None:
    known = [total for part in parts if (total := total_of(part, depth)) is not None]
    return min(known, default=None)


def _total_of_islice(parts: tuple[Any, ...], depth: int) -> int | None:
    iterator, start, stop, step, *_ = parts
    inner = total_of(iterator, depth)
    ends = [each for each in (stop, inner) if each is not None]
    return max(0, math.ceil((min(ends) - start) / step)) if ends else None


_PARTS: dict[type, Callable[[tuple[Any, ...], int], int | None]] = {
    enumerate: lambda parts, depth: total_of(parts[0], depth),
    zip: lambda parts, depth: _least(parts, depth),
    map: lambda parts, depth: _least(parts[1:], depth),
    itertools.islice: _total_of_islice,
    itertools.product: lambda parts, _: math.prod(map(len, parts)),
    itertools.starmap: lambda parts, depth: total_of(parts[1], depth),
}
