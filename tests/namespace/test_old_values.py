"""Names of `--out`: what a cell has left there, and what is only the notebook's from before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel.namespace.old_values import OldValues


def untouched(code: str, space: dict[str, Any], is_strict: bool = False) -> set[str]:
    """Return the names that a run of the code leaves untouched; ``stop()`` in it ends the run early."""

    def stop() -> None:
        raise TimeoutError

    names, space = list(space), space | {"stop": stop, "torch": torch}
    parts = [compile(code, "cell", "exec")]
    old = OldValues(names, space, code, parts, is_strict)
    try:
        with old.compared():
            exec(parts[0], space)
    except TimeoutError:
        pass
    assert all(name in space for name in names), "the notebook's values are there again"
    return old.untouched


@pytest.mark.parametrize(
    ("old", "code"),
    [
        ({"loss": []}, "old['loss'].append(1)"),
        ([[1], [2]], "old[0].append(2)"),
        ([1, 2], "old.append(3)"),
        ({"n": 1}, "old['n'] = 2"),
        (torch.nn.Linear(2, 1), "with torch.no_grad(): old.weight.add_(1)"),
        ({"net": torch.nn.Linear(2, 1)}, "with torch.no_grad(): old['net'].weight.add_(1)"),
        (5, "old = 5"),
        (5, "old += 1"),
        ("a", "old = 'a'"),
    ],
    ids=str,
)
def test_what_a_run_has_bound_or_changed_is_left_though_it_ends_early(old: Any, code: str) -> None:
    assert untouched(f"{code}\nstop()\nold = 7", {"old": old}) == set()


@pytest.mark.parametrize("old", [5, "a", None, [1, 2], {"n": 1}, {"loss": []}], ids=str)
def test_what_it_would_have_bound_later_is_not(old: Any) -> None:
    """A model is always left: other names may have trained it."""
    assert untouched("a = 1\nstop()\nold = a", {"old": old}) == {"old"}


@pytest.mark.parametrize("old", [5, "a", None, [1, 2]], ids=str)
def test_a_cell_at_its_end_leaves_what_is_there_and_a_run_of_a_sweep_what_it_has_bound(old: Any) -> None:
    code = "if 1 > 2:\n    old = 3"
    assert untouched(code, {"old": old}) == set()
    if type(old) is not list:
        assert untouched(code, {"old": old}, is_strict=True) == {"old"}


@pytest.mark.parametrize(
    "code",
    [
        "try: 1 / 0\nexcept ZeroDivisionError: old += 1",
        "match 1:\n    case 1: old += 1",
        "def step():\n    global old\n    old += 1\nstep()",
        "for i in range(2):\n    if i: old += 1",
        "with torch.no_grad(): old += 1",
        "print(eval('old'))",
        "assert [old for i in range(2)]",
        "class A:\n    a = old",
    ],
)
def test_a_value_that_the_cell_reads_anywhere_is_there(code: str) -> None:
    assert untouched(code, {"old": 5}, is_strict=True) == set()
