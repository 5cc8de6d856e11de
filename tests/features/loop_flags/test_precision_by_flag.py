"""`-p` above an unmodified loop: bit by bit the loop with an autocast and a GradScaler by hand, or a refusal."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator
from nbaccel.base.events import Event, Loss, outlet
from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.errors import FlagConflict
from nbaccel.features.loop_flags.loop_precision import SKIPS_IN_A_ROW, LoopInBf16, LoopInFp16
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.raw_loop.single_rank import SingleRankWatch
from train.raw_loop.in_turn import watched

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
INTERVAL = 4
"""Steps after which a scale doubles here, so that it does."""


class Plain:
    """Writes nothing into a loop: what a flag is above."""

    def cast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def back(self, loss: Tensor) -> None:
        loss.backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is scaled."""

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            optimizer.step()

    def factor(self) -> float:
        return 1.0


class ByHand(Plain):
    """Writes an autocast and a GradScaler into a loop, as a person does."""

    def __init__(self, name: str) -> None:
        self.dtype = DTYPES[name]
        self.scaler = torch.amp.GradScaler("cpu", enabled=name == "fp16", growth_interval=INTERVAL)

    def cast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=self.dtype)

    def back(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.scaler.unscale_(optimizer)

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def factor(self) -> float:
        return self.scaler.get_scale()


Shape = Callable[[Plain], Sequence[nn.Module]]

SHAPES: list[Shape] = []


def shape(function: Shape) -> Shape:
    SHAPES.append(function)
    return function


def net(inputs: int = 8, outputs: int = 4, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, outputs))


def batches(count: int = 20, is_wild: bool = True) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets; two wild batches have gradients that are infinite in fp16."""
    numbers = torch.Generator().manual_seed(1)
    xs = [torch.randn(6, 8, generator=numbers) for _ in range(count)]
    if is_wild:
        xs[5], xs[11] = xs[5] * 1e4, xs[11] * 3e4
    return [(x, torch.randint(0, 4, (6,), generator=numbers)) for x in xs]


def trained(way: Plain, model: nn.Module, optimizer: torch.optim.Optimizer, is_wild: bool = True) -> list[nn.Module]:
    for x, y in batches(is_wild=is_wild):
        with way.cast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        way.back(loss)
        way.step(optimizer)
    return [model]


@shape
def flat(way: Plain) -> Sequence[nn.Module]:
    model = net()
    return trained(way, model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))


@shape
def copied_with_its_optimizer(way: Plain) -> Sequence[nn.Module]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    trained(way, model, optimizer)
    model.eval()
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    return [model, *trained(way, copied, its_optimizer)]


@shape
def fused(way: Plain) -> Sequence[nn.Module]:
    model = net()
    return trained(way, model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True))


@shape
def clip_and_scheduler(way: Plain) -> Sequence[nn.Module]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    for x, y in batches():
        with way.cast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        way.back(loss)
        way.unscale(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        way.step(optimizer)
        scheduler.step()
    return [model]


@shape
def clip_that_hides_an_infinity(way: Plain) -> Sequence[nn.Module]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for x, y in batches():
        with way.cast():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        way.back(loss)
        way.unscale(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        way.step(optimizer)
    return [model]


@shape
def own_accumulation(way: Plain) -> Sequence[nn.Module]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for number, (x, y) in enumerate(batches()):
        with way.cast():
            loss = F.cross_entropy(model(x), y) / 4
        way.back(loss)
        if number % 4 == 3:
            way.step(optimizer)
            optimizer.zero_grad()
    return [model]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return 2 * context.saved_tensors[0] * gradients[0]


class Layers(nn.Module):
    """Two halves, and what is between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh, is_reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = net(8, 16), net(16, 4, seed=1)
        self.between = between
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.is_reentrant is not None:
            return self.second(checkpoint(self.first, x, use_reentrant=self.is_reentrant))
        return self.second(self.between(self.first(x)))


@shape
def a_function_of_autograd(way: Plain) -> Sequence[nn.Module]:
    model = Layers(Square.apply)
    return trained(way, model, torch.optim.SGD(model.parameters(), 0.05))


@shape
def checkpointed(way: Plain) -> Sequence[nn.Module]:
    model = Layers(is_reentrant=False)
    return trained(way, model, torch.optim.SGD(model.parameters(), 0.05))


@shape
def checkpointed_by_a_backward_inside(way: Plain) -> Sequence[nn.Module]:
    model = Layers(is_reentrant=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for number, (x, y) in enumerate(batches()):
        with way.cast():
            loss = F.cross_entropy(model(x.clone().requires_grad_()), y)
        way.back(loss)
        if number % 2:
            way.step(optimizer)
            optimizer.zero_grad()
    return [model]


@shape
def compiled(way: Plain) -> Sequence[nn.Module]:
    torch._dynamo.reset()
    model = net()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    trained(way, fast, torch.optim.SGD(model.parameters(), 0.05))
    return [model]


@shape
def frozen_teacher(way: Plain) -> Sequence[nn.Module]:
    teacher, model = net(seed=5).requires_grad_(False).eval(), net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, _ in batches(is_wild=False):
        with torch.no_grad():
            wanted = teacher(x)
        with way.cast():
            found = model(x)
        loss = F.kl_div(F.log_softmax(found.float(), 1), F.softmax(wanted, 1), reduction="batchmean")
        optimizer.zero_grad()
        way.back(loss)
        way.step(optimizer)
    return [model]


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        found = self.net(x)
        return {"loss": F.cross_entropy(found, y), "logits": found}


@shape
def loss_of_the_model(way: Plain) -> Sequence[nn.Module]:
    model = WithLoss()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for x, y in batches():
        with way.cast():
            loss = model(x, y)["loss"]
        optimizer.zero_grad()
        way.back(loss)
        way.step(optimizer)
    return [model]


@shape
def gradients_of_the_input(way: Plain) -> Sequence[nn.Module]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for x, y in batches(is_wild=False):
        x = x.clone().requires_grad_()
        with way.cast():
            loss = F.cross_entropy(model(x), y)
        way.back(loss)
        assert x.grad is not None
        changed = (x + 0.1 * (x.grad / way.factor()).sign()).detach()
        optimizer.zero_grad()
        with way.cast():
            loss = F.cross_entropy(model(changed), y)
        way.back(loss)
        way.step(optimizer)
    return [model]


@shape
def gradient_penalty(way: Plain) -> Sequence[nn.Module]:
    model = net(outputs=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for x, _ in batches(is_wild=False):
        x = x.clone().requires_grad_()
        with way.cast():
            score = model(x).float().sum()
        (slope,) = torch.autograd.grad(score * way.factor(), x, create_graph=True)
        slope = slope * (1 / way.factor())
        loss = score / 6 + 10 * ((slope.norm(2, 1) - 1) ** 2).mean()
        optimizer.zero_grad()
        way.back(loss)
        way.step(optimizer)
    return [model]


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(11, 8, sparse=True)
        self.out = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x))


@shape
def sparse_gradients(way: Plain) -> Sequence[nn.Module]:
    torch.manual_seed(0)
    model = Autoencoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for number in range(8):
        ids = (torch.arange(12).reshape(4, 3) * (number + 1)) % 11
        with way.cast():
            loss = F.cross_entropy(model(ids), ids[:, 0] % 4)
        optimizer.zero_grad()
        way.back(loss)
        way.step(optimizer)
    return [model]


@contextmanager
def changed_by(change: LoopInBf16) -> Iterator[SingleRankWatch]:
    watch = SingleRankWatch([change])
    watch.say = lines.append  # type: ignore[method-assign]
    watch.begin(None)
    try:
        yield watch
        watch.end()
    finally:
        watch.stop()


def made(name: str) -> LoopInBf16:
    return LoopInBf16() if name == "bf16" else LoopInFp16(growth_interval=INTERVAL)


lines: list[str] = []


@pytest.fixture(autouse=True)
def _a_clean_place() -> Iterator[None]:
    """What others have left is collected, so that no optimizer of another test is found."""
    gc.collect()
    lines.clear()
    before = torch.nn.Module.__call__, torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad
    real = torch.amp.GradScaler.scale
    yield
    assert before == (torch.nn.Module.__call__, torch.optim.Optimizer.zero_grad, torch.nn.Module.zero_grad)
    assert torch.amp.GradScaler.scale is real or hasattr(torch.amp.GradScaler.scale, "__wrapped__")


def bits(models: Sequence[nn.Module]) -> list[Tensor]:
    return [value.detach().clone() for model in models for value in model.state_dict().values()]


def are_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("loop", SHAPES, ids=lambda loop: loop.__name__)
def test_a_loop_below_the_flag_ends_bit_by_bit_as_written_by_hand(name: str, loop: Shape) -> None:
    by_hand, change = ByHand(name), made(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, as_written = bits(loop(by_hand)), bits(loop(Plain()))
        with changed_by(change):
            found = bits(loop(Plain()))
            scale = change.scale if isinstance(change, LoopInFp16) else by_hand.scaler.get_scale()
    assert are_equal(found, expected)
    assert not are_equal(found, as_written)
    assert scale == by_hand.scaler.get_scale()
    assert not lines


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_two_optimizers_of_one_round_share_the_scale_as_by_hand(name: str) -> None:
    with changed_by(made(name)):
        found = bits(gan(Plain(), forward_only=False))
    assert are_equal(found, bits(gan(ByHand(name), forward_only=True)))


def gan(way: Plain, forward_only: bool) -> Sequence[nn.Module]:
    """Losses are computed outside of the autocast, as outputs of what is prepared are; each step moves the scale."""
    generator, critic = net(8, 8), net(8, 1, seed=1)
    if forward_only:
        for model in (generator, critic):
            model.forward = cast_forward(way, model.forward)  # type: ignore[method-assign]
    of_generator = torch.optim.Adam(generator.parameters(), 1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), 1e-3)
    criterion = nn.BCEWithLogitsLoss()
    torch.manual_seed(3)
    for x, _ in batches(is_wild=False):
        fake = generator(torch.randn(6, 8))
        loss = criterion(critic(x), torch.ones(6, 1)) + criterion(critic(fake.detach()), torch.zeros(6, 1))
        of_critic.zero_grad()
        way.back(loss)
        way.step(of_critic)
        loss = criterion(critic(fake), torch.ones(6, 1))
        of_generator.zero_grad()
        way.back(loss)
        way.step(of_generator)
    return [generator, critic]


def cast_forward(way: Plain, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cast(*args: Any) -> Tensor:
        with way.cast():
            return forward(*args).float()

    return cast


def test_an_optimizer_does_not_pay_for_a_phase_in_which_another_stepped_its_parameters() -> None:
    def loop(way: Plain) -> Sequence[nn.Module]:
        model = net()
        first, second = (torch.optim.SGD(model.parameters(), rate) for rate in (0.05, 0.02))
        for at, (x, y) in enumerate(batches(14)):
            optimizer = second if 3 <= at < 8 else first  # a wild batch comes in each phase
            optimizer.zero_grad()
            with way.cast():
                loss = F.cross_entropy(model(x), y)
            way.back(loss)
            way.step(optimizer)
        return [model]

    by_hand, change = ByHand("fp16"), LoopInFp16(growth_interval=INTERVAL)
    expected = bits(loop(by_hand))
    with changed_by(change):
        assert are_equal(bits(loop(Plain())), expected)
        assert change.scale == by_hand.factor()


def test_a_flag_stays_where_only_some_of_its_gradients_are_dropped() -> None:
    """One optimizer drops those that it holds; those of another layer are infinite still, and clipped by value."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    before = bits([model])
    with changed_by(made("fp16")):
        of_all, of_last = (torch.optim.SGD(each.parameters(), 0.05) for each in (model, model[1]))
        x, y = batches(1, is_wild=False)[0]
        (F.cross_entropy(model(x), y) * 1e30).backward()
        of_last.zero_grad()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        F.cross_entropy(model[1](x), y).backward()
        of_all.step()
    assert are_equal(bits([model]), before)


def test_an_infinite_batch_of_a_window_is_known_to_its_step() -> None:
    """Two backwards per batch: the gradients of the first one wait when the second one comes."""
    model = net()
    before, steps = bits([model]), RunSettings(raw_precision="fp16", gradient_accumulation_steps=2)
    with watched(steps):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for at, (x, y) in enumerate(batches(2, is_wild=False)):
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * (1e30 if at == 0 else 1.0)).backward()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert are_equal(bits([model]), before)


def test_a_closure_computes_in_bf16_as_by_hand_and_is_refused_in_fp16() -> None:
    def loop(way: Plain) -> Sequence[nn.Module]:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4)
        for x, y in batches(4, is_wild=False):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                with way.cast():
                    loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return [model]

    expected = bits(loop(ByHand("bf16")))
    with changed_by(made("bf16")):
        assert are_equal(bits(loop(Plain())), expected)
    refusal = r"-p fp16 cannot step with a closure \(LBFGS\): use -p bf16\."
    with pytest.raises(FlagConflict, match=refusal), changed_by(made("fp16")):
        loop(Plain())


SCALED_BY_LOOP = "-p fp16: a GradScaler of this cell scales losses; what these train is left to it"


def test_a_second_stage_is_scaled_after_a_first_one_with_a_scaler_of_its_own() -> None:
    both = ByHand("fp16"), ByHand("fp16")
    expected = [bits(flat(each)) for each in both]
    own, change = ByHand("fp16"), LoopInFp16(growth_interval=INTERVAL)
    with changed_by(change):
        assert are_equal(bits(flat(own)), expected[0])
        assert are_equal(bits(flat(Plain())), expected[1])
        assert change.scale == both[1].factor()
    assert lines == [SCALED_BY_LOOP]


def test_what_a_loop_brings_of_the_same_type_is_left_alone() -> None:
    expected, by_hand = bits(flat(ByHand("fp16"))), ByHand("fp16")
    change = LoopInFp16(growth_interval=INTERVAL)
    with changed_by(change):
        assert are_equal(bits(flat(by_hand)), expected)
        assert change.skipped == 0, "the loop's own scaler leaves steps out"
    assert lines == [SCALED_BY_LOOP]
    expected, by_hand = bits(flat(ByHand("bf16"))), ByHand("bf16")
    with changed_by(made("bf16")):
        assert are_equal(bits(flat(by_hand)), expected)


def test_an_autocast_of_another_type_is_refused() -> None:
    with pytest.raises(FlagConflict) as refused, changed_by(made("fp16")):
        flat(ByHand("bf16"))
    assert str(refused.value) == (
        "-p fp16: the loop computes under an autocast of its own, in bfloat16. Leave -p out, or the torch.autocast."
    )


def test_weights_of_float16_are_refused_in_fp16() -> None:
    model = net().half()
    before = bits([model])
    refusal = r"trains parameters of float32, and the model's are float16 \(model\.half\(\)\?\)"
    with pytest.raises(FlagConflict, match=refusal), changed_by(made("fp16")):
        trained(Plain(), model, torch.optim.SGD(model.parameters(), 0.05))
    assert are_equal(bits([model]), before)


def test_a_hook_on_a_gradient_is_refused_in_fp16_and_not_in_bf16() -> None:
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        model = net()
        getattr(model[0].weight, hook)(lambda gradient: None)
        refusal = r"a hook on a parameter's gradient \(register_hook\), which would see multiplied ones"
        with pytest.raises(FlagConflict, match=refusal), changed_by(made("fp16")):
            trained(Plain(), model, torch.optim.SGD(model.parameters(), 0.05))
        with changed_by(made("bf16")):
            trained(Plain(), model, torch.optim.SGD(model.parameters(), 0.05))


def test_steps_by_hand_compute_in_bf16_and_are_refused_in_fp16() -> None:
    def loop(way: Plain) -> Sequence[nn.Module]:
        model = net()
        for x, y in batches(4, is_wild=False):
            with way.cast():
                loss = F.cross_entropy(model(x), y)
            way.back(loss)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None
        return [model]

    expected = bits(loop(ByHand("bf16")))
    with changed_by(made("bf16")):
        assert are_equal(bits(loop(Plain())), expected)
    refusal = r"and this loop steps by hand, without an optimizer\. -p bf16 has none\."
    with pytest.raises(FlagConflict, match=refusal), changed_by(made("fp16")):
        loop(Plain())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_loop_in_which_no_trained_module_is_called_is_told_so(name: str) -> None:
    weights = torch.randn(4, 8, requires_grad=True)
    optimizer = torch.optim.SGD([weights], 0.05)
    with changed_by(made(name)):
        for x, y in batches(4, is_wild=False):
            optimizer.zero_grad()
            F.cross_entropy(F.linear(x, weights), y).backward()
            optimizer.step()
    assert lines == [f"-p {name} changed nothing: no module that an optimizer trains was called"]


def test_a_loop_of_plain_tensors_is_told_so_at_its_end_and_a_model_of_float64_at_its_first_backward() -> None:
    weights = torch.zeros(4, requires_grad=True)
    with changed_by(made("bf16")):
        (weights * 2).sum().backward()
        with torch.no_grad():
            weights -= 0.1
        assert not lines
    assert lines == ["-p bf16 changed nothing: no module that an optimizer trains was called"]
    lines.clear()
    model = net().double()
    with changed_by(made("fp16")):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.ones(2, 8).double()).sum().backward()
        optimizer.step()
    assert lines == ["-p fp16 changed nothing: the model is of float64, which torch.autocast leaves as it is"]


def test_gradients_of_parameters_that_no_optimizer_steps_are_refused_in_fp16() -> None:
    model = net()
    refusal = r"and this loop steps by hand, without an optimizer\. -p bf16 has none\."
    with pytest.raises(FlagConflict, match=refusal), changed_by(made("fp16")):
        torch.autograd.grad(model(torch.ones(2, 8)).sum(), list(model.parameters()))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_an_optimizer_of_a_cell_above_is_found(name: str) -> None:
    def begun(way: Plain) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)

    by_hand = ByHand(name)
    model, optimizer, scheduler = begun(by_hand)
    expected = bits(trained(by_hand, model, optimizer))
    model, optimizer, scheduler = begun(Plain())
    step = vars(optimizer)["step"]
    with changed_by(made(name)):
        assert are_equal(bits(trained(Plain(), model, optimizer)), expected)
    assert vars(optimizer)["step"] is step, "the scheduler's, as before"
    scheduler.step()


def test_an_optimizer_is_left_as_it_was_made_and_is_freed_with_its_last_name() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with changed_by(made("fp16")):
        trained(Plain(), model, optimizer)
        assert "step" in vars(optimizer)
        pickle.loads(pickle.dumps(copy.deepcopy(optimizer)))
        inner = torch.optim.SGD(net().parameters(), 0.05)
        gone = weakref.ref(inner)
        gc.disable()
        try:
            del inner
            assert gone() is None
        finally:
            gc.enable()
    assert "step" not in vars(optimizer)


def test_what_prepares_by_itself_is_left_alone_from_then_on() -> None:
    model = net()
    with changed_by(made("bf16")):
        accelerator = Accelerator(cpu=True)
        first = accelerator.prepare(model)
        assert nn.Module.__call__ is torch.nn.modules.module.Module._wrapped_call_impl
        assert first(torch.ones(2, 8)).dtype == torch.float32


def test_frozen_models_metrics_and_losses_stay_in_fp32() -> None:
    model, teacher, metric = net(), net(seed=5).requires_grad_(False).eval(), net(seed=6)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x, y = batches(1, is_wild=False)[0]
    wanted = teacher(x), metric(x)
    with changed_by(made("bf16")):
        found = model(x)
        F.cross_entropy(found, y).backward()
        optimizer.step()
        assert torch.equal(teacher(x), wanted[0])
        assert torch.equal(metric(x), wanted[1]), "in training mode, and no optimizer holds it"


def test_the_loss_that_is_reported_has_no_factor() -> None:
    seen: list[Event] = []
    with outlet(seen.append), changed_by(made("fp16")):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        x, y = batches(1, is_wild=False)[0]
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    assert [float(event.value) for event in seen if isinstance(event, Loss)] == [loss.item()]


def test_an_infinite_loss_is_said_and_never_stepped() -> None:
    model = net()
    before = bits([model])
    with changed_by(made("fp16")):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(SKIPS_IN_A_ROW + 1):
            optimizer.zero_grad()
            (model(torch.ones(2, 8)).sum() * float("inf")).backward()
            optimizer.step()
    assert are_equal(bits([model]), before)
    assert len(lines) == 1
    assert "50 optimizer steps in a row were left out" in lines[0]


def test_a_loop_that_leaves_out_infinite_steps_itself_gets_a_smaller_scale() -> None:
    model, change = net(), LoopInFp16()
    steps = 0
    with changed_by(change):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(60):
            x, y = batches(1, is_wild=False)[0]
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * 3e4).backward()
            if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                optimizer.step()
                steps += 1
    assert steps > 10


def test_gradients_that_come_from_no_backward_are_looked_at_before_a_step() -> None:
    model = net()
    before = bits([model])
    with changed_by(made("fp16")):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        x, y = batches(1, is_wild=False)[0]
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y) * 1e30, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert are_equal(bits([model]), before)


# In several ranks ---------------------------------------------------------------------------------------------


def in_a_rank(name: str, loop: Shape, is_by_hand: bool) -> tuple[list[Tensor], float, int]:
    change, way = made(name), ByHand(name) if is_by_hand else Plain()
    watch = RawLoopTraining(World.from_env(), RunSettings(), [] if is_by_hand else [change])
    watch.begin(None)
    try:
        found = bits(loop(way))
        scale = way.factor() if isinstance(way, ByHand) or not isinstance(change, LoopInFp16) else change.scale
        skipped = getattr(change, "skipped", 0)
        watch.end()
    finally:
        watch.stop()
    return found, scale, skipped


def over_a_loader(way: Plain) -> Sequence[nn.Module]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    xs, ys = zip(*batches(), strict=True)
    for _ in range(2):
        for x, y in DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), 6):
            with way.cast():
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            way.back(loss)
            way.unscale(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            way.step(optimizer)
    return [model]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_two_ranks_end_as_by_hand_in_two_ranks(name: str) -> None:
    by_hand = run_ranks(2, in_a_rank, name, over_a_loader, True)
    by_flag = run_ranks(2, in_a_rank, name, over_a_loader, False)
    for (found, scale, skipped), (expected, expected_scale, _) in zip(by_flag, by_hand, strict=True):
        assert are_equal(found, expected)
        assert are_equal(found, by_hand[0][0])
        assert name == "bf16" or scale == expected_scale
        assert skipped > 0 or name == "bf16"
