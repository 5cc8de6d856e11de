"""Calls at the end of a task: all of them when it finished, what takes their place when it failed, and none twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nbaccel.base.task_end import before_results_leave, finish_stopped_task, finish_task, forget_task
from nbaccel.launching.launcher import Launcher


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    forget_task()


def _fail() -> None:
    raise ArithmeticError("no peer")


def test_a_finished_task_makes_its_calls_once_and_in_their_order() -> None:
    made: list[str] = []
    for name in ("first", "second"):
        before_results_leave(lambda name=name: made.append(name), _fail)
    finish_task()
    finish_task()
    forget_task()
    assert made == ["first", "second"]


def test_a_failed_task_leaves_no_call_to_the_next_one() -> None:
    made: list[str] = []
    before_results_leave(_fail, lambda: made.append("let go"))
    forget_task()
    finish_task()
    assert made == ["let go"]


def test_a_stopped_task_whose_model_is_not_whole_says_why_and_forgets_the_rest() -> None:
    made: list[str] = []
    before_results_leave(_fail, lambda: made.append("not this one"))
    before_results_leave(lambda: made.append("nor this one"), lambda: made.append("let go"))
    with pytest.warns(UserWarning, match=r"is not whole \(ArithmeticError: no peer\): make it anew"):
        finish_stopped_task()
    assert made == ["let go"]


def test_what_a_kernel_has_trained_is_whole_before_ranks_become_copies_of_it(launcher: Launcher) -> None:
    made: list[str] = []
    before_results_leave(lambda: made.append("whole"), _fail)
    with launcher.turn():
        assert made == ["whole"]
