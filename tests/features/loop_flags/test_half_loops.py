"""The loops of `loops` under `-p`, and with `-a 3` beside it, end bit by bit as by hand in as many ranks, or refused.

So do those whose batches come in parts, after memory ran out: by hand they are given the same parts.
Here they begin in float32: an autocast leaves float64 as it is. `make full` has them in two and three ranks too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from features.loop_flags.by_hand import accumulated_by_hand
from features.loop_flags.half_by_hand import half_by_hand
from features.loop_flags.test_accumulated_loops import MORE_BY_HAND, OF_PARTS, REFUSED as REFUSED_WITH_BATCHES, STEPS
from nbaccel.base.settings import RunSettings
from train.raw_loop.in_turn import SOME, End, in_groups, in_ranks, watched
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
    "a_divisor_larger_than_a_part_that_becomes_smaller", "a_divisor_as_large_as_the_first_batch_that_becomes_smaller",
    "gan_with_r1", "window_of_batches_drawn_first", "steps_along_the_gradients_of_inputs",
}  # fmt: skip
"""Loops that `half_by_hand` does not follow: several backwards for a step, gradients that no optimizer steps, a scaler
or a compiled step of their own, gradients of an input (by hand with the factor), an evaluation after the optimizer is
gone. `test_precision_by_flag` has their kinds."""


OTHERWISE_WITH_BATCHES = {*MORE_BY_HAND, "two_sums_that_are_divided_otherwise"}
"""By hand the calls of one scaler for two optimizers, which step in turns, are placed otherwise. And a sum that is
divided by a number of the program is divided once more by hand, and by the flag multiplied: other bits of bfloat16."""


def in_half(loop: Loop, name: str, steps: int, by_hand: bool, split: int | None = None) -> Values:
    """What a loop ends with in this rank.  steps: batches for each step.  split: parts of each batch."""
    flags = {} if by_hand else {"raw_precision": name, "gradient_accumulation_steps": steps}
    settings = RunSettings(split=split, **flags)  # type: ignore[arg-type]
    was = torch.get_default_dtype()
    with watched(settings), ExitStack() as stack:
        stack.callback(torch.set_default_dtype, was)
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        random.seed(0)
        if by_hand and steps > 1:
            stack.enter_context(accumulated_by_hand(steps))
        if by_hand:
            stack.enter_context(half_by_hand(name))
        return loop.function()


def wrong_of(loop: Loop, name: str, steps: int, ranks: Sequence[Sequence[End]], split: int | None = None) -> list[str]:
    """What is not as it should be.  ranks: what a loop ended with in each, by the flag and by hand."""
    refusals = [REFUSED.get((name, loop.name)), REFUSED_WITH_BATCHES.get(loop.name) if steps > 1 else None]
    refusals += ["NotPrepared: "] if loop.may_refuse and len(ranks) > 1 else []
    refusals += OF_PARTS if split else []
    wrong = []
    for rank, (found, *by_hand) in enumerate(ranks):
        expected = by_hand[0] if by_hand else ""
        if isinstance(found, str):
            if not any(each and each in found for each in refusals):
                wrong.append(f"{loop.name}, rank {rank}: {found}")
        elif any(refusals[:2]):
            wrong.append(f"{loop.name}, rank {rank}: not refused")
        elif isinstance(expected, str):
            wrong.append(f"{loop.name}, rank {rank}, by hand: {expected}")
        else:
            pairs = [*zip(found[0], expected[0], strict=True), *zip(found[1], expected[1], strict=True)]
            far = [place for place, pair in enumerate(pairs) if not torch.equal(*map(_comparable, pair))]
            wrong += [f"{loop.name}, rank {rank}: {len(far)} of {len(pairs)} differ"] if far else []
    return wrong


def _comparable(value: Any) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64).nan_to_num(nan=1e300)


OTHERWISE_IN_PARTS = {"low_rank_adaptation"}
"""Gradients that no optimizer steps stay from before, so that `half_by_hand` cannot tell where a factor moves."""

PARTS = 4

ALWAYS = (
    "momentum",
    "schedule_per_step",
    "branch_by_the_content",
    "sparse_embedding",
    "hooks_on_tensors",
    "accumulation",
)


def _cases() -> Iterator[Any]:
    for world_size, name, steps in ((1, "fp16", 1), (1, "bf16", STEPS), (2, "fp16", STEPS)):
        names = [loop.name for loop in LOOPS if loop.name in ALWAYS and _is_comparable(loop, name, steps)]
        yield pytest.param("fork", world_size, name, steps, None, names, id=f"fork-{world_size}-{name}-{steps}-some")
    yield pytest.param("fork", 2, "fp16", 1, PARTS, ALWAYS, id=f"fork-2-fp16-1-in-{PARTS}-some")
    for start, world_size, name, steps in itertools.product(
        ["fork", "zygote"], [1, 2, 3], ["bf16", "fp16"], [1, STEPS]
    ):
        loops = [loop for loop in LOOPS if _is_comparable(loop, name, steps)]
        if start == "zygote" or world_size > 2:
            loops = [loop for loop in loops if loop.name in SOME]
        for place, names in enumerate(in_groups(loops)):
            case = f"{start}-{world_size}-{name}-{steps}-{place}"
            yield pytest.param(start, world_size, name, steps, None, names, marks=pytest.mark.full, id=case)
    for name in ("bf16", "fp16"):  # accumulation by hand would count parts
        loops = [loop for loop in LOOPS if _is_comparable(loop, name, 1) and loop.name not in OTHERWISE_IN_PARTS]
        for place, names in enumerate(in_groups(loops)):
            case = f"fork-2-{name}-1-in-{PARTS}-{place}"
            yield pytest.param("fork", 2, name, 1, PARTS, names, marks=pytest.mark.full, id=case)


def _is_comparable(loop: Loop, name: str, steps: int) -> bool:
    is_refused = (name, loop.name) in REFUSED or (steps > 1 and loop.name in REFUSED_WITH_BATCHES)
    return is_refused or not (loop.name in OTHERWISE_BY_HAND or (steps > 1 and loop.name in OTHERWISE_WITH_BATCHES))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of the loop by hand
@pytest.mark.filterwarnings("ignore:var")  # of single samples, as a part of a batch may be
@pytest.mark.product
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("start", "world_size", "name", "steps", "split", "names"), [*_cases()])
def test_loops_in_half_precision_end_as_by_hand_or_are_refused(
    start: str, world_size: int, name: str, steps: int, split: int | None, names: Sequence[str]
) -> None:
    runs = [partial(in_half, name=name, steps=steps, by_hand=by_hand, split=split) for by_hand in (False, True)]
    ends = in_ranks(start, world_size, names, *runs)
    loops = [loop for loop in LOOPS if loop.name in ends]
    assert not [wrong for loop in loops for wrong in wrong_of(loop, name, steps, ends[loop.name], split)]


@pytest.mark.parametrize("name", ["an_optimizer_for_each_phase", "sparse_embedding"])
def test_loops_that_follow_each_other_in_one_process_end_as_the_first(name: str) -> None:
    """Also the reference: an optimizer that is not collected yet has the same parameters as the one that steps."""
    loop = next(each for each in LOOPS if each.name == name)
    (weights, _), *others = (in_half(loop, "fp16", 1, by_hand) for by_hand in (True, False, True, False))
    for found, _ in others:
        torch.testing.assert_close(found, weights, rtol=0, atol=0)
