"""A kernel that has trained by DeepSpeed: it leaves no process group, no call and no piece of a model to later runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbaccel import Accelerator, DeepSpeedPlugin
from nbaccel.errors import NotPrepared
from nbaccel.features.deepspeed.native_build import import_deepspeed
from nbaccel.launchers import notebook_launcher
from nbaccel.testing import run_ranks

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed: make test-deepspeed"),
    pytest.mark.timeout(300),
]


def _trained(options: dict[str, Any]) -> tuple[Accelerator, Any, nn.Module]:
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(2, 3) * (1 + accelerator.process_index)
    accelerator.backward(prepared(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return accelerator, prepared, model


def _by_zero() -> tuple[Accelerator, Any, nn.Module]:
    """Train in stage 3, whose parameters stay in pieces between two steps."""
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    return _trained({"deepspeed_plugin": DeepSpeedPlugin(config)})


def _in_a_rank() -> tuple[int, int]:
    accelerator, _, _ = _trained({"strategy": "ddp"})
    return dist.get_world_size(), accelerator.num_processes


def _as_a_kernel(test: Callable[..., None]) -> Callable[..., None]:
    """Let a test run in a process of its own, which ends with what DeepSpeed keeps open."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        run_ranks(1, functools.partial(test, **fixtures), timeout_s=200)

    return run


@_as_a_kernel
def test_ranks_of_a_kernel_that_has_ended_its_training_are_as_many_as_were_started() -> None:
    accelerator, _, _ = _by_zero()
    accelerator.end_training()
    assert not dist.is_initialized()
    assert run_ranks(2, _in_a_rank) == [(2, 2), (2, 2)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the user's own
    dist.destroy_process_group()


@_as_a_kernel
def test_a_model_in_training_is_whole_before_ranks_become_copies_of_the_kernel() -> None:
    accelerator, _, model = _by_zero()
    assert {weight.numel() for weight in model.parameters()} == {0}
    wanted = {"weight": (2, 3), "bias": (2,)}
    seen = run_ranks(2, lambda: {name: tuple(weight.shape) for name, weight in model.named_parameters()})
    assert seen == [wanted, wanted]
    assert not dist.is_initialized()
    with pytest.raises(NotPrepared, match="DeepSpeed's part in this training is over"):
        accelerator.backward(model(torch.ones(1, 3)).mean())
    accelerator.end_training()


@_as_a_kernel
def test_two_trainings_of_one_process_share_its_group_until_the_last_one_ends() -> None:
    first, _, _ = _by_zero()
    second, prepared, model = _by_zero()
    first.end_training()
    second.backward(prepared(torch.ones(2, 3)).mean())
    second.destroy_process_group()
    assert not dist.is_initialized()
    assert model.weight.shape == (2, 3)


@_as_a_kernel
def test_a_training_that_is_refused_leaves_no_group() -> None:
    plugin = DeepSpeedPlugin({"optimizer": {"type": "AdamW"}})
    with pytest.raises(ValueError, match="prepares one of its own"):
        _trained({"deepspeed_plugin": plugin})
    assert not dist.is_initialized()


@pytest.mark.parametrize("fails", [False, True])
@_as_a_kernel
def test_a_function_that_runs_in_the_kernel_leaves_a_whole_model(fails: bool) -> None:
    models: list[nn.Module] = []

    def train() -> None:
        models.append(_by_zero()[2])
        assert not fails, "a bad batch"

    if fails:
        with pytest.raises(AssertionError, match="a bad batch"):
            notebook_launcher(train, num_processes=1)
    else:
        notebook_launcher(train, num_processes=1)
    assert models[0].weight.shape == (2, 3)
    assert not dist.is_initialized()


@_as_a_kernel
def test_a_process_whose_deepspeed_works_on_another_device_refuses() -> None:
    deepspeed = import_deepspeed(torch.device("cpu"))
    assert deepspeed.accelerator.get_accelerator().device_name() == "cpu"
    with pytest.raises(RuntimeError, match=r"works on cpu in this process .* training is on cuda:1: restart"):
        import_deepspeed(torch.device("cuda", 1))
