"""Unmodified loops end in two and three ranks as in one process, whether their batches are cut or not (see `loops`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from nbaccel.errors import RanksFailed
from nbaccel.settings import RunSettings
from nbaccel.testing import run_ranks
from nbaccel.train.implicit.loop import ImplicitTraining
from nbaccel.world import World
from train.implicit.loops import LOOPS, Loop, Values

TOLERANCE = 1e-12
"""Of a number, or of one where the number is smaller."""

REFUSAL = "errors.NotPrepared: "
SHOWS_PARTS = "what is shown of it is rank 0's part"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_a_loop_ends_in_ranks_as_in_one_process(loop: Loop, world_size: int, capfd: pytest.CaptureFixture[str]) -> None:
    expected, numbers = _in_one_process(loop)
    try:
        ranks = run_ranks(world_size, _in_a_rank, loop)
    except RanksFailed as error:
        if loop.may_refuse and REFUSAL in str(error):
            return
        raise
    weights, printed, were_split = zip(*ranks, strict=True)
    if loop.is_exact:
        wrong = [*_differences(weights, expected, "tensor")]
        wrong += [] if loop.shows_parts else _differences(printed, numbers, "number")
        wrong += ["nothing was said"] * (loop.shows_parts and SHOWS_PARTS not in capfd.readouterr().out)
    else:
        wrong = [*_differences(weights, weights[0], "tensor"), *_differences(printed, printed[0], "number")]
    wrong += [f"rank {rank} printed {len(its)} numbers" for rank, its in enumerate(printed) if len(its) != len(numbers)]
    wrong += [f"rank {rank}: batches cut {was}" for rank, was in enumerate(were_split) if was != loop.is_split]
    assert not wrong, "; ".join(wrong)


@cache
def _in_one_process(loop: Loop) -> Values:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in ranks; a second one costs more than it helps
    try:
        return loop.run()
    finally:
        torch.set_num_threads(threads)


def _in_a_rank(loop: Loop) -> tuple[list[Tensor], list[float], bool]:
    watch = ImplicitTraining(World.from_env(), RunSettings())
    watch.begin(None)
    try:
        weights, printed = loop.run()
        watch.end()
        return weights, printed, watch.has_split
    finally:
        watch.stop()


def _differences(ranks: Sequence[Sequence[Tensor | float]], expected: Sequence[Tensor | float], what: str) -> list[str]:
    """What is not as expected, per rank the first of each."""
    wrong = []
    for rank, values in enumerate(ranks):
        pairs = zip(values, expected, strict=False)  # their number is compared elsewhere
        far = [(place, difference) for place, pair in enumerate(pairs) if (difference := _distance(*pair)) > TOLERANCE]
        if far or len(values) != len(expected):
            place, difference = far[0] if far else (min(len(values), len(expected)), float("inf"))
            wrong.append(f"rank {rank}, {what} {place} of {len(expected)}: {difference:.1e} ({len(far)} differ)")
    return wrong


def _distance(actual: Tensor | float, expected: Tensor | float) -> float:
    """The largest difference; infinite where one is not a number or overflows and the other does not."""
    a, b = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    if a.shape != b.shape:
        return float("inf")
    apart = ((a - b).abs() / b.abs().clamp(min=1)).where((a != b) & ~(a.isnan() & b.isnan()), 0.0)
    return float(apart.nan_to_num(nan=float("inf")).max()) if a.numel() else 0.0
