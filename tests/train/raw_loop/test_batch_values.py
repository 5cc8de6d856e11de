"""Values of a whole batch that enter a loss by their number are found, and such a loop trains on whole batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.batch_values import BatchWatch
from nbaccel.train.raw_loop.loop import RawLoopTraining

ROWS = 6

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def one_by_one(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return (model(x).squeeze(1) - t).square()


def divided_by_their_sum(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    weights = t / t.sum()
    return (weights * one_by_one(model, x, t)).sum()


def softmax_over_samples(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return (F.softmax(t, 0) * one_by_one(model, x, t)).sum()


def harder_than_the_mean(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    each = one_by_one(model, x, t)
    return each[each > each.mean()].mean()


def hardest_of_them(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    each = one_by_one(model, x, t)
    return each[each.detach().topk(3).indices].mean()


def standardised(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, (x - x.mean(0, keepdim=True)) / x.std(0, keepdim=True), t).mean()


def standardised_in_place(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    x = x.clone()
    x -= x.mean(0)
    return one_by_one(model, x, t).mean()


def whitened(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x @ (x.T @ x), t).mean()


def class_counts(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    classes = (t > 0.5).long()
    counts = torch.bincount(classes, minlength=2) + 1
    return ((counts.sum() / counts)[classes] * one_by_one(model, x, t)).mean()


def weight_that_was_a_number(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    positive = (t > 0.5).sum().item()
    weight = torch.tensor([(len(t) - positive + 0.3) / (positive + 1)])
    return F.binary_cross_entropy_with_logits(model(x).squeeze(1), (t > 0.5).to(x), pos_weight=weight)


def divisor_that_was_a_number(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return (one_by_one(model, x, t) * (t / t.sum().item())).sum()


def balanced_by_values(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    one, other = one_by_one(model, x, t).mean(), model(x).abs().mean()
    return one + other * (one.detach() / other.detach())


def masked_mean_over_a_mean(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    mask = (t > 0.5).to(x)
    return (one_by_one(model, x, t) * mask).mean() / mask.mean()


def means_of_a_mask_by_their_values(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """Prototypes of classes, to which the samples are compared."""
    out, high = model(x), t > t.min()
    near = (out[high].mean(0) + model(x)[high].abs().sum(0, keepdim=True)).detach()
    return (out - near).square().mean()


OF_THE_WHOLE = [
    divided_by_their_sum, softmax_over_samples, harder_than_the_mean, hardest_of_them, standardised,
    standardised_in_place, whitened, class_counts, weight_that_was_a_number, divisor_that_was_a_number,
    balanced_by_values, masked_mean_over_a_mean, means_of_a_mask_by_their_values,
]  # fmt: skip


# Made outside of torch, of numbers of several samples


def weights_by_numpy(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    each = one_by_one(model, x, t)
    losses = each.detach().numpy()
    return (each * torch.from_numpy(losses / losses.sum())).sum()


def harder_half_by_numpy(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    each = one_by_one(model, x, t)
    losses = np.asarray(each.detach())
    return (each * torch.as_tensor((losses > np.median(losses)) * 1.0)).mean()


def standardised_by_numpy(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    numbers = x.numpy()
    return one_by_one(model, torch.tensor((numbers - numbers.mean(0)) / numbers.std(0)), t).mean()


def weights_of_a_list(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    kinds = (t > 0.5).tolist()
    weights = x.new_tensor([1 / kinds.count(kind) for kind in kinds])
    return (weights * one_by_one(model, x, t)).mean()


def weights_of_single_numbers(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    numbers = [each.item() for each in t]
    return (torch.tensor([each / max(numbers) for each in numbers]) * one_by_one(model, x, t)).mean()


def mask_by_an_index_of_numpy(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    kept: Tensor = one_by_one(model, x, t)[np.argsort(t.numpy()) > 1]
    return kept.mean()


def as_many_of_each_kind(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    kinds = np.argsort(t.numpy())
    picked = np.repeat(kinds[: len(x) // 2], 2)  # as many as there are samples
    return one_by_one(model, x[picked], t[picked]).mean()


MADE_OUTSIDE = [
    weights_by_numpy, harder_half_by_numpy, standardised_by_numpy, weights_of_a_list, weights_of_single_numbers,
    mask_by_an_index_of_numpy, as_many_of_each_kind,
]  # fmt: skip


# Samples picked by their place in the batch


def first_samples(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x[:4], t[:4]).mean()


def head_and_tail(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    half = len(x) // 2
    return one_by_one(model, x[:half], t[:half]).mean() + 0.3 * model(x[half:]).abs().mean()


def halves(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return sum(one_by_one(model, *each).mean() for each in zip(x.chunk(2), t.chunk(2), strict=True))  # type: ignore[return-value]


def thirds(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    parts = zip(torch.tensor_split(x, 3), torch.tensor_split(t, 3), strict=True)
    return sum(one_by_one(model, *each).mean() for each in parts)  # type: ignore[return-value]


def every_second(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x.float()[::2].to(x), t[::2]).mean()


def every_fifth(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x[::5], t[::5]).mean()  # the first and the last one among them


def neighbours(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x.narrow(0, 0, len(x) - 1), t[1:]).mean()


def one_sample(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x[0:1], t[0]).mean()


def some_of_a_list(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, torch.stack(x.unbind(0)[:4]), torch.stack(t.unbind(0)[:4])).mean()


def by_numbers(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    picked = torch.arange(0, len(x) * 2 // 3)
    return one_by_one(model, x[picked], t.index_select(0, picked)).mean()


def groups(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x.view(2, -1, 4)[1], t.unfold(0, len(t) // 2, len(t) // 2)[1]).mean()


def changed_in_half(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    x = x.clone()
    x[: len(x) // 2] *= 0.5
    return one_by_one(model, x, t).mean()


def by_numbers_of_squares(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    squares = x.new_ones(len(x), 2, len(x)) * x[:, :1, None]  # as long as the batch in another dimension, too
    some = torch.cat([squares[:2], squares[torch.arange(1)]])
    return one_by_one(model, some.flatten(1)[:, :4], t[:3]).mean()


PICKED = [
    first_samples, head_and_tail, halves, thirds, every_second, every_fifth, neighbours, one_sample, some_of_a_list,
    by_numbers, by_numbers_of_squares, groups, changed_in_half,
]  # fmt: skip


# Samples beside others


def of_two_orders(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x[x[:, 0].argsort()], t[x[:, 1].argsort()]).mean()


def backwards_beside_moved(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x.flip(0), t.roll(1)).mean()


def taken_along(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x, t.take(torch.arange(len(t)).flip(0))).mean()


def scattered(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    places = torch.tensor([*range(1, len(t)), 0])
    return one_by_one(model, x, torch.zeros_like(t).scatter(0, places, t)).mean()


def weighted_by_rank(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return (one_by_one(model, x, t) * t.argsort().argsort()).mean()


def each_feature_sorted(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return one_by_one(model, x.sort(0).values, t).mean()


def label_of_another(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    classes = (t.flip(0) > 0.5).long()
    return -(model(x) * x).log_softmax(1)[torch.arange(len(x)), classes].mean()


BESIDE = [
    of_two_orders, backwards_beside_moved, taken_along, scattered, weighted_by_rank, each_feature_sorted,
    label_of_another,
]  # fmt: skip


def chunks_that_are_joined(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return (torch.cat([model(each) for each in x.split(5)]).squeeze(1) - t).square().mean()


def picked_by_their_values(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    high = (t > 0.1).nonzero().squeeze(1)
    features = x[t > 0.1]
    features = features - features.mean(1, keepdim=True) + features.max(1).values[:, None]
    return one_by_one(model, x[high], t[high]).mean() + one_by_one(model, features, t[t > 0.1]).mean()


def in_another_order(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    order = torch.arange(len(x) - 1, -1, -1)
    return one_by_one(model, x[order], t.flip(0)).mean()


def columns(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    shown = x[:3] + 1
    assert len(shown) == 3
    x = torch.cat([x[:, 2:], x.t()[:2].t()], 1)
    return one_by_one(model, torch.stack([x[:, 0], x.select(1, 1), x[:, 2], x[:, 3:].flatten()], 1), t).mean()


def masked_mean(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    mask = (t > 0.1).to(x)
    return (one_by_one(model, x, t) * mask).sum() / mask.sum().clamp(min=1)


def sorted_by_length(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    order = t.sort(descending=True).indices
    return one_by_one(model, x[order], t[order]).mean()


def there_and_back_in_order(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    order, drawn = t.argsort(), torch.randperm(len(x))
    x, t = x[drawn][drawn.argsort()], t[order].roll(1)
    return one_by_one(model, x.sort(1).values, t.roll(-1)[order.argsort()]).mean()


def standardised_sample_by_sample(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    return one_by_one(model, torch.stack([each / each.max() for each in x]), t).mean()


def metrics_beside_it(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    loss = one_by_one(model, x, t).mean()
    right = ((model(x).squeeze(1) > 0.5) == (t > 0.5)).sum().item()
    assert right <= len(x)
    assert x.abs().max().item() < 100
    assert np.abs(x.numpy()).max() < 100
    assert sum(t.tolist()) <= len(t) + float(loss.detach().numpy())
    return loss + 0.5 * torch.full((2,), 1.0).mean()


def there_and_back(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    x, t = torch.from_numpy(x.numpy().astype("float64")).to(x), torch.tensor([each.item() for each in t])
    lengths = torch.as_tensor((t * 3).long().tolist())
    return (one_by_one(model, x, t) * (1 + lengths)).mean()


def weights_that_were_made_before(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    weights = torch.from_numpy(np.linspace(0.5, 1.5, 7))
    assert np.isfinite(x.numpy()).all()
    return (weights[(t * 7).long()] * one_by_one(model, x, t)).mean()


def weights_of_the_program(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    weights = torch.tensor([0.2, 0.7])
    return ((weights / weights.sum())[(t > 0.5).long()] * one_by_one(model, x, t)).mean()


# Joined with samples that are not of the batch

KEPT = torch.randn(10, 4, generator=torch.Generator().manual_seed(7), device="cpu")


def from_a_memory(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(torch.cat([x, KEPT[:4]])).square().mean()


def as_many_from_a_memory(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(torch.vstack([KEPT[: len(x)], x])).square().mean()


def side_by_side(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(torch.cat([x.T, KEPT[:4].T], dim=1).T).square().mean()


def values_of_a_memory(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return torch.cat([model(x), model(KEPT[:4])]).square().mean()


def one_by_one_with_a_memory(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(torch.stack([*x, *KEPT[:4]])).square().mean()


def written_into_a_memory(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    both = KEPT.clone()
    both[2 : 2 + len(x)] = x
    return model(both).square().mean()


def put_into_a_memory(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    both = KEPT.clone()
    both[torch.arange(len(x), device="cpu")] = x
    return model(both).square().mean()


def scattered_into_a_memory(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    places = torch.arange(len(x), device="cpu")[:, None].expand_as(x)
    return model(KEPT.scatter(0, places, x)).square().mean()


def filled_up(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(F.pad(x, (0, 0, 1, 3))).square().mean()


def some_of_both(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(torch.cat([x, KEPT[:4]]))[:8].square().mean()


def shuffled_together(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1), device="cpu")
    return model(torch.cat([x, KEPT[:4]])[order])[: len(x)].square().mean()


JOINED = [
    from_a_memory, as_many_from_a_memory, side_by_side, values_of_a_memory, one_by_one_with_a_memory,
    written_into_a_memory, put_into_a_memory, scattered_into_a_memory, filled_up, some_of_both, shuffled_together,
]  # fmt: skip


def without_the_memory(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(torch.cat([KEPT[:4], x]))[4:].square().mean()


def each_by_itself(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    of_samples, of_memory = model(torch.cat([x.T, KEPT[:4].T], dim=1).T).split([len(x), 4])
    return of_samples.square().mean() + of_memory.square().mean()


def without_what_was_filled_up(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(F.pad(x, (0, 0, 1, 3)))[1 : 1 + len(x)].square().mean()


def two_views(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(torch.cat([x, 0.9 * x])).square().mean()


def noise_beside_each(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    targets = torch.cat([t, torch.zeros(len(x), device="cpu")])
    return (model(torch.cat([x, torch.randn_like(x)])).squeeze(1) - targets).square().mean()


def collected_piece_by_piece(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    both = torch.zeros(2 * len(x), x.shape[1], device="cpu")
    both[: len(x)], both[len(x) :] = x, 0.9 * x
    return model(both).square().mean()


def a_column_of_a_memory(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return model(torch.cat([x[:, :3], KEPT[:1, :1].expand(len(x), 1)], dim=1)).square().mean()


def against_a_queue(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    logits = torch.cat([model(x), x @ KEPT.T], dim=1)
    return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device="cpu"))


BY_THEMSELVES = [
    without_the_memory, each_by_itself, without_what_was_filled_up, two_views, noise_beside_each,
    collected_piece_by_piece, a_column_of_a_memory, against_a_queue,
]  # fmt: skip


OF_SAMPLES = [
    masked_mean, sorted_by_length, there_and_back_in_order, standardised_sample_by_sample, metrics_beside_it,
    weights_of_the_program, chunks_that_are_joined, picked_by_their_values, in_another_order, columns, there_and_back,
    weights_that_were_made_before,
]  # fmt: skip


def obstacle(loss: Loss, rows: int = ROWS) -> str:
    x, t = torch.randn(rows, 4), torch.rand(rows)
    model, watch = nn.Linear(4, 1), BatchWatch()
    watch.begin((x, t), rows)
    try:
        root = loss(model, x, t)
    finally:
        watch.end()
        assert _get_current_dispatch_mode() is None
    watch.begin((x, t), rows)
    root = loss(model, x, t)
    with watch.paused():
        assert _get_current_dispatch_mode() is None
        found = watch.obstacle([root])
    watch.end()
    return found


@pytest.mark.parametrize("loss", OF_THE_WHOLE, ids=lambda loss: loss.__name__)
def test_a_number_of_the_whole_batch_in_a_loss_is_found(loss: Loss) -> None:
    assert obstacle(loss).startswith("its loss uses a number of the whole batch (")


@pytest.mark.parametrize("loss", PICKED + BESIDE, ids=lambda loss: loss.__name__)
def test_samples_that_are_picked_by_their_place_are_found(loss: Loss) -> None:
    assert obstacle(loss).startswith("samples that are picked by their place in the batch (")


@pytest.mark.parametrize("loss", MADE_OUTSIDE, ids=lambda loss: loss.__name__)
def test_what_may_be_made_of_several_samples_outside_of_torch_is_found(loss: Loss) -> None:
    assert obstacle(loss).startswith("its loss uses what NumPy or Python made of its samples, maybe of several")
    assert "numpy" not in vars(Tensor)


def test_what_numpy_makes_of_a_batch_of_arrays_is_found() -> None:
    x, watch = np.ones((ROWS, 4)) * np.arange(ROWS)[:, None], BatchWatch()
    watch.begin({"x": x, "names": np.array(["a"] * ROWS)}, ROWS)
    as_it_is, made = torch.from_numpy(x).square().mean(), torch.from_numpy(x - x.mean(0)).square().mean()
    assert not watch.obstacle([as_it_is])
    assert watch.obstacle([made])
    watch.end()


@pytest.mark.parametrize("loss", JOINED, ids=lambda loss: loss.__name__)
def test_samples_that_are_joined_with_others_are_found(loss: Loss) -> None:
    assert obstacle(loss).startswith("samples that are not of the batch are joined with it (")


def test_a_single_sample_that_is_joined_with_a_memory_is_found_and_shows_nothing_else() -> None:
    assert obstacle(from_a_memory, rows=1).startswith("samples that are not of the batch are joined with it (")
    assert not obstacle(divided_by_their_sum, rows=1)


def test_points_of_which_a_part_has_as_many_as_the_whole_batch_are_others() -> None:
    """A batch of six may have one for each sample; a part of three has six, too."""
    watch, model, found = BatchWatch(), nn.Linear(4, 1), []
    for rows in (6, 3):
        x = torch.randn(rows, 4)
        watch.begin((x,), rows, like=None if rows == ROWS else rows)
        root = model(torch.cat([x, torch.randn(6, 4)])).square().mean()
        found.append(bool(watch.obstacle([root])))
        watch.end()
    assert found == [False, True]


@pytest.mark.parametrize("loss", BY_THEMSELVES, ids=lambda loss: loss.__name__)
def test_samples_that_stand_by_themselves_in_the_loss_are_no_obstacle(loss: Loss) -> None:
    assert not obstacle(loss)


@pytest.mark.parametrize("loss", OF_SAMPLES, ids=lambda loss: loss.__name__)
def test_a_loss_of_samples_and_numbers_that_do_not_enter_it_are_no_obstacle(loss: Loss) -> None:
    assert not obstacle(loss)


def test_the_line_that_computes_the_number_is_named() -> None:
    assert obstacle(divided_by_their_sum).endswith("(weights = t / t.sum())")


def test_batches_are_not_watched_beside_a_mode_of_the_program_and_ours_leaves_from_below_one() -> None:
    watch = BatchWatch()
    with FlopCounterMode(display=False):
        watch.begin((torch.ones(ROWS),), ROWS)
        assert not watch.is_on
    watch.begin((torch.ones(ROWS),), ROWS)
    with FlopCounterMode(display=False) as theirs:
        watch.end()
        assert _get_current_dispatch_mode() is theirs.mode
    assert _get_current_dispatch_mode() is None


def _train(loss: Loss) -> list[float]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.rand(24))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, t in DataLoader(data, batch_size=8):
            optimizer.zero_grad()
            loss(model, x, t).backward()
            optimizer.step()
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


def _in_a_rank(loss: Loss) -> tuple[list[float], bool]:
    torch.set_default_dtype(torch.float64)
    watch = RawLoopTraining(World.from_env(), RunSettings())
    watch.begin(None)
    try:
        weights = _train(loss)
        watch.end()
    finally:
        watch.stop()
    return weights, watch.has_split


@pytest.mark.parametrize(
    ("loss", "is_split"),
    [
        (divided_by_their_sum, False),
        (masked_mean, True),
        (thirds, False),
        (chunks_that_are_joined, True),
        (weights_by_numpy, False),
        (there_and_back, True),
        *(
            pytest.param(loss, False, marks=pytest.mark.full)
            for loss in [*OF_THE_WHOLE[1:], *PICKED, *MADE_OUTSIDE[1:]]
        ),
        *(pytest.param(loss, True, marks=pytest.mark.full) for loss in OF_SAMPLES[1:]),
    ],
)
@pytest.mark.product
def test_ranks_train_as_one_process_whether_batches_are_whole_or_in_parts(loss: Loss, is_split: bool) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        expected = _train(loss)
    finally:
        torch.set_default_dtype(torch.float32)
    for weights, was_split in run_ranks(2, _in_a_rank, loss):
        assert was_split is is_split
        assert weights == pytest.approx(expected, rel=1e-12, abs=1e-12)


def _later_by_their_sum(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    each = one_by_one(model, x, t)
    if len(_SEEN) > 2:
        return (t / t.mean() * each).mean() + 0.1 * each.mean()
    _SEEN.append(float(x[0, 0]))
    return each.mean()


_SEEN: list[float] = []


def test_such_a_loss_that_comes_when_batches_are_split_is_an_error_at_its_second_step() -> None:
    with pytest.raises(RanksFailed, match=r"its loss uses a number of the whole batch \(return \(t / t\.mean"):
        run_ranks(2, _in_a_rank, _later_by_their_sum)


def _micro_batches() -> list[float]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.rand(24))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for x, t in DataLoader(data, batch_size=8):
            optimizer.zero_grad()
            for xs, ts in zip(x.split(5), t.split(5), strict=True):
                (one_by_one(model, xs, ts).mean() / 2).backward()
            optimizer.step()
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


def _micro_batches_in_a_rank() -> tuple[list[float], bool]:
    torch.set_default_dtype(torch.float64)
    watch = RawLoopTraining(World.from_env(), RunSettings())
    watch.begin(None)
    try:
        weights = _micro_batches()
        watch.end()
    finally:
        watch.stop()
    return weights, watch.has_split


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_backward_for_each_of_uneven_chunks_trains_as_in_one_process(world_size: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        expected = _micro_batches()
    finally:
        torch.set_default_dtype(torch.float32)
    for weights, was_split in run_ranks(world_size, _micro_batches_in_a_rank):
        assert not was_split
        assert weights == pytest.approx(expected, rel=1e-12, abs=1e-12)
