"""Steps with gradients that nobody has averaged: an error on all ranks before a weight changes; right programs stay.

Every program trains on two ranks with a part of the rows each, and is compared with one that sees all rows.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbaccel import Accelerator, find_executable_batch_size
from nbaccel.errors import NotPrepared
from nbaccel.local_sgd import LocalSGD
from nbaccel.testing import run_ranks
from nbaccel.train.distributed.store_exchange import StoreExchange
from nbaccel.train.prepare.unaveraged import OtherOptimizers
from nbaccel.train.strategies import Strategy
from nbaccel.utils import DistributedDataParallelKwargs

STEPS = 3

NOTICE = r"the loop calls loss\.backward\(\) itself"


class Net(Module):
    """A body and two heads, of which a forward uses those that it is told to."""

    def __init__(self, heads: str = "a") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.body = torch.nn.Linear(3, 3).double()
        self.a = torch.nn.Linear(3, 1).double()
        self.b = torch.nn.Linear(3, 1).double()
        for head in {"a", "b"} - set(heads):
            getattr(self, head).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        return torch.stack([getattr(self, head)(hidden) for head in self.heads]).sum(0)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def rows_of(step: int) -> Tensor:
    return torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


class Program:
    """What most programs have: an Accelerator, a prepared model with an optimizer, and this rank's rows of a step."""

    def __init__(self, net: Module | None = None, lr: float = 0.1, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **options)
        self.net = net or Net()
        plain = torch.optim.SGD(self.net.parameters(), lr)
        self.model, self.optimizer = self.accelerator.prepare(self.net, plain)

    def rows(self, step: int) -> Tensor:
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        return rows_of(step)[rank::ranks]

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, step: int) -> None:
        self.accelerator.backward(self.model(self.rows(step)).square().mean())
        self.end()


# --- programs that would train one model in each rank ------------------------------------------------------------


def by_the_model_inside(step: int, program: Program) -> None:
    program.accelerator.backward(program.accelerator.unwrap_model(program.model).loss(program.rows(step)))


def by_the_model_inside_now_and_then(step: int, program: Program) -> None:
    model = program.model if step < 2 else program.model.module
    program.accelerator.backward(model(program.rows(step)).square().mean())


def by_the_model_inside_and_a_backward_of_its_own(step: int, program: Program) -> None:
    program.net.loss(program.rows(step)).backward()


def after_a_step_of_its_own_backward(step: int, program: Program) -> None:
    (program.model if step < 1 else program.net)(program.rows(step)).square().mean().backward()


def two_backwards_of_one_forward(step: int, program: Program) -> None:
    out = program.model(program.rows(step))
    program.accelerator.backward(out.square().mean(), retain_graph=True)
    program.accelerator.backward(out.mean())


def two_forwards_and_then_two_backwards(step: int, program: Program) -> None:
    losses = [program.model(rows).square().mean() for rows in program.rows(step).split(2)]
    for loss in losses:
        program.accelerator.backward(loss)


def a_layer_unfrozen(step: int, program: Program) -> None:
    if step == 1:
        program.net.b.requires_grad_(True)
        program.net.heads = "ab"
    program.accelerator.backward(program.model(program.rows(step)).square().mean())


def a_layer_frozen(step: int, program: Program) -> None:
    if step == 1:
        program.net.a.requires_grad_(False)
    program.accelerator.backward(program.model(program.rows(step)).square().mean())


def a_parameter_unused_in_the_only_step(step: int, program: Program) -> None:
    program.net.heads = "a"
    program.accelerator.backward(program.model(program.rows(step)).square().mean())


def a_head_added(step: int, program: Program) -> None:
    if step == 1:
        torch.manual_seed(1)
        program.head = torch.nn.Linear(1, 1).double()
        program.optimizer.add_param_group({"params": list(program.head.parameters())})
    out = program.model(program.rows(step))
    out = program.head(out) if step else out
    program.accelerator.backward(out.square().mean())


def a_layer_replaced(step: int, program: Program) -> None:
    if step == 1:
        torch.manual_seed(1)
        program.net.body = torch.nn.Linear(3, 3).double()
        program.optimizer.param_groups[0]["params"][:2] = program.net.body.parameters()
    program.accelerator.backward(program.model(program.rows(step)).square().mean())


def an_optimizer_that_was_not_prepared(step: int, program: Program) -> None:
    """One more training may come: what has begun to look at such steps does not look twice, nor at others."""
    program.optimizer = torch.optim.SGD(program.net.parameters(), 0.1)
    program.accelerator.backward((program.net if step else program.model)(program.rows(step)).square().mean())


def an_optimizer_of_its_own_with_a_parameter_outside(step: int, program: Program) -> None:
    if step == 0:
        torch.manual_seed(1)
        program.head = torch.nn.Linear(1, 1).double()
        program.optimizer = torch.optim.SGD([*program.net.parameters(), *program.head.parameters()], 0.1)
    program.head(program.model(program.rows(step))).square().mean().backward()


def an_optimizer_and_a_backward_of_its_own(step: int, program: Program) -> None:
    if step == 0:
        program.optimizer = torch.optim.SGD(program.net.parameters(), 0.1)
    program.net.loss(program.rows(step)).backward()


def an_optimizer_of_its_own_in_the_middle_of_a_window(step: int, program: Program) -> None:
    if step == 0:
        program.optimizer = torch.optim.SGD(program.net.parameters(), 0.1)
        program.accelerator.gradient_accumulation_steps = 2
    with program.accelerator.accumulate(program.model):
        program.accelerator.backward(program.model(program.rows(step)).square().mean())


def a_closure_of_an_optimizer_of_its_own(step: int, program: Program) -> None:
    program.optimizer = torch.optim.SGD(program.net.parameters(), 0.1)
    a_closure(step, program)


def a_closure(step: int, program: Program) -> None:
    def closure() -> Tensor:
        program.optimizer.zero_grad()
        loss = program.net.loss(program.rows(step))
        program.accelerator.backward(loss)
        return loss

    program.optimizer.step(closure)


INSIDE = "The last backward came from no forward of the prepared model"
WRONG: dict[Callable[[int, Program], None], tuple[int, str, str]] = {
    by_the_model_inside: (0, "body.weight, body.bias, a.weight, a.bias are averaged", INSIDE),
    by_the_model_inside_now_and_then: (2, "body.weight, body.bias, a.weight, a.bias are averaged", INSIDE),
    by_the_model_inside_and_a_backward_of_its_own: (0, "body.weight", INSIDE),
    after_a_step_of_its_own_backward: (1, "body.weight", INSIDE),
    two_backwards_of_one_forward: (0, "body.weight", INSIDE),
    two_forwards_and_then_two_backwards: (0, "body.weight", INSIDE),
    a_layer_unfrozen: (
        1,
        "the gradients of b.weight, b.bias are averaged by nobody",
        "They were frozen, or not yet in",
    ),
    a_layer_frozen: (1, "body.weight", "2 of 4 parameters (a.weight, a.bias) of Net got no gradient"),
    a_parameter_unused_in_the_only_step: (0, "body.weight", "2 of 6 parameters (b.weight, b.bias) of Net got no"),
    a_head_added: (1, "parameter 6 of the optimizer, 1x1, parameter 7 of the", "No prepared model has them."),
    a_layer_replaced: (1, "body.weight, body.bias are averaged", "They were frozen, or not yet in the model, when"),
    an_optimizer_that_was_not_prepared: (1, "body.weight", INSIDE),
    a_closure: (0, "body.weight", INSIDE),
    an_optimizer_of_its_own_with_a_parameter_outside: (0, "parameter 6 of the opt", "No prepared model has them."),
    an_optimizer_and_a_backward_of_its_own: (0, "body.weight", INSIDE),
    an_optimizer_of_its_own_in_the_middle_of_a_window: (0, "body.weight", "Prepare it, or step it where"),
    a_closure_of_an_optimizer_of_its_own: (0, "body.weight", INSIDE),
}


def _wrong(names: list[str]) -> dict[str, Any]:
    warnings.filterwarnings("ignore", NOTICE)
    found: dict[str, Any] = {}
    for backward in WRONG:
        if backward.__name__ not in names:
            continue
        program = Program(Net("ab" if "unused" in backward.__name__ else "a"))
        for step in range(STEPS):
            before = [each.detach().clone() for each in program.net.parameters()]
            try:
                backward(step, program)
                program.end()
            except NotPrepared as error:
                same = all(map(torch.equal, before, program.net.parameters()))
                found[backward.__name__] = step, str(error), same
                break
        program.accelerator.free_memory()
    return found


def test_gradients_that_nobody_has_averaged_are_an_error_before_the_step() -> None:
    names = [backward.__name__ for backward in WRONG]
    for rank, found in enumerate(run_ranks(2, _wrong, names)):
        for backward, (step, what, why) in WRONG.items():
            at, text, is_as_before = found[backward.__name__]
            assert at == step, (backward.__name__, at)
            counted = step + ("two" in backward.__name__)  # outside of a loader each backward is a step
            assert text.startswith(f"SGD.step in rank {rank} of 2, step {counted}: the gradient")
            assert what in text
            assert why in text
            assert f"other ones in rank {1 - rank}. " in text
            assert is_as_before or "replaced" in backward.__name__


# --- programs that are right -----------------------------------------------------------------------------------------


def plain_training(loss: Callable[[Net, Tensor], Tensor] = Net.loss, heads: str = "a") -> list[Tensor]:
    net = Net(heads)
    optimizer = torch.optim.SGD([each for each in net.parameters() if each.requires_grad], 0.1)
    for step in range(STEPS):
        loss(net, rows_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(net.parameters())


def steps_of(program: Program, backward: Callable[[int], None]) -> list[Tensor]:
    for step in range(STEPS):
        backward(step)
        program.end()
    return list(program.net.parameters())


def usual() -> tuple[list[Tensor], list[Tensor]]:
    program = Program()
    return steps_of(
        program, lambda step: program.accelerator.backward(program.model(program.rows(step)).square().mean())
    ), plain_training()


def own_backward() -> tuple[list[Tensor], list[Tensor]]:
    program = Program()
    return steps_of(
        program, lambda step: program.model(program.rows(step)).square().mean().backward()
    ), plain_training()


def accumulated(*handlers: Any) -> tuple[list[Tensor], list[Tensor]]:
    program = Program(gradient_accumulation_steps=2, kwargs_handlers=[*handlers])
    for step in range(STEPS):
        for rows in program.rows(step).split(2):
            with program.accelerator.accumulate(program.model):
                program.accelerator.backward(program.model(rows).square().mean())
                program.end()
    return list(program.net.parameters()), plain_training()


def held_and_reduced_by_hand() -> tuple[list[Tensor], list[Tensor]]:
    program = Program()

    def backward(step: int) -> None:
        with program.accelerator.no_sync(program.model):
            program.accelerator.backward(program.model(program.rows(step)).square().mean())
        reduce_by_hand(program)

    return steps_of(program, backward), plain_training()


def inside_and_reduced_by_hand() -> tuple[list[Tensor], list[Tensor]]:
    program = Program()

    def backward(step: int) -> None:
        program.accelerator.backward(program.net.loss(program.rows(step)))
        reduce_by_hand(program)

    return steps_of(program, backward), plain_training()


def reduce_by_hand(program: Program) -> None:
    for parameter in program.net.parameters():
        if parameter.grad is not None:
            parameter.grad = program.accelerator.reduce(parameter.grad, "mean")


def gradients_of_its_own() -> tuple[list[Tensor], list[Tensor]]:
    program = Program()

    def backward(step: int) -> None:
        trained = [each for each in program.net.parameters() if each.requires_grad]
        found = torch.autograd.grad(program.net.loss(program.rows(step)), trained)
        for parameter, gradient in zip(trained, found, strict=True):
            parameter.grad = program.accelerator.reduce(gradient, "mean")

    return steps_of(program, backward), plain_training()


def _sharp(net: Module, loss: Callable[[], Tensor], backward: Callable[[Tensor], None]) -> None:
    trained = [each for each in net.parameters() if each.requires_grad]
    backward(loss())
    with torch.no_grad():
        away = [0.05 * each.grad for each in trained if each.grad is not None]
        for parameter, by in zip(trained, away, strict=True):
            parameter.add_(by)
            parameter.grad = None
    backward(loss())
    with torch.no_grad():
        for parameter, by in zip(trained, away, strict=True):
            parameter.sub_(by)


def sharpness_aware() -> tuple[list[Tensor], list[Tensor]]:
    program = Program()
    net, plain = program.net, Net()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(STEPS):
        _sharp(net, lambda: program.model(program.rows(step)).square().mean(), program.accelerator.backward)  # noqa: B023
        program.end()
        _sharp(plain, lambda: plain.loss(rows_of(step)), torch.autograd.backward)  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
    return list(net.parameters()), list(plain.parameters())


def _two(is_joint: bool, backward: Callable[[Accelerator, Any, Any, Tensor], None], raw: bool = False) -> list[Tensor]:
    accelerator = Accelerator(cpu=True)
    actor, critic = Net(), Net()
    sets = [[*actor.parameters(), *critic.parameters()]] if is_joint else [actor.parameters(), critic.parameters()]
    models = accelerator.prepare(actor, critic)
    optimizers = [accelerator.prepare(torch.optim.SGD(each, 0.1)) for each in sets]
    for step in range(STEPS):
        rows = rows_of(step)[accelerator.process_index :: accelerator.num_processes]
        backward(accelerator, *models, rows)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [*actor.parameters(), *critic.parameters()]


def two_losses_in_turn(is_joint: bool) -> tuple[list[Tensor], list[Tensor]]:
    def backward(accelerator: Accelerator, actor: Any, critic: Any, rows: Tensor) -> None:
        for model in (actor, critic):
            accelerator.backward(model(rows).square().mean())

    return _two(is_joint, backward), [*plain_training(), *plain_training()]


def two_losses_after_both_forwards(is_joint: bool) -> tuple[list[Tensor], list[Tensor]]:
    def backward(accelerator: Accelerator, actor: Any, critic: Any, rows: Tensor) -> None:
        losses = [model(rows).square().mean() for model in (actor, critic)]
        for loss in losses:
            accelerator.backward(loss)

    return _two(is_joint, backward), [*plain_training(), *plain_training()]


def two_losses_of_its_own_backward() -> tuple[list[Tensor], list[Tensor]]:
    def backward(accelerator: Accelerator, actor: Any, critic: Any, rows: Tensor) -> None:
        losses = [model(rows).square().mean() for model in (actor, critic)]
        for loss in losses:
            loss.backward()

    return _two(False, backward), [*plain_training(), *plain_training()]


def adversarial(prepares: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """prepares: False leaves the optimizers, and the backward, to torch."""

    def train(made: Any, judge: Any, optimizers: Any, rows: Tensor, backward: Callable[[Tensor], None]) -> None:
        with torch.no_grad():
            fake = made(rows).expand(-1, 3)
        backward(judge(rows).square().mean() - judge(fake).mean())
        optimizers[1].step()
        optimizers[1].zero_grad()
        backward(judge(made(rows).expand(-1, 3)).mean())
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    accelerator = Accelerator(cpu=True)
    nets, plain = [Net(), Net()], [Net(), Net()]
    own = [torch.optim.SGD(each.parameters(), 0.1) for each in nets]
    prepared = accelerator.prepare(*nets, *own) if prepares else [*accelerator.prepare(*nets), *own]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in plain]
    for step in range(STEPS):
        rows = rows_of(step)[accelerator.process_index :: accelerator.num_processes]
        train(*prepared[:2], prepared[2:], rows, accelerator.backward if prepares else torch.autograd.backward)
        train(*plain, optimizers, rows_of(step), torch.autograd.backward)
    return [each for net in nets for each in net.parameters()], [each for net in plain for each in net.parameters()]


def unused_and_looked_for() -> tuple[list[Tensor], list[Tensor]]:
    """A head takes part in every other step; a layer frozen after prepare is trained later."""
    program = Program(Net("ab"), kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    plain = Net("ab")
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(2 * STEPS):
        for net in (program.net, plain):
            net.heads = "ab" if step % 2 else "a"
            net.body.requires_grad_(step > 2)
        program.step(step)
        plain.loss(rows_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(program.net.parameters()), list(plain.parameters())


def unused_in_a_static_graph() -> tuple[list[Tensor], list[Tensor]]:
    net = Net("ab")
    net.heads = "a"
    program = Program(net, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    return steps_of(
        program, lambda step: program.accelerator.backward(program.model(program.rows(step)).square().mean())
    ), plain_training()


def accumulated_in_a_static_graph() -> tuple[list[Tensor], list[Tensor]]:
    return accumulated(DistributedDataParallelKwargs(static_graph=True))


def cast_and_back() -> tuple[list[Tensor], list[Tensor]]:
    """A model that is moved to other data of its own type, as by ``model.cpu()`` and ``model.cuda()``, loses hooks."""
    program = Program()

    def step(number: int) -> None:
        for parameter in program.net.parameters():
            parameter.data = parameter.data.to(torch.complex128)
            parameter.data = torch.view_as_real(parameter.data)[..., 0].clone(memory_format=torch.contiguous_format)
        program.accelerator.backward(program.model(program.rows(number)).square().mean())

    return steps_of(program, step), plain_training()


def adapters() -> tuple[list[Tensor], list[Tensor]]:
    """Trained parts beside a frozen base, in an optimizer that was not prepared; a diagnosis by the model inside."""
    net = Net("b")
    net.body.requires_grad_(False)
    program = Program(net)
    program.optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        program.accelerator.backward(net.loss(program.rows(step)))
        program.optimizer.zero_grad()
        program.step(step)
    plain = Net("b")
    plain.body.requires_grad_(False)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(STEPS):
        plain.loss(rows_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(net.parameters()), list(plain.parameters())


def without_gradients_in_between() -> tuple[list[Tensor], list[Tensor]]:
    """Targets of the same model, computed after its forward, as in Q-learning."""
    program = Program()

    def backward(step: int) -> None:
        out = program.model(program.rows(step))
        with torch.no_grad():
            program.model(program.rows(step))
        program.accelerator.backward(out.square().mean())

    return steps_of(program, backward), plain_training()


def a_part_of_the_model_outside(prepares: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """A scale that no model has, averaged by the program itself."""
    program = Program()
    if not prepares:
        program.optimizer = torch.optim.SGD(program.net.parameters(), 0.1)
    scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    program.optimizer.add_param_group({"params": [scale]})

    def backward(step: int) -> None:
        program.accelerator.backward((scale * program.model(program.rows(step))).square().mean())
        scale.grad = program.accelerator.reduce(scale.grad, "mean")

    found = [*steps_of(program, backward), scale]
    plain = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    net = Net()
    optimizer = torch.optim.SGD([*net.parameters(), plain], 0.1)
    for step in range(STEPS):
        (plain * net(rows_of(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found, [*net.parameters(), plain]


def optimizers_of_its_own() -> tuple[list[Tensor], list[Tensor]]:
    """One of the model's, which steps at the end of each window; a probe's, which rank 0 alone trains."""
    program = Program(gradient_accumulation_steps=2)
    program.optimizer = torch.optim.SGD(program.net.parameters(), 0.1)
    probe = torch.nn.Linear(3, 1).double()
    probing = torch.optim.SGD(probe.parameters(), 0.1)
    for step in range(STEPS):
        for rows in program.rows(step).split(2):
            with program.accelerator.accumulate(program.model):
                program.accelerator.backward(program.model(rows).square().mean())
                if program.accelerator.sync_gradients:
                    program.end()
            if program.accelerator.is_main_process:
                probe(rows).square().mean().backward()
                probing.step()
    return list(program.net.parameters()), plain_training()


def triggered() -> tuple[list[Tensor], list[Tensor]]:
    program = Program()

    def backward(step: int) -> None:
        with program.accelerator.no_sync(program.model):
            losses = [program.model(rows).square().mean() / 2 for rows in program.rows(step).split(2)]
            program.accelerator.backward(losses[0])
        with program.accelerator.trigger_sync_in_backward(program.model):
            program.accelerator.backward(losses[1])

    return steps_of(program, backward), plain_training()


def a_closure_of_the_model() -> tuple[list[Tensor], list[Tensor]]:
    program = Program()
    for step in range(STEPS):

        def closure() -> Tensor:
            program.optimizer.zero_grad()
            loss = program.model(program.rows(step)).square().mean()  # noqa: B023
            program.accelerator.backward(loss)
            return loss

        program.optimizer.step(closure)
    return list(program.net.parameters()), plain_training()


def local_sgd() -> tuple[list[Tensor], list[Tensor]]:
    program = Program()
    with LocalSGD(program.accelerator, program.model, 2) as local:
        for step in range(2 * STEPS):
            program.step(step)
            local.step()
    mine = torch.cat([each.detach().flatten() for each in program.net.parameters()])
    return [mine], [program.accelerator.reduce(mine, "mean")]


def compressed() -> tuple[list[Tensor], list[Tensor]]:
    program = Program(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
    steps_of(program, lambda step: program.accelerator.backward(program.model(program.rows(step)).square().mean()))
    mine = torch.cat([each.detach().flatten() for each in program.net.parameters()])
    return [mine], [program.accelerator.reduce(mine, "mean")]


def independent() -> tuple[list[Tensor], list[Tensor]]:
    """Separate trainings that are meant, as with ``--independent``."""
    os.environ["NBACCEL_INDEPENDENT"] = "1"
    try:
        program = Program()
        steps_of(program, lambda step: program.accelerator.backward(program.net.loss(program.rows(step))))
    finally:
        del os.environ["NBACCEL_INDEPENDENT"]
    mine = torch.cat([each.detach().flatten() for each in program.net.parameters()])
    assert not torch.equal(mine, program.accelerator.reduce(mine, "mean"))
    return [mine], [mine]


def _after_the_accelerator_has_gone() -> bool:
    program = Program()
    strategy = Strategy(program.accelerator.world, torch.device("cpu"))
    OtherOptimizers(strategy, program.accelerator._context.accumulation, []).begin()
    register_optimizer_step_pre_hook(lambda *_: None)  # as of another Accelerator
    del strategy
    net = Net()
    net.loss(rows_of(0)).backward()
    before = net.body.weight.detach().clone()
    torch.optim.SGD(net.parameters(), 0.1).step()
    return not torch.equal(net.body.weight, before)


def test_a_plain_training_steps_after_an_accelerator_that_was_in_doubt() -> None:
    assert run_ranks(1, _after_the_accelerator_has_gone) == [True]


Right = Callable[[], tuple[list[Tensor], list[Tensor]]]

RIGHT: dict[str, tuple[Right, int]] = {
    "usual": (usual, 0),
    "own backward": (own_backward, 0),
    "accumulated": (accumulated, 0),
    "no_sync and an own reduce": (held_and_reduced_by_hand, 0),
    "the model inside and an own reduce": (inside_and_reduced_by_hand, STEPS),
    "gradients of its own": (gradients_of_its_own, STEPS),
    "SAM": (sharpness_aware, 0),
    "two models, a loss each in turn, one optimizer": (lambda: two_losses_in_turn(True), 1),
    "two models, a loss each in turn, two optimizers": (lambda: two_losses_in_turn(False), 1),
    "two forwards, two losses, one optimizer": (lambda: two_losses_after_both_forwards(True), 1),
    "two forwards, two losses, two optimizers": (lambda: two_losses_after_both_forwards(False), 1),
    "two forwards, two losses, own backward": (two_losses_of_its_own_backward, 0),
    "GAN": (adversarial, 0),
    "GAN, optimizers and backward of its own": (lambda: adversarial(prepares=False), 0),
    "optimizers of its own": (optimizers_of_its_own, 0),
    "a parameter outside, averaged, its own optimizer": (lambda: a_part_of_the_model_outside(False), STEPS),
    "unused ones looked for": (unused_and_looked_for, 0),
    "static graph": (unused_in_a_static_graph, 0),
    "static graph, accumulated": (accumulated_in_a_static_graph, 0),
    "cast and back": (cast_and_back, 0),
    "adapters": (adapters, 0),
    "targets without gradients": (without_gradients_in_between, 0),
    "a parameter outside, averaged": (a_part_of_the_model_outside, STEPS),
    "triggered": (triggered, 0),
    "closure": (a_closure_of_the_model, 0),
    "LocalSGD": (local_sgd, 0),
    "a communication hook": (compressed, 0),
    "--independent": (independent, 0),
}
"""Programs that are right, and how often they compare gradients: where a look does not show that all are averaged."""


def _right(programs: dict[str, tuple[Right, int]]) -> dict[str, tuple[float, int]]:
    warnings.filterwarnings("ignore", NOTICE)
    compared = 0
    real = StoreExchange.all

    def counted(*args: Any) -> list[str]:
        nonlocal compared
        compared += 1
        return real(*args)

    StoreExchange.all = counted  # type: ignore[method-assign]
    found: dict[str, tuple[float, int]] = {}
    try:
        for name, (program, _) in programs.items():
            compared = 0
            got, wanted = program()
            found[name] = max((x - y).detach().abs().max().item() for x, y in zip(got, wanted, strict=True)), compared
    finally:
        StoreExchange.all = real  # type: ignore[method-assign]
    return found


def assert_right(programs: dict[str, tuple[Right, int]]) -> None:
    """In two ranks, programs have the parameters of a single process, and compare as often as said there."""
    for found in run_ranks(2, _right, programs):
        assert {name: count for name, (_, count) in found.items()} == {
            name: count for name, (_, count) in programs.items()
        }
        assert {name: error for name, (error, _) in found.items() if error > 1e-12} == {}


def test_programs_that_average_in_their_own_way_stay_right_and_compare_only_where_they_must() -> None:
    assert_right(RIGHT)


def _short_beside_a_comparison() -> tuple[list[int], list[Tensor]]:
    program = Program()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size == 4 and program.accelerator.process_index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        program.accelerator.backward((program.net if batch_size == 4 else program.model)(rows_of(0)).square().mean())
        program.end()

    train()
    return tried, [each.detach() for each in program.net.parameters()]


def test_a_rank_that_runs_out_of_memory_ends_the_comparison_of_its_peer() -> None:
    (tried, first), (_, second) = run_ranks(2, _short_beside_a_comparison)
    assert tried == [4, 2]
    assert all(map(torch.equal, first, second)), "copied from one rank, and averaged since"


def _peft() -> tuple[list[Tensor], int]:
    import peft

    torch.manual_seed(0)
    net = peft.get_peft_model(Net("ab"), peft.LoraConfig(target_modules=["body", "a"], r=2, lora_dropout=0.0))
    net.double()
    program = Program(net)
    real, compared = StoreExchange.all, []
    StoreExchange.all = lambda *args: compared.append(args) or real(*args)  # type: ignore[method-assign, func-returns-value]
    for step in range(STEPS):
        program.step(step)
    return [each.detach() for each in net.parameters()], len(compared)


@pytest.mark.full
def test_adapters_of_peft_train_without_a_comparison() -> None:
    pytest.importorskip("peft", reason="its adapters")
    (first, compared), (second, _) = run_ranks(2, _peft)
    assert compared == 0
    assert all(map(torch.equal, first, second)), "averaged by DDP"


class _WithRate(torch.optim.SGD):
    """Takes a learning rate at its step, where torch's take a closure."""

    def step(self, rate: float | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = rate
        super().step()


def _folds() -> tuple[list[bool], float]:
    """Train two folds, each with an Accelerator of its own; return which models are still there."""
    models: list[weakref.ref[torch.nn.Parameter]] = []
    for _ in range(2):
        accelerator = Accelerator()
        model = torch.nn.Linear(2, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        own = _WithRate(model.parameters(), lr=0.0)
        accelerator.backward(model(torch.ones(2, 2)).mean())
        optimizer.step()
        own.step(0.5)
        models.append(weakref.ref(next(model.parameters())))
        rate = own.param_groups[0]["lr"]
        del accelerator, model, optimizer, own
        gc.collect()
    return [model() is not None for model in models], rate


def test_an_accelerator_that_is_dropped_takes_its_models_along_and_own_steps_get_what_they_are_given() -> None:
    assert run_ranks(2, _folds) == [([False, False], 0.5)] * 2
