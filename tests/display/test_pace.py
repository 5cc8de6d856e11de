from __future__ import annotations

import pytest

from nbaccel.display.course import Pace


def test_nothing_is_known_before_two_steps() -> None:
    pace = Pace()
    assert (pace.steps_per_s, pace.seconds_for(0.5)) == (None, None)
    pace.add(1.0, 1, 0.1)
    assert (pace.steps_per_s, pace.seconds_for(0.5)) == (None, None)


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    for step in range(100):
        pace.add(step * 1.0, step)
    for step in range(100):
        pace.add(100 + step * 0.25, 100 + step)
    assert pace.steps_per_s == pytest.approx(4.0, rel=0.05)


def test_steps_longer_than_the_window_count_by_themselves() -> None:
    pace = Pace()
    for step in range(4):
        pace.add(step * 60.0, step, step / 10)
    assert pace.steps_per_s == pytest.approx(1 / 60)
    assert pace.seconds_for(0.7) == pytest.approx(7 * 60.0)


def test_a_count_that_begins_anew_gives_no_negative_pace() -> None:
    pace = Pace()
    for at_s, step in ((1.0, 1), (2.0, 2), (3.0, 3), (11.0, 1)):
        pace.add(at_s, step)
    assert pace.steps_per_s is None
    pace.add(13.0, 3)
    assert pace.steps_per_s == pytest.approx(1.0)


def test_an_epoch_that_ends_starts_the_next_arrival() -> None:
    pace = Pace()
    for step, done in ((8, 0.8), (9, 0.9), (10, 1.0), (11, 0.1), (12, 0.2)):
        pace.add(float(step), step, done)
    assert pace.seconds_for(0.8) == pytest.approx(8.0)
