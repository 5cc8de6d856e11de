"""The loops of `loops` under `-a 3` end as with accumulation by hand, or in a sentence, in one to three ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch

from features.loop_flags.by_hand import accumulated_by_hand
from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import FlagConflict, NotPrepared, RanksFailed
from nbaccel.launching import api
from nbaccel.launching.launcher import Launcher
from train.raw_loop import in_turn
from train.raw_loop.in_turn import SOME, End, in_groups, in_ranks, watched
from train.raw_loop.loops import LOOPS, Loop, Values
from train.raw_loop.test_deferred_calls import DEPENDS_ON_PARTS
from train.raw_loop.test_loops import REFUSAL, SETUP, differences, in_one_process

STEPS = 3

REFUSED = {
    "lbfgs_with_line_search": "computes its losses itself (a closure)",
    "accumulation": "takes several batches for one step by itself",
    "accumulation_with_an_incomplete_window": "takes several batches for one step by itself",
    "loss_printed_without_its_divisor": "takes several batches for one step by itself",
    "a_divisor_larger_than_a_part_that_becomes_smaller": "takes several batches for one step by itself",
    "a_divisor_as_large_as_the_first_batch_that_becomes_smaller": "takes several batches for one step by itself",
    "two_loaders_in_turns": "takes several steps for each batch",
    "a_rare_mask_with_a_least_count": "takes several steps for each batch",
    "latents_of_each_batch": "takes several steps for each batch",
    "sam": "p.grad is None before",
}

STEPPED_BY_HAND = {"update_by_hand", "autograd_grad_of_parameters"}
"""Without an optimizer: left as they are, and it is said."""

MORE_BY_HAND = {
    "gan_with_r1", "wgan_with_gradient_penalty", "adversarial_examples", "steps_along_the_gradients_of_inputs",
    "compiled_step",
}  # fmt: skip
"""They drop gradients between two backwards of a batch, or hide their steps in a compiled function, which `by_hand`
does not follow: ranks end as one rank does."""

LAUNCHED = ("momentum", "accumulation", "update_by_hand")
"""One of each end: by launches as users have them, with the flag as a setting of theirs."""

DECIDES_BY_A_LOSS = {"stop_at_a_training_loss"}
"""By the last loss that it reads, which is that of a part."""

OF_PARTS = ("CannotCut", "Memory ran out", REFUSAL)

SAYS_LEFT_ALONE = "-a 3 has no effect: no optimizer holds what this loop trains"


@cache
def expected(loop: Loop) -> Values:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in ranks
    try:
        if loop.name in STEPPED_BY_HAND:
            return in_one_process(loop)
        if loop.name in MORE_BY_HAND:
            return by_flag(loop)
        with accumulated_by_hand(STEPS):
            return loop.run()
    finally:
        torch.set_num_threads(threads)


def by_flag(loop: Loop, **chosen: Any) -> Values:
    """What a loop ends with in this rank under `-a`."""
    with watched(RunSettings(gradient_accumulation_steps=STEPS, **chosen)):
        return loop.run()


def wrong_of(loop: Loop, ranks: list[Values], said: str = SAYS_LEFT_ALONE) -> list[str]:
    """What is not as it should be in what the ranks ended with.  said: what was printed."""
    is_alone = len(ranks) == 1
    weights, numbers = expected(loop) if loop.is_exact or is_alone else ranks[0]
    wrong = [*differences([its for its, _ in ranks], weights, "tensor")]
    if is_alone or not loop.shows_parts:
        wrong += differences([its for _, its in ranks], numbers, "number")
    if loop.name in STEPPED_BY_HAND and SAYS_LEFT_ALONE not in said:
        wrong.append("nothing was said")
    return wrong


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of the loop by hand
@pytest.mark.sample(25)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.name)
def test_a_loop_under_the_flag_ends_as_by_hand_or_in_a_sentence(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    if loop.name in REFUSED:
        with pytest.raises((FlagConflict, AttributeError)) as caught:
            by_flag(loop)
        assert REFUSED[loop.name] in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
        return
    found = by_flag(loop)
    assert not wrong_of(loop, [found], capfd.readouterr().out)


def wrong_in_ranks(loop: Loop, ends: Sequence[End], split: int | None) -> list[str]:
    """What is not as it should be in what the ranks ended with, or were refused by."""
    refusals = [*(OF_PARTS if split else (REFUSAL,) if loop.may_refuse else ())]
    refusals += [REFUSED[loop.name]] if loop.name in REFUSED else []
    errors = [end for end in ends if isinstance(end, str)]
    if errors:
        wrong = [error for error in errors if not any(each in error for each in refusals)]
        wrong += ["refused in some ranks only"] if len(errors) < len(ends) else []
        return [f"{loop.name}: {each}" for each in wrong]
    found = [end for end in ends if not isinstance(end, str)]
    if split:  # what is printed of them is printed of each part
        is_compared = loop.is_exact and loop.name not in {*DEPENDS_ON_PARTS, *DECIDES_BY_A_LOSS}
        weights = expected(loop)[0] if is_compared else found[0][0]
        return [f"{loop.name}: {each}" for each in differences([its for its, _ in found], weights, "tensor")]
    wrong = wrong_of(loop, found)
    return [f"{loop.name}: {each}" for each in [*wrong, *(["not refused"] if loop.name in REFUSED else [])]]


ALWAYS = ("time_as_long_as_a_batch", "gradients_clamped_by_hooks", "two_loaders_in_turns", "schedule_per_step")


def _groups() -> Iterator[Any]:
    yield pytest.param("fork", 2, None, ALWAYS, id="fork-2-some")
    some = [loop for loop in LOOPS if loop.name in SOME]
    for start, world_size, split, loops in (
        ("fork", 2, None, LOOPS), ("fork", 2, 4, LOOPS), ("fork", 3, None, some),
        ("zygote", 1, None, some), ("zygote", 2, None, some), ("zygote", 3, None, some),
    ):  # fmt: skip
        for place, names in enumerate(in_groups(loops)):
            case = f"{start}-{world_size}-{split or 'whole'}-{place}"
            yield pytest.param(start, world_size, split, names, marks=pytest.mark.full, id=case)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:var")  # of single samples, as a part of a batch may be
@pytest.mark.product
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("start", "world_size", "split", "names"), [*_groups()])
def test_loops_in_ranks_end_as_by_hand_or_in_a_sentence(
    start: str, world_size: int, split: int | None, names: Sequence[str]
) -> None:
    ends = in_ranks(start, world_size, names, partial(by_flag, split=split))
    loops = [loop for loop in LOOPS if loop.name in ends]
    assert not [each for loop in loops for each in wrong_in_ranks(loop, [end for [end] in ends[loop.name]], split)]


def fails_in_rank_0(loop: Loop) -> Values:
    """As a warning that is an error, of the one rank whose part is a single sample."""
    with watched(RunSettings()):
        if World.from_env().is_main_process:
            raise UserWarning("degrees of freedom is <= 0")
        return loop.run()


def test_ranks_that_wait_for_one_that_has_failed_alone_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turn, "MOST_APART_S", 0.5)
    with pytest.raises(RanksFailed, match="rank 0 of 2 alone has ended momentum"):
        in_ranks("fork", 2, ["momentum"], fails_in_rank_0)


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """One zygote for all loops."""
    launcher = Launcher()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api, "default_launcher", lambda: launcher)
        api.launch(int, 1, cpu=True, start_method="zygote")
        yield launcher
    launcher.close()


def _ways_to_launch() -> Iterator[Any]:
    loops = [loop for loop in LOOPS if loop.name in LAUNCHED]
    for start, world_size, loop in itertools.product(["zygote", "fork"], [1, 2, 3], loops):
        is_always = (start, world_size, loop.name) == ("zygote", 2, "momentum")
        marks = [] if is_always else [pytest.mark.full]
        yield pytest.param(start, world_size, loop, marks=marks, id=f"{start}-{world_size}-{loop.name}")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(("start", "world_size", "loop"), [*_ways_to_launch()])
def test_a_launched_loop_ends_as_by_hand_or_in_a_sentence(
    start: str, world_size: int, loop: Loop, capfd: pytest.CaptureFixture[str]
) -> None:
    run = api.launch(
        loop.run, world_size, cpu=True, start_method=start, setup=SETUP, gradient_accumulation_steps=STEPS, check=False
    )
    if run.error is not None:
        text = f"{run.error} {getattr(run.error, '__notes__', '')}"
        is_refused = loop.name in REFUSED and REFUSED[loop.name] in text
        if is_refused or (loop.may_refuse and isinstance(run.error, NotPrepared)):
            return
        raise run.error
    assert loop.name not in REFUSED
    assert not wrong_of(loop, run.values, capfd.readouterr().out)
