"""Try an optimizer on parameters without memory, to count its state and what its step needs meanwhile. Runs anywhere.

The optimizer of the program is copied onto the meta device, or a new one is made from a class or a name; it then takes
two steps. So the count follows what the optimizer does, not a table. Kernels that exist for one device only (8-bit
optimizers, for example) cannot run there: `CannotTry` says so.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from nbaccel.base.values import frozen
from nbaccel.features.batch_size.fake_step import ByteCount
from nbaccel.train.oom.memory.mem_limit import MemLimit

__all__ = ["CannotTry", "OptimizerUse", "optimizer_class", "try_optimizer"]


_MOST_REAL = 1 << 24
"""Elements of the largest parameter that is tried with real numbers: 64 MB in fp32, a few times."""


class CannotTry(Exception):
    """The optimizer cannot step without values; the text is half a sentence."""


@frozen
class OptimizerUse:
    """Bytes of an optimizer on one rank.

    Args:
        states: Kept from step to step.
        temporaries: The most that a step holds besides, for its duration.
    """

    states: int
    temporaries: int


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the optimizer of torch called `name`, in any case.

    Raises:
        ValueError: There is none; the message names similar ones.

    Example:
        >>> optimizer_class("adamw").__name__
        'AdamW'
    """
    known = {
        each.lower(): kind
        for each, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        meant = f"; did you mean {known[near[0]].__name__}?" if near else ""
        raise ValueError(f"torch.optim has no optimizer {name!r}{meant}")
    return known[name.lower()]


def try_optimizer(
    optimizer: Optimizer | Callable[..., Optimizer],
    weights: Sequence[tuple[Tensor, tuple[int, ...], torch.dtype]],
    device_type: str,
) -> OptimizerUse:
    """Return what `optimizer` needs for `weights`: tensors as it knows them, the shape of a rank's rows, their dtype.

    Args:
        optimizer: One that exists, whose own parameters count, or what makes one from parameters.
        device_type: Where it will step; on CUDA torch steps all parameters at once, with temporaries as large as them.

    Raises:
        CannotTry: It cannot step on the meta device.
    """
    try:
        return _tried_without_memory(optimizer, weights, device_type)
    except Exception as error:
        if not isinstance(optimizer, Optimizer) and max(prod(shape) for _, shape, _ in weights) <= _MOST_REAL:
            with suppress(Exception):
                return _tried_one_by_one(optimizer, weights)
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
        raise CannotTry(said) from error


def _tried_without_memory(
    optimizer: Optimizer | Callable[..., Optimizer],
    weights: Sequence[tuple[Tensor, tuple[int, ...], torch.dtype]],
    device_type: str,
) -> OptimizerUse:
    metas = {id(known): Parameter(torch.empty(shape, dtype=dtype, device="meta")) for known, shape, dtype in weights}
    tried = _copied(optimizer, metas) if isinstance(optimizer, Optimizer) else optimizer(list(metas.values()))
    parameters = [parameter for group in tried.param_groups for parameter in group["params"]]
    for group in tried.param_groups:
        if group.get("fused"):
            group["fused"] = False
        elif device_type != "cpu" and group.get("foreach", False) is None:
            group["foreach"] = True
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    return _stepped(tried, parameters, ByteCount())


def _tried_one_by_one(
    make: Callable[..., Optimizer], weights: Sequence[tuple[Tensor, tuple[int, ...], torch.dtype]]
) -> OptimizerUse:
    """Step with real numbers on the CPU, one parameter of each shape, for optimizers that look into their tensors."""
    sizes: dict[tuple[Any, ...], OptimizerUse] = {}
    for _, shape, dtype in weights:
        if (shape, dtype) not in sizes:
            parameter = Parameter(torch.zeros(shape, dtype=dtype, device="cpu"))
            parameter.grad = torch.ones_like(parameter)
            sizes[shape, dtype] = _stepped(make([parameter]), [parameter], MemLimit())
    return OptimizerUse(
        sum(sizes[shape, dtype].states for _, shape, dtype in weights), max(use.temporaries for use in sizes.values())
    )


def _stepped(optimizer: Optimizer, parameters: Sequence[Parameter], count: MemLimit) -> OptimizerUse:
    with count:
        count.count(*parameters, *(parameter.grad for parameter in parameters), optimizer)
        is_fused = any(group.get("fused") is False for group in optimizer.param_groups)
        for _ in range(2):  # the first one makes the states
            count.reset_peak()
            before = count.live_bytes
            optimizer.step(_loss)
    states = sum(tensor.nbytes for tensor in _tensors(optimizer.state))
    return OptimizerUse(states, 0 if is_fused else count.peak_bytes - before)


def _loss() -> Any:
    """Stand for the closure, which some optimizers require."""
    return torch.zeros((), device="cpu")


def _copied(optimizer: Optimizer, metas: Mapping[int, Parameter]) -> Optimizer:
    memo: dict[int, Any] = dict(metas)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in memo:  # of another model
                memo[id(parameter)] = Parameter(torch.empty_like(parameter, device="meta"))
    for owner, state in optimizer.state.items():
        for value in _tensors(state):
            if value.dim():
                like = memo[id(owner)]
                is_alike = value.shape == owner.shape
                memo[id(value)] = torch.empty(like.shape if is_alike else value.shape, dtype=value.dtype, device="meta")
    return copy.deepcopy(optimizer, memo)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for child in value.values() for tensor in _tensors(child)]
    if isinstance(value, (list, tuple)):
        return [tensor for child in value for tensor in _tensors(child)]
    return []
