"""A cell whose kernel is killed at random moments, and which goes on in a new one, ends as if nothing had happened."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from features.cell_checkpoints.forked_kernels import ForkedKernels
from features.cell_checkpoints.killed_runs import KilledRuns
from features.cell_checkpoints.killed_shapes import IN_OTHER_NUMBERS, KILLED
from kernel.harness import RealKernel

KILLS = int(os.environ.get("NBACCEL_TESTS_KILLS", "10"))
"""Of each shape, in each number of ranks."""

SEED = int(os.environ.get("NBACCEL_TESTS_SEED", random.randrange(2**32)))
"""Of the moments; a test that fails prints it."""


@pytest.fixture(scope="session")
def forked_kernels() -> Iterator[ForkedKernels]:
    with ForkedKernels() as kernels:
        yield kernels


@pytest.fixture
def new_kernel(forked_kernels: ForkedKernels, tmp_path: Path) -> Iterator[Callable[[], RealKernel]]:
    """Starts kernels in the test's folder."""
    made: list[RealKernel] = []

    def make() -> RealKernel:
        made.append(RealKernel(forked_kernels, tmp_path))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for kernel in made:
        kernel.close()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("shape", KILLED)
def test_a_cell_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(
    shape: str, n: int, new_kernel: Callable[[], RealKernel], tmp_path: Path
) -> None:
    runs = KilledRuns(new_kernel, tmp_path, KILLED[shape], SEED)
    expected = runs.undisturbed(n)
    while runs.kills < KILLS:
        found = runs.killed([n], KILLS - runs.kills)
        print(*runs.told, sep="\n")
        assert found.different(expected) == []
        assert expected.printed.endswith(found.printed)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", IN_OTHER_NUMBERS)
def test_a_cell_that_goes_on_in_another_number_of_ranks_is_equal_to_rounding(
    shape: str, new_kernel: Callable[[], RealKernel], tmp_path: Path
) -> None:
    runs = KilledRuns(new_kernel, tmp_path, IN_OTHER_NUMBERS[shape], SEED)
    expected = runs.undisturbed(2)
    found = runs.killed([2, 1, 3], KILLS)
    print(*runs.told, sep="\n")
    assert found.different(expected, equal_to_rounding) == []


def equal_to_rounding(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal_to_rounding, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-12)
    return bool(one == other)
