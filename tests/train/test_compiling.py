"""Compiling: a program's choice and the launch's reach torch.compile, and blocks of a model can be compiled alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel import Accelerator
from nbaccel.utils import TorchDynamoPlugin


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
