"""The options of the strategy "fsdp" reach the model, and its gradients count as averaged."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.utils import FullyShardedDataParallelPlugin as Plugin
from train.test_unaveraged import Net, Program, assert_right, plain_training, steps_of


@pytest.fixture(autouse=True)
def nobody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if "FSDP" in name or name == "NBACCEL_STRATEGY"]:
        monkeypatch.delenv(name)


def test_the_options_reach_the_model() -> None:
    def sharded() -> tuple[list[str], str, Any]:
        from torch.distributed.fsdp import FSDPModule

        plugin = Plugin(transformer_cls_names_to_wrap=["LayerNorm"], mixed_precision_policy="bf16")
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        prepared = Accelerator(fsdp_plugin=plugin).prepare(model)
        groups = [name for name, module in prepared.named_modules() if isinstance(module, FSDPModule)]
        return groups, type(next(prepared.parameters())).__name__, prepared(torch.ones(1, 4)).dtype

    assert run_ranks(2, sharded) == [(["", "1"], "DTensor", torch.bfloat16)] * 2


def test_a_program_may_change_the_options_of_its_launch_until_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    """As peft's examples set a policy for adapters."""
    monkeypatch.setenv("NBACCEL_STRATEGY", "fsdp")

    def changed() -> tuple[Any, bool, list[str]]:
        from torch.distributed.fsdp import FSDPModule

        accelerator = Accelerator()
        assert accelerator.distributed_type == "FSDP"
        plugin = accelerator.state.fsdp_plugin
        plugin.set_state_dict_type("FULL_STATE_DICT")
        plugin.auto_wrap_policy = functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={torch.nn.LayerNorm}
        )
        model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)))
        groups = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        return plugin.state_dict_type, accelerator.state.is_fsdp2, groups

    assert run_ranks(2, changed) == [("FULL_STATE_DICT", True, ["", "1"])] * 2


def test_an_accelerator_of_the_notebook_is_sharded_in_the_ranks_alone() -> None:
    accelerator = Accelerator(fsdp_plugin=Plugin(auto_wrap_policy="no_wrap"))
    assert (accelerator.state.fsdp_plugin, accelerator.state.is_fsdp2) == (None, False)

    def kind() -> str:
        return type(accelerator.prepare(torch.nn.Linear(2, 2))).__name__

    assert run_ranks(2, kind) == ["FSDPLinear"] * 2
    assert kind() == "Linear"


def sharded() -> tuple[list[Tensor], list[Tensor]]:
    program = Program(Net("ab"), strategy="fsdp")
    steps_of(program, lambda step: program.accelerator.backward(program.model(program.rows(step)).square().mean()))
    state = program.accelerator.get_state_dict(program.model)
    plain = plain_training(heads="ab")
    return list(state.values()) or plain, plain  # the main process has it


def test_a_sharded_training_averages_in_its_own_way_and_compares_nothing() -> None:
    assert_right({"FSDP": (sharded, 0)})
