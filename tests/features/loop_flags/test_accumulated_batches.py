"""Accumulation by flag: `-a K` above an unmodified loop ends as the loop with accumulation written by hand.

Each loop of `BY_HAND` is written once, with and without the lines of that accumulation: `by` is K, or None for the
plain loop. What cannot be accumulated is refused before its first step.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from nbaccel import PartialState, launch
from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import FlagConflict, RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.raw_loop.single_rank import SingleRankWatch
from nbaccel.train.setup import loop_changes
from nbaccel.train.step.raw_loop_hooks import window_is_open
from train.raw_loop.loops import ends, labelled, net, points

By = int | None
Written = Callable[[By], list[Tensor]]

BATCHES = 10

BEFORE_ITS_FIRST_STEP = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
"""What torch says of the loop by hand."""


def loader(samples: int = 6 * BATCHES) -> DataLoader[Any]:
    return DataLoader(points(samples), batch_size=6, shuffle=True)


def window(by: By, at: int, batches: int = BATCHES) -> tuple[int, bool, bool]:
    """The batches of the window in which batch `at` is; whether it is the first, or the last of them."""
    if by is None:
        return 1, True, True
    return min(by, batches - at // by * by), at % by == 0, (at + 1) % by == 0 or at + 1 == batches


def flat(by: By) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        for at, (x, y) in enumerate(loader()):
            length, _, is_last = window(by, at)
            (F.mse_loss(model(x), y) / length).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
    return ends(model, optimizer)


def clipped_with_a_schedule(by: By) -> list[Tensor]:
    """Its schedule was planned in batches, and moves with each, also by hand."""
    model, batches = net(), loader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = OneCycleLR(optimizer, 1e-2, total_steps=2 * len(batches))
    for _ in range(2):
        for at, (x, y) in enumerate(batches):
            length, _, is_last = window(by, at)
            (F.mse_loss(model(x), y) / length).backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
    return [*ends(model, optimizer), torch.tensor(schedule.get_last_lr())]


def gradients_dropped_first(by: By) -> list[Tensor]:
    model, batches = net(), loader()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = ReduceLROnPlateau(optimizer, patience=0)

    def train() -> float:
        total = 0.0
        for at, (x, y) in enumerate(batches):
            length, is_first, is_last = window(by, at)
            if is_first:
                optimizer.zero_grad(set_to_none=False)
            loss = F.mse_loss(model(x), y)
            (loss / length).backward()
            if is_last:
                optimizer.step()
            total += loss.item()
        return total

    for _ in range(3):
        schedule.step(train())
    return ends(model, optimizer)


def gan(by: By) -> list[Tensor]:
    """The generator's loss reaches the discriminator, which drops that gradient."""
    generator, critic = net(5, inputs=4), net(1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    kept: dict[Tensor, Tensor] = {}  # by hand: the critic's sum, while the other backward runs through it
    for at, (x, _) in enumerate(loader()):
        length, is_first, is_last = window(by, at)
        fake = generator(x[:, 1:])
        critic.zero_grad()
        (critic(fake.detach()).mean() / length - critic(x).square().mean() / length).backward()
        for p in critic.parameters() if by is not None else ():
            kept[p] = p.grad.clone() if p not in kept else kept[p] + p.grad
        if is_last:
            for p in kept:
                p.grad = kept[p]
            of_critic.step()
            kept = {}
        if is_first:
            of_generator.zero_grad()
        (-critic(fake).mean() / length).backward()
        if is_last:
            of_generator.step()
    return ends(generator, critic, of_critic)


def its_own_scaler(by: By) -> list[Tensor]:
    """Its fourth batch overflows, so that a step is skipped, and the batches of that window with it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for at, (x, y) in enumerate(loader()):
        length, is_first, is_last = window(by, at)
        if is_first:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * (float("inf") if at == 3 else 1)
        scaler.scale(loss / length).backward()
        if is_last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return [*ends(model), torch.tensor(scaler.get_scale())]


def without_a_loader(by: By) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = points().tensors
    for at in range(12):
        length, _, is_last = window(by, at, 12)
        chosen = torch.randint(0, 26, (6,))
        (F.mse_loss(model(x[chosen]), y[chosen]) / length).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return ends(model)


def batch_norm_and_dropout(by: By) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for at, (x, y) in enumerate(loader()):
        length, _, is_last = window(by, at)
        (F.mse_loss(model(x), y) / length).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return ends(model)


def a_branch_of_the_model_in_turns(by: By) -> list[Tensor]:
    """Half of the batches do not reach one of its layers: the last of a window, too."""
    model, other = net(), net()
    optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()], lr=1e-2)
    for at, (x, y) in enumerate(loader()):
        length, _, is_last = window(by, at)
        (F.mse_loss((model if at % 2 else other)(x), y) / length).backward()
        if is_last:
            nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return ends(model, other)


def checkpoints_inside(by: By) -> list[Tensor]:
    """The leaves of a reentrant checkpoint are not in the graph around it."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for at, (x, y) in enumerate(loader()):
        length, _, is_last = window(by, at)
        hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        (F.mse_loss(model[2](hidden), y) / length).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return ends(model)


def sparse_embedding(by: By) -> list[Tensor]:
    table, head = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 3)
    optimizers = [torch.optim.SparseAdam(table.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)]
    x, y = labelled(6 * 12).tensors
    for at in range(12):
        length, _, is_last = window(by, at, 12)
        chosen = slice(6 * at, 6 * at + 6)
        (F.cross_entropy(head(table(y[chosen])) + x[chosen, :3], y[chosen]) / length).backward()
        if is_last:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return ends(table, head)


def never_dropped(by: By) -> list[Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for at, (x, y) in enumerate(loader()):
        length, _, is_last = window(by, at)
        (F.mse_loss(model(x), y) / length).backward()
        if is_last:
            optimizer.step()
    return ends(model)


def adversarial_examples(by: By) -> list[Tensor]:
    """The gradient of an input is what it is, in all batches; that of the weights beside it is dropped."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for at, (x, y) in enumerate(loader()):
        length, is_first, is_last = window(by, at)
        x.requires_grad_()
        if by is None:
            F.mse_loss(model(x), y).backward()
            worse = (x + 0.5 * x.grad).detach()
        else:
            worse = (x + 0.5 * torch.autograd.grad(F.mse_loss(model(x), y), x)[0]).detach()
        if is_first:
            optimizer.zero_grad()
        (F.mse_loss(model(worse), y) / length).backward()
        if is_last:
            optimizer.step()
    return ends(model)


def steps_left_out(by: By, limit: float = 1e2, factor: float = 1e4, loads: bool = True) -> list[Tensor]:
    """The loop takes no step with the gradients of some batches, and so of none in their windows."""
    model, batches = net(), loader() if loads else [*loader(6 * 12)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for at, (x, y) in (pair for _ in range(2) for pair in enumerate(batches)):
        length, is_first, is_last = window(by, at, len(batches))
        if is_first:
            optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * (factor if at in (3, len(batches) - 1) else 1)
        (loss / length).backward()
        if is_last and nn.utils.clip_grad_norm_(model.parameters(), 0.5) < limit:
            optimizer.step()
    return ends(model)


def infinite_steps_left_out(by: By) -> list[Tensor]:
    return steps_left_out(by, limit=float("inf"), factor=float("inf"))


def infinite_steps_left_out_without_a_loader(by: By) -> list[Tensor]:
    """Batches of a list: nothing tells which of them a backward is of."""
    return steps_left_out(by, limit=float("inf"), factor=float("inf"), loads=False)


def fetched_ahead(by: By) -> list[Tensor]:
    """The next batch is there before the present one is trained. Its windows are 3, 3, 3, 1 and 4, 4, 2 even so."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        rest = iter(loader())
        following = next(rest)
        for at in range(BATCHES):
            (x, y), following = following, next(rest, None)
            length, is_first, is_last = window(by, at)
            if is_first:
                optimizer.zero_grad()
            (F.mse_loss(model(x), y) / length).backward()
            if is_last:
                optimizer.step()
    x, y = points(6).tensors
    for at in range(12):  # and no loader hands out what follows
        length, is_first, is_last = window(by, at, 12)
        if is_first:
            optimizer.zero_grad()
        (F.mse_loss(model(x), y) / length).backward()
        if is_last:
            optimizer.step()
    return ends(model, optimizer)


def copies(by: By) -> list[Tensor]:
    """A model and its optimizer are copied together, and trained on."""
    model, found = net(), list[Tensor]()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        for at, (x, y) in enumerate(loader()):
            length, _, is_last = window(by, at)
            (F.mse_loss(model(x), y) / length).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        found += ends(model, optimizer)
        model, optimizer = copy.deepcopy((model, optimizer))
    return found


BY_HAND: list[Written] = [
    flat, clipped_with_a_schedule, gradients_dropped_first, gan, its_own_scaler, batch_norm_and_dropout,
    a_branch_of_the_model_in_turns, checkpoints_inside, never_dropped, steps_left_out, infinite_steps_left_out,
    copies, fetched_ahead,
]  # fmt: skip


def in_double(written: Written, by: By) -> list[Tensor]:
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        return written(by)
    finally:
        torch.set_default_dtype(was)


def by_flag(steps: int, written: Callable[[], Any], **settings: Any) -> Any:
    """What the loop returns under `-a`, in this rank of any number."""
    chosen, world = RunSettings(gradient_accumulation_steps=steps, **settings), World.from_env()
    changes = loop_changes(chosen)
    watch = RawLoopTraining(world, chosen, changes) if world.is_distributed else SingleRankWatch(changes)
    watch.begin({})
    try:
        found = written()
        watch.end()
        return found
    finally:
        watch.stop()


def said_by_flag(steps: int, written: Callable[[], Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        by_flag(steps, written)
    return said.getvalue()


@BEFORE_ITS_FIRST_STEP
@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize(
    "written", [*BY_HAND, without_a_loader, sparse_embedding, infinite_steps_left_out_without_a_loader]
)
def test_a_loop_ends_bit_by_bit_as_one_that_accumulates_by_hand(written: Written, steps: int) -> None:
    torch.manual_seed(0)
    by_hand = written(steps)
    torch.manual_seed(0)
    found = by_flag(steps, partial(written, None))
    torch.manual_seed(0)
    assert any(not torch.equal(one, other) for one, other in zip(by_hand, written(None), strict=True))
    assert [torch.equal(one, other) for one, other in zip(by_hand, found, strict=True)] == [True] * len(found)


@BEFORE_ITS_FIRST_STEP
@pytest.mark.parametrize("written", [flat, *(pytest.param(each, marks=pytest.mark.full) for each in BY_HAND[1:5])])
def test_in_two_ranks_a_loop_ends_as_one_that_accumulates_by_hand(written: Written) -> None:
    by_hand = in_double(written, 3)
    for found in run_ranks(2, by_flag, 3, partial(in_double, written, None)):
        torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-12)


def test_batches_that_come_in_parts_are_counted_once() -> None:
    by_hand = in_double(flat, 3)
    for found in run_ranks(2, partial(by_flag, split=4), 3, partial(in_double, flat, None)):
        torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-12)


def test_the_gradient_of_an_input_is_not_divided() -> None:
    by_hand = in_double(adversarial_examples, 3)
    found = in_double(lambda by: by_flag(3, partial(adversarial_examples, by)), None)
    torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-12)


def in_half_precision(kind: str, by: By) -> list[Tensor]:
    """Its second batch overflows in float16: with a scaler its window makes no step."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=by is not None and kind == "fp16")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    for at, (x, y) in enumerate(loader()):
        length, is_first, is_last = window(by, at)
        if is_first:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype) if by is not None else contextlib.nullcontext():
            guess = model(x * (3e4 if at == 1 else 1))
        scaler.scale(F.mse_loss(guess.float(), y) / length).backward()
        if is_last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return ends(model, optimizer)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_precision_by_flag_and_accumulation_by_flag_go_together(kind: str) -> None:
    torch.manual_seed(0)
    by_hand = in_half_precision(kind, 3)
    torch.manual_seed(0)
    found = by_flag(3, partial(in_half_precision, kind, None), raw_precision=kind)
    assert all(map(torch.equal, by_hand, found))


@pytest.mark.parametrize("written", [flat, its_own_scaler])
def test_a_launched_function_accumulates_too(written: Written) -> None:
    by_hand = seeded(written, 3)
    run = launch(seeded, 1, args=(written, None), cpu=True, start_method="inline", gradient_accumulation_steps=3)
    assert all(map(torch.equal, by_hand, run.value))


def seeded(written: Written, by: By) -> list[Tensor]:
    torch.manual_seed(0)
    return written(by)


# What cannot be accumulated -------------------------------------------------------------------------------------------


class Steps:
    """A model with its optimizer, whose weights show whether it has stepped."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.model = net()
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.before = ends(self.model)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)

    @property
    def are_none(self) -> bool:
        return all(map(torch.equal, self.before, ends(self.model)))


def own_accumulation(steps: Steps) -> None:
    for at, (x, y) in enumerate(loader()):
        (steps.loss(x, y) / 2).backward()
        if at % 2:
            steps.optimizer.step()
            steps.optimizer.zero_grad()


def several_steps(steps: Steps) -> None:
    for x, y in loader():
        for _ in range(3):
            steps.optimizer.zero_grad()
            steps.loss(x, y).backward()
            steps.optimizer.step()


def a_closure(steps: Steps) -> None:
    for x, y in loader():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            steps.optimizer.zero_grad()
            loss = steps.loss(x, y)
            loss.backward()
            return loss

        steps.optimizer.step(closure)


def gradients_by_hand(steps: Steps) -> None:
    parameters = list(steps.model.parameters())
    for x, y in loader():
        for p, gradient in zip(parameters, torch.autograd.grad(steps.loss(x, y), parameters), strict=True):
            p.grad = gradient
        steps.optimizer.step()


def steps_in_backwards(steps: Steps) -> None:
    for p in steps.model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: steps.optimizer.step())
    for x, y in loader():
        steps.loss(x, y).backward()


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (steps_in_backwards, "the loop steps inside of loss.backward(), in which gradients cannot wait. Leave -a out."),
        (own_accumulation, "the loop takes several batches for one step by itself. Leave -a out, or its own counting."),
        (several_steps, "the loop takes several steps for each batch, and none would come before 4 batches. Leave -a"),
        (a_closure, "SGD computes its losses itself (a closure), and takes a batch for each step. Leave -a out."),
        (gradients_by_hand, "the loop steps with gradients that it has set itself (torch.autograd.grad)"),
    ],
)
def test_what_cannot_be_accumulated_is_refused_before_the_first_step(
    program: Callable[[Steps], None], sentence: str
) -> None:
    steps = Steps()
    with pytest.raises(FlagConflict) as caught:
        by_flag(4, partial(program, steps))
    assert f"-a 4: {sentence}" in str(caught.value)
    assert steps.are_none


def test_gradients_of_several_batches_that_are_dropped_are_not_accumulated_by_the_loop() -> None:
    """A critic's loss reaches the generator, in each batch until the generator's own."""
    model, critic = net(5), net(1)
    of_model, of_critic = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
    before = ends(model)

    def program() -> None:
        for at, (x, _) in enumerate(loader()):
            of_critic.zero_grad()
            (critic(model(x)).mean() - critic(x).mean()).backward()
            of_critic.step()
            if at % 2:
                of_model.zero_grad()
                (-critic(model(x)).mean()).backward()
                of_model.step()

    by_flag(2, program)
    assert not all(map(torch.equal, before, ends(model)))


def test_clipping_by_value_finds_nothing_before_the_last_batch() -> None:
    steps = Steps()

    def program() -> None:
        for x, y in loader():
            steps.optimizer.zero_grad()
            steps.loss(x, y).backward()
            nn.utils.clip_grad_value_(steps.model.parameters(), 1e-3)
            steps.optimizer.step()

    by_flag(3, program)
    changes = [(now - before).abs().max().item() for now, before in zip(ends(steps.model), steps.before, strict=True)]
    assert 0 < max(changes) < 4.1e-4, "four steps of 0.1"
    with pytest.raises(RuntimeError):
        nn.utils.clip_grad_value_(net().parameters(), 1.0)


def test_a_model_that_the_program_shares_out_has_whole_gradients() -> None:
    assert run_ranks(2, by_flag, 4, gradients_of_its_own) == [[True], [True]]


def gradients_of_its_own() -> list[bool]:
    PartialState()  # forms the process group
    model, (x, y) = net(), points(6).tensors
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss_of = lambda values: F.mse_loss(functional_call(model, values, (x,)), y)  # noqa: E731
    expected = torch.func.grad(loss_of)(weights).values()
    shared = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    F.mse_loss(shared(x), y).backward()
    optimizer.step()
    return [all(torch.allclose(p.grad, one) for p, one in zip(shared.parameters(), expected, strict=True))]


def test_a_refusal_that_the_loop_catches_comes_again_at_the_next_batch() -> None:
    steps, caught = Steps(), []

    def program() -> None:
        for at, (x, y) in enumerate(loader()):
            try:
                (steps.loss(x, y) / 2).backward()
                if at % 2:
                    steps.optimizer.step()
            except FlagConflict as error:
                caught.append(error)

    by_flag(4, program)
    assert len(caught) == BATCHES - 1
    assert steps.are_none


def test_two_ranks_refuse_alike() -> None:
    with pytest.raises(RanksFailed, match=r"FlagConflict: -a 4: the loop takes several batches for one step"):
        run_ranks(2, by_flag, 4, partial(own_accumulation, Steps()))


# What is said ---------------------------------------------------------------------------------------------------------


def train(steps: Steps, batches: Any, after: Callable[[], None] = lambda: None) -> None:
    for x, y in batches:
        steps.optimizer.zero_grad()
        steps.loss(x, y).backward()
        steps.optimizer.step()
        after()


def test_the_line_before_the_first_step_says_what_a_batch_is() -> None:
    said = said_by_flag(4, lambda: train(Steps(), loader()))
    assert said == (
        "nbaccel: -a 4: 4 batches make one step of an optimizer, with the mean of their gradients; what the loop "
        "counts as steps are batches, and its schedulers move with each of them\n"
    )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(points(6 * BATCHES))


def test_without_a_length_a_window_runs_on_and_what_is_left_at_the_end_is_said() -> None:
    steps = Steps()
    said = said_by_flag(4, lambda: [train(steps, DataLoader(Stream(), batch_size=6)) for _ in range(2)] and None)
    assert "made no step" not in said, "20 batches are 5 windows"
    said = said_by_flag(4, lambda: train(steps, DataLoader(Stream(), batch_size=6)))
    assert (
        "-a 4: the last 2 batches made no step, since the loop ended before there were 4; the weights are those of the "
        "last step" in said
    )


def interrupted_after(batches: int) -> Callable[[], None]:
    left = iter(range(batches - 1))

    def check() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    return check


def test_a_loop_that_fails_in_an_open_window_says_what_made_no_step() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(KeyboardInterrupt):
        by_flag(4, lambda: train(Steps(), loader(), interrupted_after(6)))
    assert "-a 4: the last 2 batches made no step" in said.getvalue()


def test_weights_that_are_stepped_by_hand_are_said_to_be_left_alone() -> None:
    weights = torch.zeros(5, 1, requires_grad=True)

    def program() -> None:
        for x, y in loader():
            (x @ weights - y).square().mean().backward()
            with torch.no_grad():
                weights.sub_(0.1 * weights.grad)
            weights.grad = None

    assert said_by_flag(4, program) == "nbaccel: -a 4 has no effect: no optimizer holds what this loop trains\n"


def test_an_average_of_weights_is_said_to_move_with_each_batch() -> None:
    steps, average = Steps(), net().requires_grad_(False)

    def move() -> None:
        with torch.no_grad():
            for mean, p in zip(average.parameters(), steps.model.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)

    assert "such a one moves 4 times for each step" in said_by_flag(4, lambda: train(steps, loader(), move))
    assert "moves 4 times" not in said_by_flag(4, lambda: train(steps, loader()))


TOO_EARLY = (
    "-a 4: gradients are there with the last of 4 batches, and p.grad is None before. A loop that needs those of each "
    "batch, as for SAM or for a norm of each, is right without -a."
)


def _adds(model: torch.nn.Module) -> Any:
    return model[0].weight.grad + 1  # type: ignore[index]


def _stacks(model: torch.nn.Module) -> Any:
    """As the first step of SAM."""
    return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])


def _compares(model: torch.nn.Module) -> Any:
    return max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("reads", [_adds, _stacks, _compares])
def test_code_that_reads_a_gradient_too_early_is_told_why_there_is_none(reads: Callable[[Any], Any]) -> None:
    steps = Steps()
    with pytest.raises((TypeError, RuntimeError, ValueError)) as caught:
        by_flag(4, lambda: train(steps, loader(), lambda: reads(steps.model)))
    assert caught.value.__notes__ == [TOO_EARLY]


def test_an_error_of_something_else_is_told_nothing_of_gradients() -> None:
    def fails() -> None:
        raise RuntimeError("no more disk")

    with pytest.raises(RuntimeError) as caught:
        by_flag(4, lambda: train(Steps(), loader(), fails))
    assert not getattr(caught.value, "__notes__", [])


# Whose batches are counted --------------------------------------------------------------------------------------------


def test_a_checkpoint_may_be_taken_where_no_window_is_open() -> None:
    found = list[bool]()
    by_flag(4, lambda: train(Steps(), loader(), lambda: found.append(window_is_open())))
    assert found == [True, True, True, False] * 2 + [True, False]
    assert not window_is_open()


def test_a_window_that_nothing_goes_on_with_is_not_waited_for() -> None:
    found = list[bool]()

    def program() -> None:
        first, second = Steps(), Steps()
        train(first, list(loader())[:2])  # and never again
        for _ in range(4):
            train(second, loader())
            found.append(window_is_open())
        assert first

    by_flag(4, program)
    assert found == [True, True, False, False]


def test_of_two_optimizers_with_the_same_parameters_the_one_that_steps_counts() -> None:
    def program(by: By) -> list[Tensor]:
        steps = Steps()
        others = [torch.optim.SGD(steps.model.parameters(), lr=0.3) for _ in range(2)]
        assert others
        for at, (x, y) in enumerate(loader()):
            length, _, is_last = window(by, at)
            (steps.loss(x, y) / length).backward()
            if is_last:
                steps.optimizer.step()
                steps.optimizer.zero_grad()
        return ends(steps.model)

    torch.manual_seed(0)
    by_hand = program(4)
    torch.manual_seed(0)
    assert all(map(torch.equal, by_hand, by_flag(4, partial(program, None))))


def test_an_optimizer_of_a_cell_above_is_found() -> None:
    torch.manual_seed(0)
    above = Steps()
    by_flag(BATCHES, lambda: train(above, list(loader())[:-1]))
    assert above.are_none


def test_a_cycle_of_stored_batches_goes_on_in_windows() -> None:
    steps, taken = Steps(), list[int]()
    steps.optimizer.register_step_post_hook(lambda *_: taken.append(1))

    def program() -> None:
        for _, batch in zip(range(32), cycle(loader()), strict=False):
            train(steps, [batch])

    said = said_by_flag(4, program)
    assert "made no step" in said
    assert len(taken) == 3 + 5, "ten batches from the loader, then 22 more"


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
def test_a_scheduler_of_a_cell_above_does_not_say_that_no_step_was_taken() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)

    def loop() -> int:
        for x, y in loader(18):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            schedule.step()
        return schedule.last_epoch

    assert by_flag(3, loop) == 3


def test_a_step_takes_the_mean_and_calls_no_hook_of_the_optimizer_before() -> None:
    steps, taken, calls = Steps(), list[int](), count()
    steps.optimizer.register_step_pre_hook(lambda *_: taken.append(next(calls)))
    by_flag(3, lambda: train(steps, loader(), lambda: taken.append(-1)))
    assert taken == [-1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 2, -1, 3, -1]


def test_another_attempt_begins_without_the_batches_of_the_one_before() -> None:
    accumulation = loop_changes(RunSettings(gradient_accumulation_steps=4))[0]
    watch = SingleRankWatch([accumulation])
    first, second = Steps(), Steps()
    watch.begin({})
    try:
        train(first, list(loader())[:2])
        assert window_is_open()
        watch._begin_anew()
        assert not window_is_open()
        train(second, list(loader())[:3])
        assert window_is_open()
    finally:
        watch.stop()


def test_nothing_is_put_around_a_loop_without_the_flag() -> None:
    assert loop_changes(RunSettings(gradient_accumulation_steps=1)) == loop_changes(RunSettings()) == ()
