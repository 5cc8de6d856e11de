"""Steps, times and sizes as people write them."""

from __future__ import annotations

import pytest

from nbaccel.base.quantities import Period, Steps, parse_interval, parse_seconds, three_digits


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("500", Steps(500)),
        ("500steps", Steps(500)),
        ("1 step", Steps(1)),
        (20, Steps(20)),
        ("10min", Period(600)),
        ("1h30min", Period(5400)),
        ("11h30m", Period(41400)),
        ("90 s", Period(90)),
        ("0.5h", Period(1800)),
    ],
)
def test_intervals_are_steps_or_times(text: str | int, meaning: object) -> None:
    assert parse_interval(text) == meaning


@pytest.mark.parametrize("text", ["", "0", "0min", "often", "10 minutes or so", "10 mins", "-5", "-5min", "5 min ago"])
def test_other_intervals_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="as in 500, 500steps, 10min"):
        parse_interval(text)


@pytest.mark.parametrize("text", ["", "90", "0s", "soon", "1h and a half"])
def test_a_time_has_a_unit(text: str) -> None:
    with pytest.raises(ValueError, match="as in 11h30m, 10min, 90s"):
        parse_seconds(text)


@pytest.mark.parametrize(("size", "text"), [(999, "999 bytes"), (1_500, "1.5 kB"), (2_345_678_901, "2.35 GB")])
def test_sizes_are_shown_in_units(size: int, text: str) -> None:
    assert three_digits(size) == text
