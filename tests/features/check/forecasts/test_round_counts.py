"""Counters foretell the rounds of a loop, and how often a period holds."""

from __future__ import annotations

import pytest

from nbaccel.features.check.forecasts.round_counts import RoundCounter, counter_of, rounds_until, times_that_hold


def test_two_values_are_a_counter_only_if_they_count_from_the_beginning() -> None:
    assert counter_of([[[1, 3, True], [2, 6, True]]]) == RoundCounter(3, 3, 1, is_late=True)
    assert counter_of([[[1, 0, False], [2, 1, False]]]) == RoundCounter(0, 1, 1)
    assert counter_of([[[1, 0, True], [2, 1, True]]]) is None, "rounds without progress"
    assert counter_of([[[1, 0, True], [2, 1, True], [3, 2, True]]]) is not None
    assert counter_of([[[1, 0, True], [2, 1, True], [3, 0, True]]]) is None
    assert counter_of([[[1, 7, False]]]) is None
    assert counter_of([]) is None


def test_a_counter_that_goes_on_in_the_next_run_does_not_restart() -> None:
    on = counter_of([[[1, 0], [2, 1], [3, 2]], [[1, 3], [2, 4], [3, 5]]])
    again = counter_of([[[1, 0], [2, 1], [3, 2]], [[1, 0], [2, 1], [3, 2]]])
    assert on is not None
    assert again is not None
    assert (on.restarts, again.restarts) == (False, True)


@pytest.mark.parametrize(
    ("first", "step", "op", "limit", "when", "rounds"),
    [
        (0, 1, ">=", 10, True, 10),
        (0, 1, ">", 10, True, 11),
        (0, 3, ">=", 10, True, 4),
        (10, -1, "<", 1, True, 10),
        (10, -1, "<=", 1, True, 9),
        (0, -1, ">=", 10, True, None),
        (20, 1, ">=", 10, True, 0),
        (0, 0.1, ">=", 1, True, 10),
        (0, 3, "==", 10, True, None),
        (0, 2, "==", 10, True, 5),
        (0, 1, "==", 10, False, None),
    ],
)
def test_rounds_until_a_limit(
    first: float, step: float, op: str, limit: float, when: bool, rounds: float | None
) -> None:
    assert rounds_until(RoundCounter(first, step, 1), op, limit, when, is_test=True) == rounds


@pytest.mark.parametrize(
    ("first", "step", "period", "remainder"), [(0, 1, 5, 0), (1, 1, 7, 3), (4, 3, 6, 1), (4, 3, 6, 0)]
)
def test_times_that_a_period_holds_are_counted(first: int, step: int, period: int, remainder: int) -> None:
    held = sum((first + step * number) % period == remainder for number in range(1000))
    assert times_that_hold(RoundCounter(first, step, 1), period, remainder, 1000) == held
    on_average = times_that_hold(RoundCounter(first, step, 1, restarts=False), period, remainder, 1000)
    assert on_average == pytest.approx(held, abs=1)
    assert times_that_hold(RoundCounter(first, step, 1), period, remainder, 10**9) == pytest.approx(
        held * 10**6, rel=0.01
    )
