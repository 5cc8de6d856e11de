"""Hooks in Accelerate's form: what programs write, hands over and ask for."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from features.big_models.placed_models import outputs, plain
from nbaccel.features.big_models.dispatching import disk_offload
from nbaccel.features.big_models.model_hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    align_module_device,
    cpu_offload_with_hook,
    has_offloaded_params,
    remove_hook_from_module,
    remove_hook_from_submodules,
)


class PlusOne(ModelHook):
    """Adds one to the input and to the output."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return (args[0] + 1, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + 1


def test_a_hook_acts_around_the_forward_until_it_is_removed() -> None:
    module, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain_output = module(x)
    shifted = module(x + 1)
    assert add_hook_to_module(module, PlusOne()) is module
    assert torch.equal(module(x), shifted + 1)
    assert torch.equal(module.forward(x), shifted + 1)
    assert list(inspect.signature(module.forward).parameters) == ["input"]
    assert remove_hook_from_module(module) is module
    assert torch.equal(module(x), plain_output)
    assert "forward" not in vars(module)
    assert not hasattr(module, "_hf_hook")


def test_hooks_follow_each_other_or_take_each_others_place() -> None:
    module, x = nn.Identity(), torch.zeros(1)
    add_hook_to_module(module, PlusOne())
    add_hook_to_module(module, PlusOne())
    assert module(x).item() == 2
    add_hook_to_module(module, PlusOne(), append=True)
    assert isinstance(module._hf_hook, SequentialHook)
    assert module(x).item() == 4
    remove_hook_from_module(module)
    assert module(x).item() == 0


def test_a_hook_may_forbid_gradients() -> None:
    class NoGrad(ModelHook):
        no_grad = True

    module = add_hook_to_module(nn.Linear(2, 2), NoGrad())
    assert not module(torch.ones(1, 2)).requires_grad
    assert torch.is_grad_enabled()


def test_hooked_modules_are_pickled() -> None:
    module = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu", io_same_device=True))
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(again(torch.ones(1, 2)), module(torch.ones(1, 2)))


def test_weights_wait_where_a_hook_keeps_them() -> None:
    module, x = nn.BatchNorm1d(2).eval(), torch.ones(1, 2)
    wanted = module(x)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    assert module.weight.is_meta
    assert not module.running_mean.is_meta
    assert has_offloaded_params(module)
    assert torch.equal(module(x), wanted)
    assert module.weight.is_meta
    with align_module_device(module):
        assert torch.equal(module.weight, torch.ones(2))
    assert module.weight.is_meta
    remove_hook_from_module(module)
    assert torch.equal(module.weight, torch.ones(2))


def test_weights_come_from_a_map_that_is_given() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2, bias=False)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map={"weight": 3 * torch.eye(2)}))
    assert torch.equal(module(torch.ones(1, 2)), torch.full((1, 2), 3.0))
    submodules = nn.Sequential(nn.Linear(2, 2))
    add_hook_to_module(submodules, AlignDevicesHook("cpu", offload=True, place_submodules=True, offload_buffers=True))
    assert submodules[0].weight.is_meta
    assert submodules(torch.ones(1, 2)).shape == (1, 2)


def test_models_of_a_pipeline_take_turns() -> None:
    moves: list[str] = []

    class Told(nn.Linear):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            moves.append(f"{self.out_features} {args[0]}")
            return super().to(*args, **kwargs)

    first, first_hook = cpu_offload_with_hook(Told(2, 3), "cpu")
    second, second_hook = cpu_offload_with_hook(Told(3, 4), "cpu", prev_module_hook=first_hook)
    moves.clear()
    assert second(first(torch.ones(1, 2))).shape == (1, 4)
    assert moves == ["3 cpu"]  # the first leaves the device before the second computes
    second_hook.offload()
    second_hook.remove()
    assert not hasattr(second, "_hf_hook")
    assert isinstance(first._hf_hook, CpuOffload)
    assert isinstance(first_hook, UserCpuOffloadHook)


def test_the_hooks_of_a_dispatched_model_are_removed(tmp_path: Path) -> None:
    model = disk_offload(plain(), tmp_path)
    assert has_offloaded_params(model.head)
    with align_module_device(model.blocks[0].mlp[0]):
        assert torch.equal(model.blocks[0].mlp[0].weight, plain().blocks[0].mlp[0].weight)
    with align_module_device(model.head, "cpu"):
        assert torch.equal(model.head.weight, plain().head.weight)
    assert model.head.weight.is_meta
    remove_hook_from_submodules(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(outputs(model), outputs(plain()))
    assert not has_offloaded_params(model.head)


def test_changes_of_weights_that_are_in_memory_stay() -> None:
    module = nn.Linear(2, 2)
    before = module.weight
    with align_module_device(module, "cpu"), torch.no_grad():
        module.weight.fill_(7)
    assert module.weight is before
    assert torch.equal(module.weight, torch.full((2, 2), 7.0))


def test_a_user_hook_does_not_make_a_model_a_dispatched_one(tmp_path: Path) -> None:
    model = add_hook_to_module(nn.Linear(2, 2), PlusOne())
    wanted = model(torch.ones(1, 2))
    assert torch.equal(disk_offload(model, tmp_path)(torch.ones(1, 2)), wanted)
    with pytest.raises(ValueError, match="was dispatched"):
        disk_offload(add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu")), tmp_path)
