"""Which micro-batches are run: by what fitted before, for samples of similar shapes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from nbaccel.features.micro_batches.sizes import GROW_AFTER, MicroBatches

IMAGE = ((3, 32, 32), ())


def text(length: int) -> tuple[tuple[int, ...], ...]:
    return (length,), (length,)


def parts(sizes: MicroBatches, count: int, shapes: tuple[tuple[int, ...], ...] = IMAGE, least: int = 1) -> list[int]:
    """A whole batch in parts."""
    taken: list[int] = []
    while sum(taken) < count:
        taken.append(sizes.next_part(count - sum(taken), shapes, least))
    return taken


def unproven(lengths: list[int]) -> int:
    """Batches of 32 texts whose shape was not proven when they came."""
    sizes, count = MicroBatches(), 0
    for length in lengths:
        count += not sizes.is_proven(32, text(length))
        sizes.prove(32, text(length))
    return count


def test_c12_a_fixed_shape_is_proven_from_the_second_step_on() -> None:
    assert unproven([512] * 1000) == 1


@pytest.mark.parametrize("seed", range(5))
def test_c12_of_ten_thousand_lognormal_lengths_few_are_unproven(seed: int) -> None:
    drawn = random.Random(seed)
    assert unproven([int(drawn.lognormvariate(5, 0.7)) + 1 for _ in range(10_000)]) <= 20


def test_what_failed_is_proven_no_longer_and_what_is_smaller_still_is() -> None:
    sizes = MicroBatches()
    sizes.prove(32, text(100))
    sizes.prove(16, text(300))
    sizes.failed(20, text(90))
    assert not sizes.is_proven(20, text(90))
    assert sizes.is_proven(16, text(300))
    assert sizes.is_proven(8, text(90))


def test_a_shape_is_proven_by_one_that_is_larger_in_every_dimension() -> None:
    sizes = MicroBatches()
    sizes.prove(8, ((4, 10),))
    assert sizes.is_proven(8, ((4, 10),))
    assert sizes.is_proven(3, ((2, 10),))
    assert not sizes.is_proven(8, ((5, 1),))
    assert not sizes.is_proven(8, ((4,),))


def test_parts_of_a_batch_are_of_about_equal_size() -> None:
    sizes = MicroBatches(ceiling=16)
    assert parts(sizes, 33) == [11, 11, 11]
    assert parts(sizes, 37) == [13, 12, 12]
    assert parts(sizes, 16) == [16]


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 2))
def test_parts_lose_no_sample_and_exceed_no_limit(count: int, ceiling: int, least: int) -> None:
    taken = parts(MicroBatches(ceiling), count, least=least)
    assert sum(taken) == count
    assert min(taken) >= min(least, count)
    assert max(taken) <= max(ceiling, 2 * least - 1)


def test_a_size_that_failed_is_halved_down_to_the_least() -> None:
    sizes = MicroBatches()
    assert [sizes.failed(size, IMAGE) for size in (37, 19, 10, 5, 3, 2, 1)] == [19, 10, 5, 3, 2, 1, 0]
    assert [sizes.failed(size, IMAGE, least=2) for size in (5, 3, 2)] == [3, 2, 0]


def test_shapes_have_sizes_of_their_own_and_larger_samples_start_from_what_smaller_ones_can() -> None:
    sizes = MicroBatches()
    sizes.failed(64, text(100))
    assert sizes.next_part(64, text(120)) == 32  # 65 to 128 are one class
    assert sizes.next_part(64, text(30)) == 64
    assert sizes.next_part(64, text(500)) == 32
    assert sizes.next_part(64, IMAGE) == 64


def test_a_size_grows_back_after_many_batches_that_fitted() -> None:
    sizes = MicroBatches()
    sizes.failed(64, IMAGE)
    sizes.failed(32, IMAGE)
    for _ in range(GROW_AFTER - 1):
        sizes.fitted(64, IMAGE)
    assert parts(sizes, 64) == [16] * 4
    sizes.fitted(64, IMAGE)
    assert parts(sizes, 64) == [32] * 2


def test_a_growth_that_failed_is_tried_again_after_twice_as_long() -> None:
    sizes = MicroBatches()
    sizes.failed(32, IMAGE)
    for patience in (GROW_AFTER, 2 * GROW_AFTER, 4 * GROW_AFTER):
        for _ in range(patience - 1):
            sizes.fitted(32, IMAGE)
        assert parts(sizes, 32) == [16, 16]
        sizes.fitted(32, IMAGE)
        assert parts(sizes, 32) == [32]
        assert sizes.failed(32, IMAGE) == 16


def test_nothing_grows_above_the_ceiling_or_without_need() -> None:
    sizes = MicroBatches(ceiling=8)
    for _ in range(3 * GROW_AFTER):
        sizes.fitted(64, IMAGE)
    assert parts(sizes, 64) == [8] * 8


def test_a_new_start_forgets_what_failed_and_the_same_one_does_not() -> None:
    sizes = MicroBatches()
    sizes.start_at(32)
    sizes.failed(32, IMAGE)
    sizes.start_at(32)
    assert sizes.next_part(64, IMAGE) == 16
    sizes.start_at(24)
    assert sizes.next_part(24, IMAGE) == 24
    with pytest.raises(ValueError, match="micro_batch_size must be at least 1, got 0"):
        sizes.start_at(0)


@pytest.mark.parametrize("limit", [3, 11, 37, 100])
def test_c13_halving_ends_at_half_of_what_fits_or_better(limit: int) -> None:
    sizes = MicroBatches()
    while (size := sizes.next_part(128, IMAGE)) > limit:
        sizes.failed(size, IMAGE)
    assert size >= limit / 2
