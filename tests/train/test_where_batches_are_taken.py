"""Windows and divisors are those of plain PyTorch wherever a batch is taken: before `accumulate`, inside of it, from
one endless generator, from several loaders in turn, or from no prepared loader at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, IterableDataset

from nbaccel import Accelerator, DistributedDataParallelKwargs
from nbaccel.base.events import Event, StepEntered, StepsEnded, outlet
from nbaccel.testing import run_ranks

BLOCKS = 11


@dataclass(frozen=True)
class Way:
    """How the blocks of a training come by their batches.

    takes: what each block takes, one entry a block, again and again: letters of loaders, in capitals before the block
        and in small ones inside of it; "e" is an evaluation inside. A block that takes nothing has data of its own.
    sizes: batches of each loader, of one rank.  steps: blocks of an optimizer step.  is_sized: loaders know how long
        they are.
    """

    takes: tuple[str, ...]
    sizes: tuple[int, ...] = (5, 3)
    steps: int = 1
    is_sized: bool = True

    def blocks(self) -> Iterator[tuple[list[tuple[int, int]], bool]]:
        """Of each block: which batches of which loaders it trains on, and whether one of them is the last one."""
        had = [0] * len(self.sizes)
        is_last = False
        for at in range(BLOCKS):
            taken = []
            letters = [letter for letter in self.takes[at % len(self.takes)] if letter not in "eE"]
            for letter in sorted(letters, key=str.islower):
                loader = "ab".index(letter.lower())
                taken.append((loader, had[loader] % self.sizes[loader]))
                had[loader] += 1
            if taken:
                is_last = any(batch == self.sizes[loader] - 1 for loader, batch in taken)
            yield taken, is_last


def _rows(loader: int, count: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(loader), dtype=torch.float64)


OWN = _rows(9, BLOCKS)

SPARE = 100
"""Which loader it is that is evaluated."""


def _model() -> Module:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1).double()


def _loss(model: Module, rows: Tensor) -> Tensor:
    return (model(rows[:, :2])[:, 0] - rows[:, 2]).square().mean()


def plain(way: Way, ranks: int) -> Tensor:
    """Plain PyTorch, with all ranks' batches: a step for each window, by the mean loss of its blocks."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[Tensor] = []
    for at, (taken, is_last) in enumerate(way.blocks()):
        batches = [
            _rows(loader, way.sizes[loader] * ranks)[batch * ranks + rank][None]
            for loader, batch in taken
            for rank in range(ranks)
        ]
        losses.append(sum(_loss(model, rows) for rows in batches) / ranks if taken else _loss(model, OWN[at][None]))
        if len(losses) == way.steps or is_last:
            torch.stack(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            losses = []
    return _flat(model)


def _flat(model: Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


class _Stream(IterableDataset[Any]):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)


def _cycle(loader: Any) -> Iterator[Tensor]:
    while True:
        yield from loader


def prepared(way: Way) -> Tensor:
    accelerator = Accelerator(gradient_accumulation_steps=way.steps, cpu=True)
    net = _model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    ranks = accelerator.num_processes

    def loader(number: int, batches: int) -> Any:
        rows = _rows(number, batches * ranks)
        return accelerator.prepare(DataLoader(rows if way.is_sized else _Stream(rows), batch_size=1))  # type: ignore[arg-type]

    loaders = [_cycle(loader(number, batches)) for number, batches in enumerate(way.sizes)]
    spare = loader(SPARE, 2)

    def take(letters: str) -> list[Tensor]:
        if "e" in letters.lower():
            with torch.no_grad():
                assert len(list(spare)) == 2
        return [next(loaders["ab".index(letter.lower())]) for letter in letters if letter not in "eE"]

    for at in range(BLOCKS):
        letters = way.takes[at % len(way.takes)]
        batches = take("".join(filter(str.isupper, letters)))
        with accelerator.accumulate(model):
            batches += take("".join(filter(str.islower, letters)))
            losses = [_loss(model, rows) for rows in batches or [OWN[at][None]]]
            accelerator.backward(sum(losses))
            optimizer.step()
            optimizer.zero_grad()
    return _flat(net)


WAYS: dict[str, tuple[str, ...]] = {
    "before": ("A",),
    "inside": ("a",),
    "from no prepared loader": ("",),
    "two loaders in turn": ("A", "B"),
    "two loaders in turn, inside": ("a", "b"),
    "one before and one inside": ("Ab",),
    "two zipped": ("AB",),
    "in turn, one of them inside": ("A", "b", "b"),
    "an evaluation before": ("EA",),
    "an evaluation inside, then the batch": ("ea",),
    "an evaluation inside, after the batch": ("Ae",),
    "now and then a block of its own data": ("a", "", "B"),
}


def _all_of(steps: int) -> list[Tensor]:
    return [
        prepared(Way(takes, steps=steps, is_sized=is_sized)) for takes in WAYS.values() for is_sized in (True, False)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_training_is_plain_pytorchs_wherever_its_batches_are_taken(steps: int, ranks: int) -> None:
    names = [(name, is_sized) for name in WAYS for is_sized in (True, False)]
    for weights in run_ranks(ranks, _all_of, steps):
        for (name, is_sized), found in zip(names, weights, strict=True):
            expected = plain(Way(WAYS[name], steps=steps), ranks)
            assert (found - expected).abs().max() <= 1e-12, (name, is_sized)


@settings(max_examples=60, deadline=None)
@given(
    takes=st.lists(st.sampled_from(["A", "a", "b", "B", "Ab", "AB", "ab", "ae", "Ae", "EA"]), min_size=1, max_size=4),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    steps=st.integers(1, 4),
    is_sized=st.booleans(),
)
def test_so_is_every_mixture_of_ways(takes: Sequence[str], sizes: tuple[int, int], steps: int, is_sized: bool) -> None:
    way = Way(tuple(takes), sizes, steps, is_sized)
    assert (prepared(way) - plain(way, 1)).abs().max() <= 1e-12


class Trainer:
    """As many are written: an endless generator over the prepared loader, whose batches are taken inside the block."""

    def __init__(self, steps: int, batches: int = 5) -> None:
        self.accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
        self.steps = steps
        self.net = _model()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        rows = _rows(0, batches * self.accelerator.num_processes)
        self.dl = _cycle(self.accelerator.prepare(DataLoader(rows, batch_size=1)))  # type: ignore[arg-type]
        self.model, self.opt = self.accelerator.prepare(self.net, self.opt)
        self.syncs: list[bool] = []

    def train(self, steps: int) -> list[bool]:
        for _ in range(steps):
            for _ in range(self.steps):
                with self.accelerator.accumulate(self.model):
                    loss = _loss(self.model, next(self.dl))
                    self.accelerator.backward(loss)
                    self.syncs.append(self.accelerator.sync_gradients)
                    self.opt.step()
                    self.opt.zero_grad()
        return self.syncs


def test_the_last_batch_ends_its_window_although_the_block_was_entered_before_it_came() -> None:
    assert Trainer(steps=2).train(4) == [False, True, False, True, True, False, True, False]


def test_the_steps_of_such_a_trainer_are_counted_and_can_be_stopped_between() -> None:
    events: list[Event] = []
    with outlet(events.append):
        trainer = Trainer(steps=2)
        trainer.train(3)
    steps = [event.step for event in events if isinstance(event, StepEntered)]
    assert sorted(set(steps)) == [0, 1, 2, 3]
    assert trainer.accelerator._context.accumulation.clock.done == 3


def test_a_first_batch_inside_leaves_every_weight_finite() -> None:
    trainer = Trainer(steps=1)
    trainer.train(1)
    assert _flat(trainer.net).isfinite().all()


def test_a_block_in_which_the_loader_ends_counts_for_nothing() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, loader = accelerator.prepare(_model(), DataLoader(_rows(0, 4), batch_size=1))  # type: ignore[arg-type]
    for _ in range(2):
        batches, syncs = iter(loader), []
        with pytest.raises(StopIteration):
            while True:
                with accelerator.accumulate(model):
                    accelerator.backward(_loss(model, next(batches)))
                    syncs.append(accelerator.sync_gradients)
        assert syncs == [False, True, False, True]
        assert accelerator._context.accumulation.depth == 0
        assert accelerator._context.accumulation.window.position == 0


def test_a_batch_for_the_next_block_does_not_change_what_this_one_has_decided() -> None:
    """It is taken after the backward, from a loader that ends with it."""
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    net = _model()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    before, ahead = _flat(net), iter(accelerator.prepare(DataLoader(_rows(0, 1), batch_size=1)))  # type: ignore[arg-type]
    with accelerator.accumulate(model):
        accelerator.backward(_loss(model, OWN[:1]))
        next(ahead)
        accelerator.backward(_loss(model, OWN[:1]))
        assert not accelerator.sync_gradients
        optimizer.step()
    assert _flat(net).equal(before)
    two = torch.autograd.grad(2 * _loss(net, OWN[:1]) / 3, list(net.parameters()))
    for parameter, expected in zip(net.parameters(), two, strict=True):
        assert (parameter.grad - expected).abs().max() <= 1e-15


def _fetched_after_the_forward(finds_unused: bool) -> list[Tensor]:
    """The block is entered with the last but one batch in hand, and the last one is fetched before the backward."""
    options = DistributedDataParallelKwargs(find_unused_parameters=finds_unused)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True, kwargs_handlers=[options])
    net = _model()
    rows = _rows(0, 3 * accelerator.num_processes)
    model, loader = accelerator.prepare(net, DataLoader(rows, batch_size=1))  # type: ignore[arg-type]
    batches = iter(loader)
    next(batches)
    in_hand = next(batches)
    with accelerator.accumulate(model):
        loss = _loss(model, in_hand)
        next(batches)
        accelerator.backward(loss)
        assert accelerator.sync_gradients
    return [parameter.grad for parameter in net.parameters()]


@pytest.mark.parametrize("finds_unused", [False, True])
def test_ranks_exchange_gradients_of_a_forward_that_ran_before_the_last_batch_came(finds_unused: bool) -> None:
    one, other = run_ranks(2, _fetched_after_the_forward, finds_unused)
    assert all(mine.equal(theirs) for mine, theirs in zip(one, other, strict=True))
    net, rows = _model(), _rows(0, 6)
    expected = torch.autograd.grad(_loss(net, rows[2:4]), list(net.parameters()))
    assert all((mine - theirs).abs().max() <= 1e-12 for mine, theirs in zip(one, expected, strict=True))


def test_a_look_at_the_loader_that_is_iterated_leaves_its_windows_and_its_end_alone() -> None:
    """As samples are drawn between two steps, with a second generator over the same loader."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model, loader = accelerator.prepare(_model(), DataLoader(_rows(0, 5), batch_size=1))  # type: ignore[arg-type]
    events: list[Event] = []
    syncs = []
    with outlet(events.append):
        for at, rows in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, rows))
                syncs.append(accelerator.sync_gradients)
            if at == 2:
                next(_cycle(loader))
        assert isinstance(events[-1], StepsEnded)
    assert syncs == [False, True, False, True, True]
    assert not accelerator._context.accumulation.is_iterating


def test_models_that_are_trained_in_turn_keep_windows_of_their_own() -> None:
    """Of two networks with a loader each, one may stand in the middle of its window while the other ends one."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    first, second = accelerator.prepare(_model(), _model())
    outer = accelerator.prepare(DataLoader(_rows(0, 4), batch_size=1))  # type: ignore[arg-type]
    inner = accelerator.prepare(DataLoader(_rows(1, 3), batch_size=1))  # type: ignore[arg-type]
    seen: list[tuple[str, bool]] = []
    for rows in outer:
        with accelerator.accumulate(first):
            accelerator.backward(_loss(first, rows))
            seen.append(("outer", accelerator.sync_gradients))
        for others in inner:
            with accelerator.accumulate(second):
                accelerator.backward(_loss(second, others))
                seen.append(("inner", accelerator.sync_gradients))
    inner_loop = [("inner", False), ("inner", True), ("inner", True)]
    assert seen == [("outer", False), *inner_loop, ("outer", True), *inner_loop] * 2


def _two_networks(steps: int, ranks: int, is_prepared: bool) -> list[Tensor]:
    """Two networks trained on each batch, in a block each; the second one leaves out every third batch."""
    accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
    nets = [_model(), _model()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1 * at, momentum=0.9) for at, net in enumerate(nets, 1)]
    rows = _rows(0, 7 * ranks)
    models: Sequence[Module] = nets
    loader: Any = rows.split(ranks)
    if is_prepared:
        *models, loader = accelerator.prepare(*nets, DataLoader(rows, batch_size=1))  # type: ignore[arg-type]
        optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
    losses: list[list[Tensor]] = [[], []]
    for at, batch in enumerate(batch for _ in range(2) for batch in loader):
        for turn, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if turn and at % 7 % 3 == 1:
                continue
            if is_prepared:
                with accelerator.accumulate(model):
                    accelerator.backward(_loss(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
                continue
            losses[turn].append(_loss(model, batch))
            if len(losses[turn]) == steps or at % 7 == 6:
                torch.stack(losses[turn]).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[turn] = []
    return [_flat(net) for net in nets]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_two_networks_that_are_trained_on_each_batch_have_windows_of_their_own(steps: int, ranks: int) -> None:
    expected = _two_networks(steps, ranks, False)
    for found in run_ranks(ranks, _two_networks, steps, ranks, True):
        assert all((one - other).abs().max() <= 1e-12 for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_batch_that_memory_cuts_in_parts_may_be_taken_inside(ranks: int, steps: int) -> None:
    assert all(
        (whole - cut).abs().max() <= 1e-12
        for whole, cut in zip(run_ranks(ranks, _in_parts, 1, steps), run_ranks(ranks, _in_parts, 2, steps), strict=True)
    )


def _in_parts(split: int, steps: int) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBACCEL_SPLIT", str(split))
        accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=True)
        net = _model()
        rows = _rows(0, 20 * accelerator.num_processes)
        model, optimizer, loader = accelerator.prepare(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            DataLoader(rows, batch_size=4),  # type: ignore[arg-type]
        )
        batches = _cycle(loader)
        while accelerator._context.accumulation.clock.done < 4:
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, next(batches)))
                optimizer.step()
                optimizer.zero_grad()
        return _flat(net)
