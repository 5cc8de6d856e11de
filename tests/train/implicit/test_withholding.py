"""Unmodified loops whose batches come in parts, as after a run that ran out of memory, train as with whole batches.

Or they end in a sentence before they train otherwise. A loop that counts its rounds by itself counts parts.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from nbaccel.errors import RanksFailed
from nbaccel.settings import RunSettings
from nbaccel.testing import run_ranks
from nbaccel.train.implicit.loop import ImplicitTraining
from nbaccel.world import World
from train.implicit.loops import LOOPS, Loop
from train.implicit.test_loops import differences, in_one_process

PARTS = 4  # of all ranks together

COUNTS_ROUNDS = {
    "average_of_weights", "branch_by_the_step", "criterion_after_criterion", "early_break", "iterator_kept_over_epochs",
    "next_by_hand", "teacher_forcing",
}  # fmt: skip
"""Their next round is another batch, or another draw: with parts they do otherwise, as it is said at the restart."""

WEIGHS_BY_SAMPLES = {"padding_with_a_mask", "sum_over_fixed_points"}
"""Their terms are not over samples, and whole batches, which would show it, never come."""

REFUSALS = ("errors.CannotCut: memory ran out", "errors.NotPrepared: ", "Memory ran out with whole batches")

OFTEN = {
    "sgd", "adamw_foreach", "grad_scaler_with_an_overflow", "clipping_by_norm", "schedule_per_step", "sum_alone",
    "accumulation", "gan_with_r1", "padding_that_counts", "no_automatic_batches", "update_by_hand",
    "checkpoint_reentrant",
}  # fmt: skip

TRAINS = OFTEN - {"accumulation", "gan_with_r1", "update_by_hand"}
"""Of these, those that end as with whole batches."""


def _marked(loop: Loop) -> Any:
    return pytest.param(loop, id=loop.name, marks=[] if loop.name in OFTEN else [pytest.mark.full])


@pytest.mark.filterwarnings("ignore:var")  # of single samples
@pytest.mark.parametrize("loop", [_marked(loop) for loop in LOOPS])
def test_a_loop_in_parts_ends_as_with_whole_batches_or_in_a_sentence(loop: Loop) -> None:
    expected, _ = in_one_process(loop)
    try:
        ranks = run_ranks(2, _in_a_rank, loop)
    except RanksFailed as error:
        if loop.name not in TRAINS and any(refusal in str(error) for refusal in REFUSALS):
            return
        raise
    is_exact = loop.is_exact and loop.name not in COUNTS_ROUNDS | WEIGHS_BY_SAMPLES
    wrong = differences(ranks, expected if is_exact else ranks[0], "tensor")
    assert not wrong, "; ".join(wrong)


def _in_a_rank(loop: Loop) -> list[Tensor]:
    watch = ImplicitTraining(World.from_env(), RunSettings(split=PARTS))
    watch.begin(None)
    try:
        weights, _ = loop.run()
        watch.end()
        return weights
    finally:
        watch.stop()
