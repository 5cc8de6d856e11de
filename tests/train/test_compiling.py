"""Compiling: a program's choice and the launch's reach torch.compile, and blocks of a model can be compiled alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file

from nbaccel import Accelerator
from nbaccel.utils import TorchDynamoPlugin, load_model

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by the compiler


class Deep(torch.nn.Module):
    """Blocks of one class, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def test_blocks_are_compiled_in_place_and_the_model_keeps_its_names_and_numbers() -> None:
    torch.manual_seed(0)
    plain, x = Deep(), torch.ones(2, 4)
    expected, names = plain(x), list(plain.state_dict())
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
    model = accelerator.prepare(plain)
    assert model is plain
    assert [block._compiled_call_impl is not None for block in (*plain.blocks, plain.head)] == [True, True, True, False]
    assert torch.equal(model(x), expected)
    assert list(accelerator.get_state_dict(model)) == names


class Stacked(torch.nn.Module):
    """Blocks of one class of torch's own, which are compiled in place, and a head."""

    def __init__(self, block: Callable[[], torch.nn.Module], count: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(block() for _ in range(count))
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(torch.nn.TransformerEncoderLayer):
    """A layer of the program's own, whose forward is torch's."""


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "encoder": lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    "subclass": lambda: Encoder(4, 2, 8, dropout=0.0, batch_first=True),
    "sequential": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()),
    "linear": lambda: torch.nn.Linear(4, 4),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_blocks_of_torchs_own_classes_are_compiled_too(layer: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, x = Stacked(LAYERS[layer]).double(), torch.ones(2, 3, 4, dtype=torch.float64)
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
    model = accelerator.prepare(Stacked(LAYERS[layer]).double())
    out, expected = model(x), plain(x)
    accelerator.backward(out.sum())
    expected.sum().backward()
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 1
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=1e-12)
    assert list(accelerator.get_state_dict(model)) == list(plain.state_dict())


class Tied(torch.nn.Module):
    """A body of two parts and a head with the weight of the first: each of them may be compiled."""

    def __init__(self, compiled: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = torch.nn.Linear(3, 3)
        inner = torch.compile(inner, backend="eager") if "inner" in compiled else inner
        self.body = torch.nn.Sequential(inner, torch.nn.BatchNorm1d(3))
        self.head = torch.nn.Linear(3, 3)
        self.head.weight = self.body[0].weight
        if "body" in compiled:
            self.body = torch.compile(self.body, backend="eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("compiled", ["body", "inner", "inner, body", "inner, whole"])
def test_what_is_saved_of_a_model_with_compiled_parts_has_its_plain_names_and_loads_into_both(
    compiled: str, tmp_path: Path
) -> None:
    accelerator = Accelerator()
    net = torch.compile(Tied(compiled), backend="eager") if "whole" in compiled else Tied(compiled)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.1))
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    trained = [each.detach().clone() for each in model.parameters()]
    names = list(Tied().state_dict())
    assert list(accelerator.get_state_dict(model)) == names
    accelerator.save_model(model, tmp_path / "model")
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == set(names) - {"head.weight"}
    accelerator.save_state(tmp_path / "state")
    torch.save(accelerator.unwrap_model(model, keep_torch_compile=False).state_dict(), tmp_path / "raw.bin")
    for other in ("", compiled, "body"):
        again = Accelerator()
        one = Tied(other)
        prepared, _ = again.prepare(one, torch.optim.AdamW(one.parameters(), 0.1))
        again.load_state(tmp_path / "state")
        _assert_equal(prepared, trained)
        for file in (tmp_path / "model", tmp_path / "raw.bin"):  # the latter as Accelerate names them
            two = Tied(other)
            assert load_model(two, file) == []
            _assert_equal(two, trained)


def _assert_equal(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    for own, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(own, value), "what was written and read again"


def test_regional_compilation_of_a_model_without_repeated_blocks_compiles_the_whole() -> None:
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
    assert "_orig_mod" in accelerator.prepare(torch.nn.Linear(2, 1))._modules


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What ``torch.compile`` was called with; it compiles nothing then."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: seen.append(how) or model)
    return seen


def test_what_the_launch_chose_holds_where_the_program_says_nothing(
    arguments: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Accelerator().prepare(torch.nn.Linear(1, 1))
    assert arguments == []
    # As `accelerate launch --dynamo_backend inductor --dynamo_mode max-autotune` leaves them.
    for name, value in {
        "BACKEND": "INDUCTOR",
        "MODE": "max-autotune",
        "USE_FULLGRAPH": "True",
        "USE_DYNAMIC": "False",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    Accelerator().prepare(torch.nn.Linear(1, 1))
    Accelerator(dynamo_plugin=TorchDynamoPlugin(mode="default", dynamic=True)).prepare(torch.nn.Linear(1, 1))
    Accelerator(dynamo_backend="no").prepare(torch.nn.Linear(1, 1))
    rest = {"options": None, "disable": False, "fullgraph": True}
    assert arguments == [
        {"backend": "inductor", "mode": "max-autotune", "dynamic": False, **rest},
        {"backend": "inductor", "mode": None, "dynamic": True, **rest},
    ]


def test_backend_and_plugin_together_are_refused() -> None:
    with pytest.raises(ValueError, match="dynamo_backend='eager' and a dynamo_plugin: give one of them"):
        Accelerator(dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())
