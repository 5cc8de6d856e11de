"""A guard against launches that became several times slower; tests/benchmarks/launch.py has the figures themselves."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import launch as benchmark

ROUNDS = 7


@pytest.mark.slow
def test_a_warm_launch_of_two_ranks_takes_tens_of_milliseconds(start_method: str) -> None:
    benchmark.total_s(benchmark.empty, start_method)
    empty = statistics.median(benchmark.total_s(benchmark.empty, start_method) for _ in range(ROUNDS))
    group = statistics.median(benchmark.total_s(benchmark.group, start_method) for _ in range(ROUNDS))
    assert empty < 5 * 0.020
    assert group < 5 * 0.040


@pytest.mark.slow
def test_the_first_ddp_step_is_done_soon_after_a_launch(start_method: str) -> None:
    benchmark.to_first_step_s(start_method)
    assert statistics.median(benchmark.to_first_step_s(start_method) for _ in range(ROUNDS)) < 5 * 0.3
