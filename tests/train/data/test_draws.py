"""Which call takes one batch and drops the iterator: known from the code that runs, cold or after many runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from nbaccel.train.data.draws import takes_one_batch


class _Loader:
    """Notes of each begin whether it is one for a single batch."""

    def __init__(self) -> None:
        self.said: list[bool] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.said.append(takes_one_batch(sys._getframe(1)))
        return iter([(1, 2), (3, 4)])


def test_next_of_iter_takes_one_batch_however_it_is_written() -> None:
    loader = _Loader()
    for _ in range(40):  # Python makes other instructions of code that runs often
        next(iter(loader))
        first, _second = next(iter(loader))
        _ = next(iter(loader), None)
        _ = next(iter(loader))[0]
        print(first, next(
            iter(loader)
        ), end="")  # fmt: skip
    assert loader.said == [True] * 200


def test_loops_and_iterators_that_are_kept_take_more() -> None:
    loader = _Loader()
    for _ in range(40):
        for _batch in loader:
            pass
        kept = iter(loader)
        next(kept)
        for _number, _batch in enumerate(iter(loader)):
            pass
        _ = list(loader)
        _ = [batch for batch in loader]  # noqa: C416 - a loop of its own kind
        _ = dict(zip(loader, loader, strict=True))
    assert loader.said == [False] * 280
