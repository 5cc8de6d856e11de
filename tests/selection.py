"""Choose the cases of each test that `make test` runs; the others are marked `full` and belong to `make test-all`.

Five rules, applied while pytest collects, to what no mark `full` leaves out by itself:

- A test that runs in several front ends runs in the newest one. ``@pytest.mark.front_ends`` keeps it in all of them:
  for tests of what differs between the front ends (displays, widgets, input, interrupts).
- A test that starts ranks in each way runs with one of them, the ways taking turns from test to test.
- A test with a product of parameters runs in a cover of it: with two parameters each value of each is met, with more
  each pair of values. ``@pytest.mark.product`` keeps all combinations, and both
  ways to start, where their meeting is what the test is about.
- A test that is marked `slow` runs in `MOST_SLOW` of its remaining cases, spread over their list.
- ``@pytest.mark.sample(n)`` runs `n` of the remaining cases, spread over their list: for long lists of one kind.

What compares numbers is marked `numbers`, for `make processors`: all tests of a file that computes
by models (`_COMPUTES`) and compares (`suite.COMPARES`).

It also says which tests a worker process of a parallel run takes together (`scope`), and in which order (`in_order`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from environments import NEWEST
from suite import COMPARES

__all__ = ["MOST_SLOW", "compares_numbers", "cover", "in_order", "scope", "select", "spread"]

MOST_SLOW = 2
"""Cases of a slow test that `make test` runs; a case takes one to ten seconds."""

_LEFT_OUT = ("full", "gpu", "soak")

_FIRST = ("browser", "hosted", "test_notebooks", "compat", "kernel", "features", "cli", "launching")
"""Folders and files that take longest."""

_WHOLE_FOLDERS = ("browser",)
"""Folders whose files share what is slow to start: one server of notebooks."""

_WAYS_TO_START = ("start", "start_method")
"""The parameters that say how ranks are started."""

_COMPUTES = re.compile(r"\bnn\.|Linear|backward\(|model\(|prepare\(|trainings|placed_models|searches|programs")
"""How tests, and the cells in them, compute. A file that does so in passing, and compares too, is taken: it costs some
seconds, and a list of names would forget what is written next."""

Case = tuple[int, ...]
"""The position of each parameter's value among the values of that parameter."""


def select(items: Iterable[pytest.Item]) -> None:
    """Mark as `full` the cases of `items` that the rules leave to `make test-all`, and what compares `numbers`."""
    items = list(items)
    for item in items:
        if compares_numbers(item.path):
            item.add_marker(pytest.mark.numbers)
    tests: dict[Hashable, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not _is_left_out(item):
            tests.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for cases in tests.values():
        kept = set(_chosen(cases))
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.full)


@cache
def compares_numbers(path: Path) -> bool:
    """Whether a test of this file compares what models computed, which a processor may round in its own way."""
    text = path.read_text(encoding="utf-8")
    return _COMPUTES.search(text) is not None and COMPARES.search(text) is not None


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return `items` with those of long files first: a parallel run begins with them, and does not wait for them."""
    order = {name: position for position, name in enumerate(_FIRST)}

    def place(item: pytest.Item) -> int:
        names = (*item.path.parent.parts, item.path.stem)
        return min((order[name] for name in names if name in order), default=len(order))

    return sorted(items, key=place)


def scope(nodeid: str) -> str:
    """Return what one worker process takes as a whole: a file, or a folder whose files share what is slow to start."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder.rpartition("/")[2] in _WHOLE_FOLDERS else file


def cover(cases: Sequence[Case]) -> list[int]:
    """Return positions of `cases` that together meet each pair of values, or each value where there are two columns.

    The choice is greedy: the case that meets most of what is missing, the first one of several. With one column, or
    none, all cases are chosen.
    """
    width = len(cases[0]) if cases else 0
    if width < 2:
        return list(range(len(cases)))
    met = [set(combinations(enumerate(case), min(2, width - 1))) for case in cases]
    missing = set().union(*met)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda position: len(met[position] & missing))
        chosen.append(best)
        missing -= met[best]
    return sorted(chosen)


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` positions out of `count`, from the first to the last at equal distances."""
    if count <= most:
        return list(range(count))
    return [position * (count - 1) // max(most - 1, 1) for position in range(most)]


def _chosen(cases: list[pytest.Function]) -> list[pytest.Function]:
    test = cases[0]
    if test.get_closest_marker("front_ends") is None:
        cases = [case for case in cases if case.callspec.params.get("environment", NEWEST) == NEWEST] or cases
    if test.get_closest_marker("product") is not None:
        return cases
    for name in _WAYS_TO_START:
        ways = sorted({case.callspec.params[name] for case in cases if name in case.callspec.params})
        if len(ways) > 1:
            turn = ways[zlib.crc32(test.originalname.encode()) % len(ways)]
            cases = [case for case in cases if case.callspec.params[name] == turn]
    cases = [cases[at] for at in cover(_positions(cases))]
    sample = test.get_closest_marker("sample")
    if sample is not None:
        cases = [cases[at] for at in spread(len(cases), sample.args[0])]
    elif test.get_closest_marker("slow") is not None:
        cases = [cases[at] for at in spread(len(cases), MOST_SLOW)]
    return cases


def _is_left_out(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in _LEFT_OUT)


def _positions(cases: Sequence[pytest.Function]) -> list[Case]:
    """Return for each case which value it has of each parameter that varies by itself.

    Names of one `parametrize` vary together. Values are told apart by identity: they need not be comparable.
    """
    together: list[tuple[str, ...]] = []
    for mark in cases[0].iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        together.append(tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names))
    known = {name for names in together for name in names}
    together += [(name,) for name in cases[0].callspec.params if name not in known]  # of fixtures
    columns = []
    for names in together:
        seen: dict[tuple[int, ...], int] = {}
        values = (tuple(id(case.callspec.params.get(name)) for name in names) for case in cases)
        column = [seen.setdefault(value, len(seen)) for value in values]
        if len(seen) > 1:
            columns.append(column)
    return list(zip(*columns, strict=True)) if columns else [() for _ in cases]
