"""Unmodified loops whose batches come in parts, as after a run that ran out of memory, train as with whole batches.

Or they end in a sentence before they train otherwise. A loop that counts its rounds by itself counts parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from train.raw_loop.loops import LOOPS, Loop, Values, ends, net, points, sgd
from train.raw_loop.test_loops import differences, in_one_process

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
    "checkpoint_reentrant", "batch_used_twice", "called_again_from_another_line", "mean_times_the_number_of_samples",
}  # fmt: skip

TRAINS = OFTEN - {"accumulation", "gan_with_r1", "update_by_hand", "mean_times_the_number_of_samples"}
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


@pytest.mark.filterwarnings("ignore:var")
def test_a_mean_times_its_samples_is_seen_where_parts_can_be_uneven() -> None:
    expected, _ = mean_times_samples()
    for weights in run_ranks(2, _watched, mean_times_samples):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def mean_times_samples() -> Values:
    """Batches of 16, which come in parts of 4: long enough for one to be shorter, and none of a single sample."""
    torch.manual_seed(0)
    model = net().double()
    optimizer, printed = sgd(model), []
    for x, y in DataLoader(points(48), batch_size=16):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.double()), y.double()) * len(x) / 26
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return ends(model), printed


def test_gradients_that_a_loop_never_drops_are_there_in_the_next_batch() -> None:
    expected, _ = never_drops()
    for weights in run_ranks(2, _watched, never_drops):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


def never_drops() -> Values:
    torch.manual_seed(0)
    model = net().double()
    optimizer = sgd(model)
    for x, y in DataLoader(points(48), batch_size=16):
        torch.nn.functional.mse_loss(model(x.double()), y.double()).backward()
        optimizer.step()
    return ends(model), []


def _watched(loop: Callable[[], Values]) -> list[Tensor]:
    watch = RawLoopTraining(World.from_env(), RunSettings(split=PARTS))
    watch.begin(None)
    try:
        weights, _ = loop()
        watch.end()
        return weights
    finally:
        watch.stop()


def _in_a_rank(loop: Loop) -> list[Tensor]:
    return _watched(loop.run)
