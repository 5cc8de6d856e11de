"""The loops of `loops` under `-p` end bit by bit as with an autocast and a scaler by hand in as many ranks, or refused.

Here they begin in float32: an autocast leaves float64 as it is. `make full` has them in two and three ranks too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import FlagConflict, RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.raw_loop.single_rank import SingleRankWatch
from nbaccel.train.setup import loop_changes
from train.raw_loop.half_by_hand import half_by_hand
from train.raw_loop.loops import LOOPS, Loop, Values

REFUSED = {
    ("fp16", "lbfgs_with_line_search"): "cannot step with a closure",
    ("fp16", "autocast"): "an autocast of its own, in bfloat16",
    ("fp16", "hooks_on_tensors"): "a hook on a parameter's gradient",
    ("fp16", "gradients_clamped_by_hooks"): "a hook on a parameter's gradient",
    ("fp16", "autograd_grad_of_parameters"): "this loop steps by hand",
}

OTHERWISE_BY_HAND = {
    "autograd_grad_of_parameters", "update_by_hand", "compiled_loss", "compiled_step", "batch_norm",
    "second_order_inner_step", "gradients_by_torch_func_beside_it", "wgan_with_gradient_penalty",
    "grad_scaler_with_an_overflow", "sam", "accumulation", "accumulation_with_an_incomplete_window",
    "loss_printed_without_its_divisor", "grad_scaler", "grad_scaler_in_single_precision", "adversarial_examples",
    "gan_with_r1", "window_of_batches_drawn_first",
}  # fmt: skip
"""Loops that `half_by_hand` does not follow: several backwards for a step, gradients that no optimizer steps, a scaler
or a compiled step of their own, an evaluation after the optimizer is gone. `test_precision_by_flag` has their kinds."""


def in_half(loop: Loop, name: str, by_hand: bool) -> Values:
    """What a loop ends with in this rank."""
    settings, world = RunSettings(raw_precision=None if by_hand else name), World.from_env()
    changes = loop_changes(settings)
    watch = RawLoopTraining(world, settings, changes) if world.is_distributed else SingleRankWatch(changes)
    was = torch.get_default_dtype()
    watch.begin(None)
    try:
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        random.seed(0)
        with half_by_hand(name) if by_hand else nullcontext():
            found = loop.function()
        watch.end()
        return found
    finally:
        torch.set_default_dtype(was)
        watch.stop()


def _cases() -> Iterator[Any]:
    for world_size, name, loop in itertools.product([1, 2, 3], ["bf16", "fp16"], LOOPS):
        if (name, loop.name) in REFUSED or loop.name not in OTHERWISE_BY_HAND:
            marks = [pytest.mark.full] if world_size > 1 else []
            yield pytest.param(world_size, name, loop, marks=marks, id=f"{name}-{world_size}-{loop.name}")


@pytest.mark.sample(10)
@pytest.mark.parametrize(("world_size", "name", "loop"), [*_cases()])
def test_a_loop_in_half_precision_ends_as_by_hand_or_is_refused(world_size: int, name: str, loop: Loop) -> None:
    refusal = REFUSED.get((name, loop.name))
    try:
        ranks = run_ranks(world_size, in_half, loop, name, False)
    except (FlagConflict, RanksFailed) as error:
        if (refusal and refusal in str(error)) or (loop.may_refuse and world_size > 1):
            return
        raise
    assert refusal is None
    by_hand = run_ranks(world_size, in_half, loop, name, True)
    for (found, printed), (expected, numbers) in zip(ranks, by_hand, strict=True):
        for mine, its in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(printed, numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["an_optimizer_for_each_phase", "sparse_embedding"])
def test_loops_that_follow_each_other_in_one_process_end_as_the_first(name: str) -> None:
    """Also the reference: an optimizer that is not collected yet has the same parameters as the one that steps."""
    loop = next(each for each in LOOPS if each.name == name)
    (weights, _), *others = (in_half(loop, "fp16", by_hand) for by_hand in (True, False, True, False))
    for found, _ in others:
        torch.testing.assert_close(found, weights, rtol=0, atol=0)
