"""Unmodified loops whose batches come in parts, as after a run that ran out of memory, train as with whole batches.

Or they end in a sentence before they train otherwise. A loop that counts its rounds by itself counts parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.deferred_calls import StepCounter
from nbaccel.train.raw_loop.loop import RawLoopTraining
from train.raw_loop.loops import LOOPS, Loop, Values, ends, net, points, sgd
from train.raw_loop.test_loops import differences, in_one_process

PARTS = 4  # of all ranks together

TRAINED_OTHERS = "the parts of a batch have trained different parameters"
LEFT_EARLY = "left before its end, and each batch had come in several parts"
AT_THE_RESTART = ""

DEPENDS_ON_PARTS = {
    "average_of_weights": AT_THE_RESTART,  # by itself, in each round
    "branch_by_the_step": TRAINED_OTHERS,
    "early_break": LEFT_EARLY,
    "iterator_kept_over_epochs": LEFT_EARLY,
    "next_by_hand": LEFT_EARLY,
    "teacher_forcing": AT_THE_RESTART,  # it draws in each round
}
"""Loops that count, draw or average in each of their rounds, which plain Python does: with parts they do it more often.
A line says so, when it shows, or for all loops where the run is started again."""

REFUSALS = ("errors.CannotCut: memory ran out", "errors.NotPrepared: ", "Memory ran out with whole batches")

OFTEN = {
    "sgd", "adamw_foreach", "grad_scaler_with_an_overflow", "clipping_by_norm", "schedule_per_step", "sum_alone",
    "accumulation", "gan_with_r1", "padding_that_counts", "no_automatic_batches", "update_by_hand",
    "checkpoint_reentrant", "batch_used_twice", "called_again_from_another_line", "mean_times_the_number_of_samples",
    "ignored_labels", "padding_with_a_mask", "branch_by_the_step", "early_break", "a_mean_with_a_memory",
    "a_sum_with_a_memory", "sums_of_samples_and_of_a_memory", "a_mean_and_a_sum_over_a_grid",
}  # fmt: skip

TRAINS = OFTEN - {
    "accumulation", "gan_with_r1", "update_by_hand", "mean_times_the_number_of_samples", "a_mean_with_a_memory",
    "a_sum_with_a_memory",
} | {
    "a_memory_that_is_cut_off_again", "means_of_samples_and_of_a_memory", "a_mean_and_a_sum_over_a_memory_by_itself",
}  # fmt: skip
"""Of these, those that train, and some more that do."""


def _marked(loop: Loop) -> Any:
    return pytest.param(loop, id=loop.name, marks=[] if loop.name in OFTEN else [pytest.mark.full])


@pytest.mark.filterwarnings("ignore:var")  # of single samples
@pytest.mark.parametrize("loop", [_marked(loop) for loop in LOOPS])
def test_a_loop_in_parts_ends_as_with_whole_batches_or_in_a_sentence(
    loop: Loop, capfd: pytest.CaptureFixture[str]
) -> None:
    expected, _ = in_one_process(loop)
    try:
        ranks = run_ranks(2, _in_a_rank, loop)
    except RanksFailed as error:
        if loop.name not in TRAINS and any(refusal in str(error) for refusal in REFUSALS):
            return
        raise
    assert DEPENDS_ON_PARTS.get(loop.name, "") in capfd.readouterr().out
    is_exact = loop.is_exact and loop.name not in DEPENDS_ON_PARTS
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


def with_losses(*losses: Callable[[Tensor, Tensor, Tensor], Tensor], above: float = -0.5) -> Values:
    """A model whose targets are partly left out by a mask, and a backward for each of `losses`.

    Args:
        above: The mask is where the first feature is.
    """
    torch.manual_seed(0)
    model = net().double()
    optimizer = sgd(model, 0.01)
    for x, y in DataLoader(points(48), batch_size=16):
        guess = model(x.double())
        optimizer.zero_grad()
        for at, loss in enumerate(losses):
            loss(guess, y.double(), (x[:, :1] > above).double()).backward(retain_graph=at < len(losses) - 1)
        optimizer.step()
    return ends(model), []


def masked(guess: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return ((guess - y) ** 2 * mask).sum() / mask.sum()


def mean(guess: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return ((guess - y) ** 2).mean()


def total(guess: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return ((guess - y) ** 2).sum()


ALIKE = {
    "a mean over a mask": [masked],
    "twice": [lambda *of: masked(*of) + 0.5 * masked(*of).clone()],
    "two backwards": [masked, masked],
    "a mean and a sum": [lambda *of: mean(*of) + total(*of)],
    "a mean, and a sum by itself": [mean, total],
}


@pytest.mark.parametrize("losses", ALIKE.values(), ids=ALIKE)
def test_divisors_that_a_part_does_not_know_beforehand_are_made_good_with_the_last_one(losses: list[Any]) -> None:
    expected, _ = with_losses(*losses)
    for weights in run_ranks(2, _watched, partial(with_losses, *losses)):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


APART = {
    "a mean beside a mean over a mask": [lambda *of: mean(*of) + masked(*of)],
    "in backwards of their own": [mean, masked],
    "a sum beside a mean over a mask": [lambda *of: total(*of) + masked(*of)],
}


@pytest.mark.parametrize("losses", APART.values(), ids=APART)
def test_divisors_that_go_their_own_ways_are_refused(losses: list[Any]) -> None:
    with pytest.raises(RanksFailed, match=r"CannotCut: memory ran out .* its loss(es are| has)"):
        run_ranks(2, _watched, partial(with_losses, *losses))


def test_a_mask_that_is_taken_for_a_number_of_the_program_is_refused_before_a_step() -> None:
    """Its parts of four and of three samples have the same count, by chance."""
    with pytest.raises(RanksFailed, match="was taken for a number of the program's, and depends on the samples"):
        run_ranks(2, _watched, partial(with_losses, masked, above=0))


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


def test_a_step_that_several_optimizers_take_is_complete_once() -> None:
    """The panel reads the number at any moment: one that went back would be another training's."""
    batches: list[int] = []
    steps = StepCounter(lambda: len(batches))
    optimizers = [sgd(net()) for _ in range(3)]
    seen = []
    for batch in range(2):
        batches.append(batch)
        for optimizer in optimizers:
            steps.meet(optimizer)
            steps.enter([])
            seen.append(steps.done)
            steps.note(optimizer)
            steps.end_step()
            seen.append(steps.done)
    assert seen == [0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]


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
