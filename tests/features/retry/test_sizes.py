"""The way down: how many attempts it costs, and where it ends."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from nbaccel.base.memory_request import MemoryRequest
from nbaccel.features.retry.attempt import Attempt, AttemptShortage, ShortagePlace
from nbaccel.features.retry.search import ByRule, ByUser, Sizes, grown


def _search(start: int, fits: int, place: ShortagePlace = ShortagePlace.ELSEWHERE) -> list[int]:
    """The sizes that are tried until one fits, or none is left."""
    rule, tried, size = ByRule(), [], start
    while size:
        tried.append(size)
        if size <= fits:
            break
        size = rule.after(size, AttemptShortage("", place))
    return tried


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_halves_take_no_more_attempts_than_the_logarithm_says_and_end_above_half(start: int, fits: int) -> None:
    tried = _search(start, fits)
    assert len(tried) <= max(0, math.log2(start / fits)) + 2
    assert fits / 2 - 1 < tried[-1] <= fits or tried == [start]


@pytest.mark.parametrize(("start", "fits"), [(128, 105), (1024, 900), (64, 60)])
def test_a_backward_that_ran_out_means_that_nine_tenths_are_tried_first(start: int, fits: int) -> None:
    tried = _search(start, fits, ShortagePlace.BACKWARD)
    assert len(tried) <= 3
    assert tried[-1] >= 0.9 * fits


def _refused(used: int, line: int = 9) -> AttemptShortage:
    """64 MB were asked for in a place with a limit of 510 MB and a model of 80."""
    request = MemoryRequest(64_000_000, used, 510_000_000, parameters_bytes=80_000_000)
    return AttemptShortage("RuntimeError", ShortagePlace.BACKWARD, 1.0, request, (("train.py", line),))


def test_a_request_that_no_batch_makes_room_for_ends_the_way_down() -> None:
    rule = ByRule()
    sizes = [128]
    while sizes[-1]:
        sizes.append(rule.after(sizes[-1], _refused(480_000_000)))
    assert sizes == [128, 115, 103, 77, 38, 0]  # the first that is at most half of another one


@pytest.mark.parametrize(
    "second", [_refused(440_000_000), _refused(480_000_000, line=3), AttemptShortage("MemoryError")]
)
def test_what_may_fit_yet_is_tried(second: AttemptShortage) -> None:
    rule = ByRule()
    rule.after(128, _refused(480_000_000))
    assert rule.after(64, second) > 0


def test_a_size_that_did_fit_once_is_tried_again_whatever_the_numbers_say() -> None:
    rule = ByRule(known_to_fit=16)
    rule.after(128, _refused(480_000_000))
    assert rule.after(64, _refused(480_000_000)) >= 16


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_backward_that_runs_out_again_and_again_is_halved_too(start: int, fits: int) -> None:
    assert len(_search(start, fits, ShortagePlace.BACKWARD)) <= max(0, math.log2(start / fits)) + 5


@given(st.integers(1, 5000), st.sampled_from(ShortagePlace), st.floats(1, 1000))
def test_the_next_size_is_always_smaller(size: int, place: ShortagePlace, demand: float) -> None:
    assert 0 <= ByRule().after(size, AttemptShortage("", place, demand)) < size


def test_a_request_of_many_times_the_device_costs_one_attempt() -> None:
    assert ByRule().after(4096, AttemptShortage("", demand=10.0)) == 409


def test_a_size_that_fitted_before_is_not_passed_by() -> None:
    assert ByRule(known_to_fit=48).after(64, AttemptShortage("")) == 48
    assert ByRule(known_to_fit=64).after(64, AttemptShortage("")) == 32


def test_a_rank_that_was_not_short_leaves_it_to_the_others() -> None:
    assert ByRule().after(64, None) == 64


def test_a_user_rule_may_go_below_zero() -> None:
    assert ByUser(lambda: -3).after(2, None) == 0


@pytest.mark.parametrize(
    ("text", "demand"),
    [
        (
            "CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which "
            "8.00 GiB is free. Including non-PyTorch memory, this process has 8.00 GiB memory in use.",
            1.5,
        ),
        ("Tried to allocate 800 bytes; MemLimit allows 1000 bytes, of which 600 bytes are free.", 1.2),
        ("Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 1.00 GiB of which 3.00 MiB is free.", 1.0),
        ("CUDA error: out of memory", 1.0),
    ],
)
def test_the_numbers_of_an_allocator_are_read_from_its_error(text: str, demand: float) -> None:
    assert AttemptShortage.of(MemoryError(text)).demand == pytest.approx(demand)


def test_an_attempt_knows_where_its_memory_ran_out() -> None:
    import torch

    def in_backward(batch_size: int) -> None:
        leaf = torch.ones(2, requires_grad=True)
        leaf.register_hook(_run_out)
        leaf.sum().backward()

    def in_optimizer(batch_size: int) -> None:
        optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
        optimizer.register_step_pre_hook(_run_out)
        optimizer.step()

    def in_forward(batch_size: int) -> None:
        _run_out()

    places = [Attempt(function, 1, (), {}).shortage for function in (in_backward, in_optimizer, in_forward)]
    assert [shortage and shortage.place for shortage in places] == [
        ShortagePlace.BACKWARD,
        ShortagePlace.OPTIMIZER,
        ShortagePlace.ELSEWHERE,
    ]


def _run_out(*anything: object) -> None:
    raise MemoryError


def test_later_calls_grow_only_as_far_as_was_measured() -> None:
    sizes = Sizes(128)
    sizes.fitted(64, used=0.5)
    assert sizes.first == grown(64, 0.5) == 124
    assert sizes.way_down().after(124, AttemptShortage("")) == 64
    sizes.fitted(64)
    assert sizes.first == 64
