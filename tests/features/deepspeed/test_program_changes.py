"""Programs that read or change a model or optimizer which DeepSpeed has cut: equal to one process, or refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import Accelerator, DeepSpeedPlugin
from nbaccel.features.deepspeed.optimizer_probe import refuse_optimizer
from nbaccel.testing import run_ranks
from nbaccel.utils.other import GatheredParameters

pytestmark = pytest.mark.timeout(600)
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs the package deepspeed: make test-deepspeed"
)

BATCH = 8
SETTINGS: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2, states on the host": {"stage": 2, "offload_optimizer_device": "cpu"},
}

Program = Callable[[Accelerator], dict[str, Tensor]]
Step = Callable[[int, Any, Any, Accelerator], object]


class Net(nn.Module):
    """Layers of equal shapes, of which `side` and `other` are used by choice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.side, self.other, self.last = (
            nn.Linear(4, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 1),
        )

    def forward(self, inputs: Tensor, takes: str = "both") -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        if takes == "both":
            return self.last(self.side(hidden) + self.other(hidden))
        return self.last((self.side if takes == "side" else self.other)(hidden))


def _loader(accelerator: Accelerator) -> Any:
    inputs = torch.randn(6 * BATCH, 4, generator=torch.Generator().manual_seed(1), device="cpu")
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), BATCH // accelerator.num_processes)


def _nothing(*_: Any) -> None:
    pass


def _trained(
    accelerator: Accelerator,
    before: Step = _nothing,
    after: Step = _nothing,
    of: Callable[[nn.Module], Any] = nn.Module.parameters,
    takes: Callable[[Accelerator], str] = lambda _: "both",
) -> dict[str, Tensor]:
    plain = Net()
    optimizer: Any = torch.optim.SGD(of(plain), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, _loader(accelerator))
    for number, (inputs, wanted) in enumerate(loader):
        before(number, model, optimizer, accelerator)
        accelerator.backward(F.mse_loss(model(inputs, takes(accelerator)), wanted))
        after(number, model, optimizer, accelerator)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in accelerator.get_state_dict(model).items()}


# -- what is as in one process


def _weights_are_clamped(accelerator: Accelerator) -> dict[str, Tensor]:
    def before(number: int, model: Any, optimizer: Any, accelerator: Accelerator) -> None:
        with torch.no_grad():
            for weight in accelerator.unwrap_model(model).parameters():
                weight.clamp_(-0.2, 0.2)

    return _trained(accelerator, before)


def _data_of_weights_is_clamped(accelerator: Accelerator) -> dict[str, Tensor]:
    def before(number: int, model: Any, optimizer: Any, accelerator: Accelerator) -> None:
        for weight in model.parameters():
            weight.data.clamp_(-0.2, 0.2)

    return _trained(accelerator, before)


def _gathered_weights_are_clamped(accelerator: Accelerator) -> dict[str, Tensor]:
    def before(number: int, model: Any, optimizer: Any, accelerator: Accelerator) -> None:
        weights = list(model.parameters())
        with GatheredParameters(weights, modifier_rank=0), torch.no_grad():
            for weight in weights:
                weight.clamp_(-0.2, 0.2)

    return _trained(accelerator, before)


def _the_best_weights_are_loaded(accelerator: Accelerator) -> dict[str, Tensor]:
    best = Net().state_dict()

    def before(number: int, model: Any, optimizer: Any, accelerator: Accelerator) -> None:
        if number == 3:
            answer = accelerator.unwrap_model(model).load_state_dict(best)
            assert not answer.missing_keys
            assert not answer.unexpected_keys

    return _trained(accelerator, before)


def _states_are_loaded(accelerator: Accelerator) -> dict[str, Tensor]:
    plain = Net()
    earlier = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain(torch.ones(2, 4, device="cpu")).mean().backward()
    earlier.step()
    states = copy.deepcopy(earlier.state_dict())

    def before(number: int, model: Any, optimizer: Any, accelerator: Accelerator) -> None:
        if number == 0:
            optimizer.load_state_dict(states)

    return _trained(accelerator, before)


def _a_part_is_not_the_optimizers(accelerator: Accelerator) -> dict[str, Tensor]:
    trained = _trained(accelerator, of=lambda model: [*model.first.parameters(), *model.last.parameters()])
    accelerator.end_training()
    return trained


def _an_evaluation_stands_in_a_window(accelerator: Accelerator) -> dict[str, Tensor]:
    accelerator.gradient_accumulation_steps = 4
    plain = Net()
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(plain, optimizer, _loader(accelerator))
    norms = []
    for inputs, wanted in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(inputs), wanted))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model.eval()
            model(torch.ones(2, 4, device="cpu"))
            model.train()
    trained = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return {**trained, "norms": torch.tensor(norms)}  # of 4 batches, and of the short window's 2


EQUAL: dict[str, Program] = {
    "gathered weights are clamped": _gathered_weights_are_clamped,
    "the best weights are loaded": _the_best_weights_are_loaded,
    "states are loaded": _states_are_loaded,
    "a part is not the optimizer's": _a_part_is_not_the_optimizers,
    "an evaluation stands in a window": _an_evaluation_stands_in_a_window,
}
EQUAL_IN_PLACE: dict[str, Program] = {
    "weights are clamped": _weights_are_clamped,
    "data of weights is clamped": _data_of_weights_is_clamped,
}
"""Equal where each rank has whole weights which the engine steps."""


def _run(programs: dict[str, Program], options: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, program in programs.items():
        accelerator = Accelerator(cpu=True, **options())
        try:
            found[name] = program(accelerator)
        except (NotImplementedError, ValueError) as error:
            found[name] = str(error)
        accelerator.end_training()
    return found


def _zero(stage: int, **fields: Any) -> dict[str, Any]:
    table = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return {"deepspeed_plugin": DeepSpeedPlugin({"zero_optimization": table}, **fields)}


@needs_deepspeed
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_program_writes_and_loads_is_trained_on_with(setting: str) -> None:
    programs = EQUAL | (EQUAL_IN_PLACE if setting in ("1", "2") else {})
    [alone] = run_ranks(1, lambda: _run(programs, dict), timeout_s=200)
    found, *_ = run_ranks(2, lambda: _run(programs, lambda: _zero(**SETTINGS[setting])), timeout_s=300)
    for name, wanted in alone.items():
        assert not isinstance(found[name], str), f"{name}: {found[name]}"
        for key, value in wanted.items():
            torch.testing.assert_close(found[name][key], value, atol=1e-6, rtol=1e-5, msg=f"{name}: {key}")


def _in_half() -> dict[str, Tensor]:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", **_zero(2))

    def before(number: int, model: Any, optimizer: Any, accelerator: Accelerator) -> None:
        if number == 5:
            optimizer.param_groups[0]["lr"] = 0.0
            with torch.no_grad():
                accelerator.unwrap_model(model).last.bias.fill_(0.25)

    return _trained(accelerator, before)


@needs_deepspeed
def test_a_weight_that_is_written_under_bf16_is_that_of_the_next_step() -> None:
    assert run_ranks(2, _in_half, timeout_s=200)[0]["last.bias"].item() == 0.25


# -- what is refused


def _own_backward(accelerator: Accelerator) -> dict[str, Tensor]:
    plain = Net()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model(torch.ones(2, 4, device="cpu")).mean().backward()
    optimizer.step()
    return {}


def _calls_of_the_engine(accelerator: Accelerator) -> dict[str, Tensor]:
    plain = Net()
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model.backward(model(torch.ones(2, 4, device="cpu")).mean())
    return {}


def _thawed(accelerator: Accelerator) -> dict[str, Tensor]:
    def before(number: int, model: Any, optimizer: Any, accelerator: Accelerator) -> None:
        if number == 2:
            accelerator.unwrap_model(model).side.requires_grad_(False)

    return _trained(accelerator, before)


def _grown(accelerator: Accelerator) -> dict[str, Tensor]:
    def before(number: int, model: Any, optimizer: Any, accelerator: Accelerator) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, device="cpu"))]})

    return _trained(accelerator, before)


def _clipped_by_torch(accelerator: Accelerator) -> dict[str, Tensor]:
    return _trained(accelerator, after=lambda _, model, *__: clip_grad_norm_(model.parameters(), 1.0))


def _branches_by_rank(accelerator: Accelerator) -> dict[str, Tensor]:
    return _trained(accelerator, takes=lambda accelerator: ("side", "other")[accelerator.process_index])


def _branches_by_rank_later(accelerator: Accelerator) -> dict[str, Tensor]:
    steps = iter(range(6))

    def takes(accelerator: Accelerator) -> str:
        number = next(steps)
        return ("side", "other")[number % 2 if number < 4 else accelerator.process_index]

    return _trained(accelerator, takes=takes)


def _states_are_read(accelerator: Accelerator) -> dict[str, Tensor]:
    plain = Net()
    _, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return dict(optimizer.state_dict())


def _doubles(accelerator: Accelerator) -> dict[str, Tensor]:
    plain = Net().double()
    accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return {}


REFUSED: dict[str, tuple[Program, str]] = {
    "loss.backward": (_own_backward, "a backward of the program's own (loss.backward): with DeepSpeed"),
    "model.backward": (_calls_of_the_engine, "model.backward: with DeepSpeed the Accelerator runs"),
    "requires_grad": (_thawed, "requires_grad of side.weight, side.bias was changed after prepare"),
    "add_param_group": (_grown, "add_param_group after prepare"),
    "torch's clipping": (_clipped_by_torch, "accelerator.clip_grad_norm_(model.parameters(), max_norm)"),
    "branches by rank": (_branches_by_rank, "the ranks have used different parts of the model in this step"),
    "branches by rank, later": (
        _branches_by_rank_later,
        "the ranks have used different parts of the model in this step",
    ),
    "optimizer.state_dict": (_states_are_read, "accelerator.save_state(folder) saves them whole"),
    "float64": (_doubles, "would change the type of 8 parameters, first.weight (float64)"),
}


@needs_deepspeed
@pytest.mark.parametrize("setting", SETTINGS)
def test_what_would_train_otherwise_in_silence_is_refused(setting: str) -> None:
    programs = {name: program for name, (program, _) in REFUSED.items()}
    for found in run_ranks(2, lambda: _run(programs, lambda: _zero(**SETTINGS[setting])), timeout_s=300):
        for name, (_, says) in REFUSED.items():
            assert says in str(found[name]), f"{name}: {found[name]}"


def _read_in_pieces(accelerator: Accelerator) -> dict[str, Tensor]:
    plain = Net()
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return dict(accelerator.unwrap_model(model).state_dict())


def _copied_in_pieces(accelerator: Accelerator) -> dict[str, Tensor]:
    plain = Net()
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return dict(copy.deepcopy(accelerator.unwrap_model(model)).state_dict())


@needs_deepspeed
def test_a_state_dict_of_empty_weights_is_refused() -> None:
    programs = {"read": _read_in_pieces, "copied": _copied_in_pieces}
    found = run_ranks(1, lambda: _run(programs, lambda: _zero(3)), timeout_s=200)[0]
    for said in found.values():
        assert "Linear.state_dict(): with ZeRO stage 3" in said
        assert "accelerator.get_state_dict(model)" in said
    whole = run_ranks(1, lambda: _run(programs, lambda: _zero(2)), timeout_s=200)[0]
    assert {tuple(value["first.weight"].shape) for value in whole.values()} == {(6, 4)}


def _a_copy_loads_alone() -> bool:
    accelerator = Accelerator(cpu=True, **_zero(2))
    plain = Net()
    model, _ = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    before = plain.first.weight.detach().clone()
    other = copy.deepcopy(accelerator.unwrap_model(model))
    other.load_state_dict({name: value + 1 for name, value in other.state_dict().items()})
    return torch.equal(plain.first.weight, before) and torch.equal(other.first.weight, before + 1)


@needs_deepspeed
def test_a_copy_of_the_model_loads_into_itself() -> None:
    assert run_ranks(1, _a_copy_loads_alone, timeout_s=100) == [True]


# -- optimizers


class Normed(torch.optim.SGD):
    """Steps by the norm of each parameter, as LARS and Lamb do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"])


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Rprop"])
def test_an_optimizer_of_elements_is_accepted(name: str) -> None:
    refuse_optimizer(getattr(torch.optim, name)(nn.Linear(3, 2).parameters(), lr=0.1))


@pytest.mark.parametrize("kind", [Normed, torch.optim.Adafactor, torch.optim.Muon])
def test_an_optimizer_of_whole_parameters_is_refused(kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = kind([nn.Parameter(torch.ones(3, 2, device="cpu"))], lr=0.1)
        with pytest.raises(NotImplementedError, match=f"{kind.__name__} computes with whole parameters"):
            refuse_optimizer(optimizer)
