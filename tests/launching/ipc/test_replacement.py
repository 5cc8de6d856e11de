"""A function that is made early takes the place of the function that is there when it is put in place."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from nbaccel.launching.ipc.import_hooks import Replacement


def _twice(function: Callable[[], int]) -> Callable[[], int]:
    return lambda: 2 * function()


def test_nothing_changes_before_it_is_put_in_place() -> None:
    module = SimpleNamespace(number=lambda: 1)
    replacement = Replacement([module], "number", _twice)
    assert module.number() == 1
    replacement()
    assert module.number() == 2


def test_all_holders_get_the_same_function() -> None:
    package, module = SimpleNamespace(number=lambda: 1), SimpleNamespace()
    Replacement([package, module], "number", _twice)()
    assert package.number is module.number


def test_a_function_that_has_come_there_since_is_the_one_that_is_wrapped() -> None:
    module = SimpleNamespace(number=lambda: 1)
    replacement = Replacement([module], "number", _twice)
    module.number = lambda: 5
    replacement()
    assert module.number() == 10
