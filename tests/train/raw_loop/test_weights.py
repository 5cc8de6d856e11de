"""By how much each rank's gradient counts, from what the ranks have said."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nbaccel.train.raw_loop.gradient_weights import Header, LeastCount, References, Say, factors

NONE = -1.0


def header(
    counts: Sequence[float],
    constants: Sequence[float],
    rows: Sequence[float],
    whole: float,
    part: bool = True,
    values: Sequence[float] | None = None,
) -> Header:
    """What ranks say of a loss with one term."""
    says = [Say(terms=1, shape=7, part=part, rows=own, whole=whole, values=1) for own in rows]
    losses = values or range(len(rows))
    return Header(says, [[each] for each in counts], [[each] for each in constants], [[each] for each in losses])


def weights(said: Header, references: References | None = None, of_parameters: bool = False) -> list[float] | None:
    found = factors(said, range(len(said.says)), [of_parameters], references or References())
    return None if found is None else [row[0] for row in found]


def test_a_mean_counts_by_its_elements() -> None:
    assert weights(header([3, 4], [1, 1], [3, 4], 7)) == [3 / 7, 4 / 7]


def test_a_sum_counts_fully_and_parameters_alone_evenly() -> None:
    said = header([NONE, NONE], [1, 1], [3, 4], 7)
    assert weights(said) == [1, 1]
    assert weights(said, of_parameters=True) == [0.5, 0.5]


def test_a_rank_with_nothing_but_ignored_targets_counts_nothing() -> None:
    assert weights(header([0, 5], [1, 1], [3, 4], 7)) == [0, 1]


def test_what_a_sum_is_divided_by_is_a_constant_or_of_the_batch() -> None:
    references = References()
    weights(header([NONE, NONE], [8, 8], [8, 8], 8, part=False), references)
    assert weights(header([NONE, NONE], [8, 8], [4, 4], 8), references) == [1, 1]  # still 8: a constant
    references = References()
    weights(header([NONE, NONE], [8, 8], [8, 8], 8, part=False), references)
    assert weights(header([NONE, NONE], [4, 4], [4, 4], 8), references) == [0.5, 0.5]  # shrunk as the batch: len(x)


def test_the_count_of_a_mask_is_of_the_batch_also_where_ranks_have_equal_ones_by_chance() -> None:
    references = References()
    weights(header([NONE, NONE], [25, 25], [8, 8], 8, part=False), references)
    assert weights(header([NONE, NONE], [11, 11], [4, 4], 8), references) == [0.5, 0.5]
    assert weights(header([NONE, NONE], [10, 30], [4, 4], 8), references) == [0.25, 0.75]


def test_an_annealed_factor_is_none_of_the_batch() -> None:
    references = References()
    weights(header([NONE, NONE], [1 / 0.1, 1 / 0.1], [8, 8], 8, part=False), references)
    assert weights(header([NONE, NONE], [1 / 0.15, 1 / 0.15], [4, 4], 8), references) == [1, 1]


def test_a_mean_that_is_divided_by_something_of_its_part_cannot_be_weighed() -> None:
    assert weights(header([4, 4], [2, 3], [4, 4], 8)) is None


@pytest.mark.parametrize(("values", "expected"), [([0.5, 0.5], [1, 0]), ([0.5, 0.6], [0.5, 0.5])])
def test_of_the_same_work_one_ranks_gradient_is_all_of_it(values: list[float], expected: list[float]) -> None:
    assert weights(header([8, 8], [1, 1], [8, 8], 8, part=False, values=values)) == expected


def test_losses_of_other_shapes_are_not_weighed() -> None:
    """By a branch on the samples that a rank has: of the whole batch there would be one loss."""
    said = header([3, 4], [1, 1], [3, 5], 8)
    said.says[1].shape = 8
    assert weights(said) is None


@pytest.mark.parametrize(
    ("of_whole", "constants", "is_mean"), [(24, [24, 24], True), (24, [30, 30], True), (7, [7, 7], False)]
)
def test_a_sum_that_is_divided_by_what_it_adds_up_is_a_mean(of_whole: int, constants: list[int], is_mean: bool) -> None:
    """Also where samples of the parts are twice as long, so that these have as many numbers as the whole batch."""
    references = References()
    factors(header([-25, -25], [of_whole, of_whole], [6, 6], 6, part=False), range(2), [False], references)
    parts = header([-1 - constants[0] if is_mean else -25] * 2, constants, [3, 3], 6)
    assert weights(parts, references) == ([0.5, 0.5] if is_mean else [1, 1])


def test_a_number_that_parts_of_different_sizes_share_is_the_programs_whatever_it_becomes() -> None:
    references = References()
    weights(header([NONE, NONE], [10, 10], [8, 8], 8, part=False), references)
    assert weights(header([NONE, NONE], [10, 10], [5, 3], 8), references) == [1, 1]
    assert weights(header([NONE, NONE], [5, 5], [4, 4], 8), references) == [1, 1]  # a half, as of len(x)


def test_a_number_that_goes_with_parts_of_different_sizes_adds_up_whatever_factor_it_has() -> None:
    references = References()
    weights(header([NONE, NONE], [8, 8], [8, 8], 8, part=False), references)
    assert weights(header([NONE, NONE], [50, 30], [5, 3], 8), references) == [5 / 8, 3 / 8]
    assert weights(header([NONE, NONE], [80, 80], [4, 4], 8), references) == [0.5, 0.5]


def test_a_mean_that_is_multiplied_by_its_samples_is_a_sum() -> None:
    references = References()
    weights(header([8, 8], [1 / 8, 1 / 8], [8, 8], 8, part=False), references)
    assert weights(header([5, 3], [1 / 5, 1 / 3], [5, 3], 8), references) == pytest.approx([1, 1])
    assert weights(header([4, 4], [1 / 4, 1 / 4], [4, 4], 8), references) == pytest.approx([1, 1])


def test_a_divisor_that_was_alike_by_chance_and_then_is_not_cannot_be_told() -> None:
    references = References()
    weights(header([NONE, NONE], [3, 3], [8, 8], 8, part=False), references)
    assert weights(header([NONE, NONE], [3, 3], [5, 3], 8), references) == [1, 1]
    assert weights(header([NONE, NONE], [2, 1], [5, 3], 8), references) is None


def test_an_empty_mask_divides_by_a_one_that_counts_nothing() -> None:
    said = header([NONE, NONE], [1, 3], [4, 4], 8, values=[0.0, 0.7])
    assert weights(said) == [0, 1]
    assert weights(header([NONE, NONE], [1, 3], [1, 3], 4, values=[0.0, 0.7])) == [0.25, 0.75]  # len(x)


def test_what_is_not_finite_or_not_known_is_no_count() -> None:
    references = References()
    weights(header([NONE, NONE], [10, 10], [8, 8], 8, part=False), references)
    assert weights(header([NONE, NONE], [INF, INF], [5, 3], 8), references) == [1, 1]
    assert weights(header([4, 4], [2, 3], [0, 0], 0)) is None


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("count", [4, NONE])
def test_a_factor_that_is_zero_in_some_parts_is_one_of_the_batch(count: float) -> None:
    """`loss.mean() * int(mask.sum())`, `loss * float(mask.any())`."""
    said = header([count, count], [1, 1], [4, 4], 8, values=[0.0, 0.5])
    said.says[0].zeros = 1
    assert weights(said) is None
    said.says[1].zeros = 1
    assert weights(said) is not None


def test_a_sum_that_is_multiplied_by_its_samples_is_not_added_up() -> None:
    assert weights(header([NONE, NONE], [10 / 5, 10 / 3], [5, 3], 8)) is None


def test_a_count_of_none_divides_nothing() -> None:
    assert weights(header([NONE, NONE], [0, 3], [5, 3], 8, values=[NAN, 0.5])) == [0, 1]
    assert weights(header([NONE, NONE], [0, 3], [5, 3], 8, values=[INF, 0.5])) is None


NEVER_WHOLE = [
    # a term, and what it is divided by in parts of 2 and of 1 sample; no batch was whole, and ranks have equally many
    pytest.param([4, 4], [13, 13], [26, 26], False, id="a mean times len(x) over a number"),
    pytest.param([NONE, NONE], [40, 40], [20, 20], True, id="a penalty over len(x)"),
]


@pytest.mark.parametrize(("counts", "before", "now", "of_parameters"), NEVER_WHOLE)
def test_a_factor_that_turns_out_to_go_with_the_samples_ends_the_training(
    counts: list[float], before: list[float], now: list[float], of_parameters: bool
) -> None:
    references = References()
    assert weights(header(counts, before, [2, 2], 8), references, of_parameters) is not None
    assert weights(header(counts, before, [2, 2], 8), references, of_parameters) is not None
    assert weights(header(counts, now, [1, 1], 2), references, of_parameters) is None


@pytest.mark.parametrize(
    ("counts", "constants", "of_parameters"), [([4, 4], [13, 10], False), ([NONE, NONE], [40, 20], True)]
)
def test_a_factor_that_is_annealed_does_not(counts: list[float], constants: list[float], of_parameters: bool) -> None:
    references = References()
    for constant in constants:
        assert weights(header(counts, [constant] * 2, [2, 2], 8), references, of_parameters) is not None


def test_a_sum_that_was_taken_for_one_over_a_constant_ends_where_it_becomes_another_count() -> None:
    references = References()
    assert weights(header([-7, -7], [30, 30], [2, 2], 8), references) == [1, 1]
    assert weights(header([-7, -7], [20, 20], [2, 2], 8), references) is None
    references = References()
    assert weights(header([-7, -7], [30, 30], [2, 2], 8), references) == [1, 1]
    assert weights(header([-7, -7], [7, 8], [2, 2], 8), references) is None  # a mask's


def test_a_mean_that_is_multiplied_by_as_many_as_it_has_samples_cannot_be_told_without_a_whole_batch() -> None:
    assert weights(header([4, 4], [1 / 2, 1 / 2], [2, 2], 8)) is None
    assert weights(header([5, 3], [1 / 2, 1 / 2], [5, 3], 8)) == [5 / 8, 3 / 8]


@pytest.mark.parametrize("values", [[0.5, 0.5], [0.0, 0.5]])
def test_a_count_of_one_that_may_stand_for_none_is_not_added_up(values: list[float]) -> None:
    """`loss.sum() / positives.sum().clamp(min=1)`: a part without positives has a loss as well, unless it is masked."""
    said = header([NONE, NONE], [1, 3], [4, 4], 8, values=values)
    assert weights(said) == ([0.25, 0.75] if values[0] else [0, 1])
    said.says[0].least = 1
    if values[0]:
        with pytest.raises(LeastCount):
            weights(said)
    else:
        assert weights(said) == [0, 1]


def test_a_part_of_one_sample_may_have_a_count_of_none_too() -> None:
    said = header([NONE, NONE, NONE], [1, 1, 1], [1, 2, 2], 5, values=[0.0, 0.5, 0.5])
    said.says[0].least = 2
    references = References()
    weights(header([NONE, NONE, NONE], [2, 1, 2], [3, 2, 2], 7), references)  # a count, since it differs
    assert weights(said, references) == [0, 0.5, 0.5]
    said.says[0].least = 1  # Python's max(count, 1), or len(x) and a loss of none
    with pytest.raises(LeastCount):
        weights(said, references)
    said.values[0][0] = 0.1
    assert weights(said, references) == [1 / 3, 1 / 3, 1 / 3]
    said.says[0].least = 2
    with pytest.raises(LeastCount):
        weights(said, references)


def test_a_least_count_that_has_a_factor_is_not_added_up() -> None:
    said = header([NONE, NONE], [1 / 0.3, 2 / 0.3], [4, 4], 8, values=[0.5, 0.5])
    said.says[0].least = 1
    assert weights(said) == pytest.approx([1 / 3, 2 / 3])
    said.values[0][0] = 0.0  # `0.3 * losses.sum() / max(int(mask.sum()), 1)` without any
    with pytest.raises(LeastCount):
        weights(said)
    no_loss = header([NONE, NONE], [5, 3], [5, 3], 8, values=[0.0, 0.5])  # divided by len(x)
    no_loss.says[0].least = 1
    assert weights(no_loss) == [5 / 8, 3 / 8]
    said.values[0][0] = 0.5
    said.says[0].least = 2
    with pytest.raises(LeastCount):
        weights(said)
