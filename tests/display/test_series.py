from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, strategies as st

from nbaccel.display.series import Line, Series


def filled(values: list[float], capacity: int = 512) -> Series:
    series = Series(capacity)
    for step, value in enumerate(values):
        series.add(0, step, value)
    return series


def test_few_values_are_kept_exactly() -> None:
    assert filled([3.0, 1.0, 2.0]).line(0) == Line((0, 1, 2), (3.0, 1.0, 2.0), (3.0, 1.0, 2.0), (3.0, 1.0, 2.0))


def test_values_of_one_step_are_one_point() -> None:
    series = Series()
    for value in (1.0, 2.0, 6.0):
        series.add(0, 7, value)
    assert series.line(0) == Line((7,), (3.0,), (1.0,), (6.0,))


@given(st.lists(st.tuples(st.integers(0, 5_000), st.floats(-1e6, 1e6)), min_size=1, max_size=300), st.integers(1, 40))
def test_however_thin_nothing_is_counted_twice_and_no_spike_is_lost(
    values: list[tuple[int, float]], capacity: int
) -> None:
    series = Series(capacity)
    for step, value in values:  # in any order of steps
        series.add(0, step, value)
    line = series.line(0)
    assert len(line) <= capacity
    assert (min(line.low), max(line.high)) == (min(v for _, v in values), max(v for _, v in values))
    assert list(line.step) == sorted(set(line.step))
    assert line.step[0] == min(step for step, _ in values)
    counts = [count for track in series._tracks.values() for _, count, *_ in track.rows()]
    assert sum(counts) == len(values)
    assert math.fsum(mean * count for mean, count in zip(line.mean, counts, strict=True)) == pytest.approx(
        math.fsum(value for _, value in values), abs=1e-3
    )


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5_000), st.floats(-1e6, 1e6)), min_size=1, max_size=300),
    st.integers(1, 40),
)
def test_a_coarser_copy_holds_the_same_values_in_fewer_points(values: list[tuple[int, int, float]], most: int) -> None:
    series = Series()
    for rank, step, value in values:
        series.add(rank, step, value)
    copy = series.coarser(most)
    assert copy.ranks == series.ranks
    for rank in series.ranks:
        fine, coarse = series.line(rank), copy.line(rank)
        assert len(coarse) <= most
        assert (min(fine.low), max(fine.high)) == (min(coarse.low), max(coarse.high))
        assert set(coarse.step) <= set(fine.step)
        counts = [sum(count for _, count, *_ in one._tracks[rank].rows()) for one in (series, copy)]
        assert counts[0] == counts[1]
    assert (copy.lowest, copy.highest, copy.last) == (series.lowest, series.highest, series.last)
    if series.buckets <= most:
        assert all(copy.line(rank) == series.line(rank) for rank in series.ranks)


def test_a_coarser_copy_does_not_change_with_the_curve() -> None:
    series = filled([1.0] * 100)
    copy = series.coarser(10)
    series.add(0, 100, 9.0)
    assert copy.highest == 1.0
    assert copy.last == {0: 1.0}


def test_a_long_run_keeps_its_shape() -> None:
    line = filled([math.sin(step / 1e4) for step in range(100_000)], capacity=256).line(0)
    assert 128 <= len(line) <= 256
    assert max(abs(mean - math.sin(step / 1e4)) for step, mean in zip(line.step, line.mean, strict=True)) < 0.05


def test_the_mean_over_ranks_is_taken_where_all_have_values() -> None:
    series = Series()
    for step in range(4):
        series.add(0, step, 1.0)
    for step in range(2):
        series.add(1, step, 3.0)
    assert series.mean() == Line((0, 1), (2.0, 2.0), (1.0, 1.0), (3.0, 3.0))
    assert len(series.line(0)) == 4


def test_ranks_that_share_no_step_are_still_drawn() -> None:
    series = Series()
    series.add(0, 0, 1.0)
    series.add(1, 1, 3.0)
    assert series.mean().mean == (1.0, 3.0)


def test_ranks_of_unequal_length_share_their_buckets() -> None:
    series = Series(capacity=16)
    for step in range(3):
        series.add(1, step, 5.0)
    for step in range(1000):
        series.add(0, step, 1.0)
    assert series.mean().mean == (3.0,)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_remembered_and_not_drawn(value: float) -> None:
    series = filled([1.0, value, 2.0, value])
    assert series.line(0).mean == (1.0, 2.0)
    assert series.not_finite == {0: 1}
    assert math.isnan(series.latest)


def test_a_rank_that_has_only_non_numbers_has_no_line() -> None:
    series = filled([math.nan, math.nan])
    assert (len(series.line(0)), len(series.mean()), series.ranks) == (0, 0, [0])
    assert math.isnan(series.lowest)


def test_lowest_highest_and_latest_survive_thinning() -> None:
    numbers = [random.Random(step).random() for step in range(5_000)]
    series = filled(numbers, capacity=16)
    assert (series.lowest, series.highest, series.latest) == (min(numbers), max(numbers), numbers[-1])
    assert series.newest == {0: 4_999}
