"""A guard against launches that became several times slower, in multiples of what two plain forks of this process take.

tests/benchmarks/launch.py has the figures themselves: 1.5 to 2 times that for a launch, on an idle machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest

from benchmarks import launch as benchmark

ROUNDS = 7


def in_forks(seconds: Callable[[], float]) -> float:
    """The median of `seconds` over that of two plain forks, measured in turns."""
    seconds()
    turns = [(seconds(), benchmark.plain_fork_s()) for _ in range(ROUNDS)]
    ours, forks = (statistics.median(column) for column in zip(*turns, strict=True))
    return ours / forks


@pytest.mark.slow
def test_a_warm_launch_of_two_ranks_takes_a_few_forks(start_method: str) -> None:
    assert in_forks(lambda: benchmark.total_s(benchmark.empty, start_method)) < 8
    assert in_forks(lambda: benchmark.total_s(benchmark.group, start_method)) < 10


@pytest.mark.slow
def test_the_first_ddp_step_is_done_soon_after_a_launch(start_method: str) -> None:
    assert in_forks(lambda: benchmark.to_first_step_s(start_method)) < 25
