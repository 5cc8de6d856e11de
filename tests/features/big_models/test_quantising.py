"""Models that are quantised while they are loaded, by a stand-in for bitsandbytes and, where it is there, by itself."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from nbaccel import Accelerator, init_empty_weights
from nbaccel.base.quantised import is_quantised
from nbaccel.utils import BnbQuantizationConfig, load_and_quantize_model


class _Packed(nn.Parameter):
    """Rounded, and marked as packed, once it is moved to a device."""

    def __new__(cls, data: Tensor, requires_grad: bool = True, **options: Any) -> Self:
        made: Self = torch.Tensor._make_subclass(cls, data, requires_grad)  # type: ignore[attr-defined]
        return made

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return type(self)((self.data.as_subclass(Tensor) * 8).round() / 8, requires_grad=False)


class Params4bit(_Packed): ...


class Int8Params(_Packed): ...


class _Layer(nn.Linear):
    def __init__(self, inputs: int, outputs: int, bias: bool = True, **options: Any) -> None:
        super().__init__(inputs, outputs, bias)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.data.as_subclass(Tensor)
        return nn.functional.linear(
            x.to(weight.dtype), weight, None if self.bias is None else self.bias.to(weight.dtype)
        )


STAND_IN = SimpleNamespace(
    nn=SimpleNamespace(Linear4bit=_Layer, Linear8bitLt=_Layer, Params4bit=Params4bit, Int8Params=Int8Params)
)


@pytest.fixture(params=["stand-in", "itself"])
def bnb(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "itself":
        return pytest.importorskip("bitsandbytes")
    monkeypatch.setitem(sys.modules, "bitsandbytes", STAND_IN)
    return STAND_IN


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(2))
        self.head = nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x).to(x.dtype)
        return self.head(x)  # type: ignore[no-any-return]


def plain() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


def by_hand(bnb: Any, names: tuple[int, ...]) -> Net:
    """Return the model with the layers of these blocks quantised to four bits, in float32 otherwise."""
    model = plain()
    for number in names:
        layer: Any = model.blocks[number]
        options = {"compress_statistics": False, "quant_type": "nf4"}
        made = bnb.nn.Linear4bit(64, 64, bias=True, compute_dtype=torch.float32, **options)
        made.weight = bnb.nn.Params4bit(layer[0].weight.detach().clone(), requires_grad=False, **options).to("cpu")
        made.bias = layer[0].bias
        layer[0] = made
    return model


IDS = torch.arange(6).view(2, 3)
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "fp32"}


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS)
    return found


@pytest.mark.parametrize(
    ("device_map", "quantised"),
    [(None, (0, 1)), ({"": "cpu"}, (0, 1)), ("auto", (0, 1)), ({"": "cpu", "blocks.1": "disk"}, (0,))],
)
def test_linear_layers_of_a_checkpoint_are_quantised_and_its_head_is_not(
    bnb: Any, tmp_path: Path, device_map: Any, quantised: tuple[int, ...]
) -> None:
    Accelerator(cpu=True).save_model(plain(), tmp_path)
    model = load_and_quantize_model(empty(), BnbQuantizationConfig(**NF4), tmp_path, device_map)
    kinds = [type(model.blocks[number][0].weight).__name__ for number in range(2)]  # type: ignore[index,union-attr]
    assert [kind == "Params4bit" for kind in kinds] == [number in quantised for number in range(2)]
    assert not any(
        parameter.requires_grad for name, parameter in model.named_parameters() if name.endswith("0.0.weight")
    )
    assert type(model.head.weight) is nn.Parameter
    assert is_quantised(model)
    assert torch.equal(_logits(model), _logits(by_hand(bnb, quantised)))


def test_a_model_with_numbers_is_quantised(bnb: Any) -> None:
    model = load_and_quantize_model(copy.deepcopy(plain()), BnbQuantizationConfig(**NF4))
    assert torch.equal(_logits(model), _logits(by_hand(bnb, (0, 1))))


def test_eight_bits_and_names_that_are_left_out(bnb: Any, tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(plain(), tmp_path)
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["blocks.0"], keep_in_fp32_modules=["head"])
    model: Any = load_and_quantize_model(empty(), config, weights_location=tmp_path)
    assert [type(block[0].weight).__name__ for block in model.blocks] == ["Parameter", "Int8Params"]
    assert (model.embed.weight.dtype, model.head.weight.dtype) == (torch.float16, torch.float32)
    assert (model.is_loaded_in_8bit, model.is_loaded_in_4bit) == (True, False)


def test_a_head_is_the_last_module_with_parameters(bnb: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Dropout())
    loaded: Any = load_and_quantize_model(model, BnbQuantizationConfig(**NF4))
    assert [type(layer.weight).__name__ for layer in loaded[:2]] == ["Params4bit", "Parameter"]


def test_a_head_that_is_tied_is_left_as_it_is(bnb: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    model[2].weight = model[0].weight
    loaded: Any = load_and_quantize_model(model, BnbQuantizationConfig(**NF4))
    assert loaded[2].weight is loaded[0].weight
    assert [type(layer.weight).__name__ for layer in loaded] == ["Parameter", "Params4bit", "Parameter"]


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({}, "one of load_in_4bit and load_in_8bit has to be True"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "one of load_in_4bit and load_in_8bit has to be True"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type is 'fp4' or 'nf4'; got 'nf3'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp7"}, "dtype must be a type of torch or its name"),
    ],
)
def test_choices_that_there_are_not_are_refused(choices: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BnbQuantizationConfig(**choices)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", STAND_IN)
    with pytest.raises(ValueError, match=r"Net is on the meta device: name its checkpoint, weights_location="):
        load_and_quantize_model(empty(), BnbQuantizationConfig(**NF4))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match="needs bitsandbytes: pip install bitsandbytes"):
        load_and_quantize_model(plain(), BnbQuantizationConfig(**NF4))
    assert importlib.import_module("nbaccel.utils.bnb").load_and_quantize_model is load_and_quantize_model
