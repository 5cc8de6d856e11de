"""The plan against meters that are known: straight lines, noise, jumps, bends. Criteria 1, 2 and 4 of recovery."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from nbaccel.features.batch_size.planner import SizeSearch, Trial

Meter = Callable[[int], float]
"""From a batch size to the share of the limit it takes; it fits up to a share of 1."""


def search(plan: SizeSearch, used: Meter, seen: Meter | None = None) -> SizeSearch:
    """Lead `plan` to its end on a device where a size takes `used`, of which the meter shows what is `seen`."""
    seen = seen or used
    while (size := plan.next_size()) is not None:
        fits = used(size) <= 1
        plan.note(Trial(size, fits, seen(size) if fits else None))
    return plan


def line(largest: int, fixed: float = 0.2) -> Meter:
    """`largest` samples fit, and the next one does not; `fixed` is the share that does not depend on the batch."""
    return lambda size: fixed + (1 - fixed) * size / (largest + 0.5)


def failures(plan: SizeSearch) -> int:
    return sum(not trial.fits for trial in plan.trials)


@pytest.mark.parametrize("fixed", [0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize(("largest", "cap"), [*product([1, 2, 3, 13, 37, 100, 549, 1000, 3000], [128, 1024, 4096])])
def test_c01_a_straight_line_takes_six_trials_and_one_failure(largest: int, cap: int, fixed: float) -> None:
    plan = search(SizeSearch(cap), line(largest, fixed))
    reachable = min(largest, cap)
    assert len(plan.trials) <= 6
    assert failures(plan) <= 1
    assert reachable >= plan.best >= min(0.97 * reachable, reachable - 2)


def test_c01_what_is_found_was_run_and_did_fit() -> None:
    for largest in range(1, 300, 7):
        plan = search(SizeSearch(4096), line(largest))
        assert Trial(plan.best, True, line(largest)(plan.best)) in plan.trials


def _noisy(used: Meter, seed: int) -> Meter:
    noise = random.Random(seed)
    return lambda size: used(size) * (1 + noise.uniform(-0.02, 0.02))


def _jumping(largest: int) -> Meter:
    """From six tenths of the largest size on, a larger workspace is chosen: 8 % more."""
    straight = line(largest)
    return lambda size: straight(size) / (1.08 if size < 0.6 * largest else 1)


def _bent(largest: int) -> Meter:
    """b * n * (1 + 0.002 * n): attention without flash, or a sort."""
    return lambda size: 0.2 + 0.8 * size * (1 + 0.002 * size) / ((largest + 0.5) * (1 + 0.002 * (largest + 0.5)))


@pytest.mark.parametrize("largest", [3, 37, 100, 1000, 3000])
@pytest.mark.parametrize("kind", ["noise", "jump", "bend"])
def test_c02_a_meter_that_is_not_straight_takes_twelve_trials_at_most(kind: str, largest: int) -> None:
    used = {"noise": line, "jump": _jumping, "bend": _bent}[kind](largest)
    for seed in range(100):
        plan = search(SizeSearch(4096), used, _noisy(used, seed) if kind == "noise" else None)
        assert len(plan.trials) <= 12
        assert largest >= plan.best >= min(0.94 * largest, largest - 2), (kind, seed, plan.trials)


def test_c04_a_cap_that_fits_is_found_without_a_failure() -> None:
    for cap in (1, 2, 5, 50, 64, 100, 1000):
        plan = search(SizeSearch(cap), line(3000))
        assert (plan.best, failures(plan)) == (cap, 0)


def test_c04_where_nothing_fits_it_is_one_sample_that_says_so() -> None:
    plan = search(SizeSearch(4096), lambda size: 1.1 + size)
    assert plan.best == 0
    assert [trial.size for trial in plan.trials] == [2, 1]


def test_one_sample_is_only_tried_where_two_do_not_fit() -> None:
    assert [trial.size for trial in search(SizeSearch(4096), line(1)).trials] == [2, 1]
    assert 1 not in [trial.size for trial in search(SizeSearch(4096), line(50)).trials]


def test_a_device_without_a_meter_is_searched_by_trial_and_error() -> None:
    for largest in (1, 7, 37, 100, 1000, 3000):
        plan = SizeSearch(4096)
        while (size := plan.next_size()) is not None:
            plan.note(Trial(size, fits=size <= largest))
        assert largest >= plan.best >= 0.9 * largest - 1, (largest, plan.trials)


def test_a_line_through_two_tiny_trials_is_not_followed_far() -> None:
    plan = SizeSearch(1_000_000)
    for size, used in ((2, 0.5), (3, 0.500001)):
        assert plan.next_size() == size
        plan.note(Trial(size, True, used))
    assert plan.next_size() == 16 * 3


def test_sizes_are_multiples_of_eight_where_that_costs_little() -> None:
    assert search(SizeSearch(4096), line(1000)).best % 8 == 0
    assert search(SizeSearch(4096), line(61)).best == 61


def test_memory_that_does_not_grow_with_the_batch_is_searched_up_to_the_cap() -> None:
    assert search(SizeSearch(1000), lambda size: 0.5).best == 1000


def test_the_next_size_lies_between_what_fits_and_what_does_not() -> None:
    for seed in range(50):
        plan = SizeSearch(500)
        used, dice = line(random.Random(seed).randrange(1, 400)), random.Random(seed)
        while (size := plan.next_size()) is not None:
            assert plan.best < size < plan.too_large
            plan.note(Trial(size, used(size) <= 1, dice.random()))  # a meter that shows nothing but nonsense


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="cap must be at least 1, got 0"):
        SizeSearch(0)
