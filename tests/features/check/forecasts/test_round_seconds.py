"""The seconds of a round of the whole run, from those of a few rounds."""

from __future__ import annotations

import math

import pytest

from nbaccel.features.check.forecasts.round_seconds import Sample, round_seconds


def test_the_first_round_of_all_is_warm_up() -> None:
    found = round_seconds([Sample(9.0), Sample(1.0), Sample(1.2)], None)
    assert found.mean_s == pytest.approx(1.1)
    assert found.warm_up_s == pytest.approx(7.9)
    assert found.error_s == pytest.approx(0.1, rel=0.01)


def test_a_round_is_taken_at_the_mean_size() -> None:
    samples = [Sample(5.0 + 50, size=50.0), Sample(1.0 + 10, size=10.0), Sample(1.0 + 2, size=2.0)]
    found = round_seconds(samples, 6.0)
    assert found.mean_s == pytest.approx(7.0)
    assert found.warm_up_s == pytest.approx(4.0)


def test_a_line_through_sizes_has_no_negative_parts() -> None:
    falling = [Sample(1.0, size=9.0), Sample(1.0, size=9.0), Sample(2.0, size=1.0)]
    assert round_seconds(falling, 5.0).mean_s == pytest.approx(1.5)
    steep = [Sample(9.0, size=3.0), Sample(9.0, size=3.0), Sample(1.0, size=1.0)]
    assert 0 < round_seconds(steep, 0.5).mean_s < 1


def test_waiting_for_the_first_batch_of_a_pass_is_not_that_of_each_batch() -> None:
    samples = [Sample(1.0, 7.0, None, True), Sample(1.0, 0.5), Sample(1.0, 7.0, None, True), Sample(1.0, 0.5)]
    assert round_seconds(samples, None).mean_s == pytest.approx(1.5)
    assert round_seconds(samples, None, workers=2).mean_s == pytest.approx(1.5)


def test_no_sample_takes_no_time() -> None:
    assert round_seconds([], None).mean_s == 0
    assert not math.isnan(round_seconds([Sample(0.0)] * 4, None).error_s)


def test_rounds_that_differ_by_chance_are_taken_at_their_mean() -> None:
    chance = [0.4, 0.7, 1.0, 1.3, 1.6]
    samples = [Sample((1.0 + size) * each, size=size) for size in (1.0, 9.0) for each in chance * 2]
    found = round_seconds(samples, 3.0, warming=0)
    assert found.mean_s == pytest.approx(4.0)
    assert found.error_s == pytest.approx(4.0 * 0.42 / math.sqrt(20), rel=0.1)


def test_the_first_half_of_many_rounds_is_warm_up() -> None:
    samples = [Sample(2.0 if number < 15 else 1.0) for number in range(30)]
    found = round_seconds(samples, None)
    assert found.mean_s == pytest.approx(1.0)
    assert found.warm_up_s == pytest.approx(15.0)
