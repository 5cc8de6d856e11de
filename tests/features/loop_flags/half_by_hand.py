"""Half precision as one writes it by hand, put into a loop from outside: the reference for `-p`.

It is torch's own: an autocast around the forward of each model that is trained, whose outputs are cast to fp32, and a
`GradScaler` that scales losses before a backward, unscales the gradients after it, and steps. `NotByHand` where a
person would write more: a second backward into gradients that are unscaled.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["NotByHand", "half_by_hand"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class NotByHand(Exception):
    """A person would place the scaler's calls otherwise in this loop."""


@contextmanager
def half_by_hand(name: str) -> Iterator[None]:
    """Let the loops in the block compute in half precision; within `accumulated_by_hand` also with its batches."""
    scaler = torch.amp.GradScaler("cpu", enabled=name == "fp16")
    made: list[weakref.ref[Any]] = []
    steps: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
    unscaled: weakref.WeakSet[Any] = weakref.WeakSet()
    stepped: weakref.WeakSet[Any] = weakref.WeakSet()
    add_group, backward, call = Optimizer.add_param_group, torch.autograd.backward, nn.Module.__call__
    is_inside = threading.local()

    def given(optimizer: Any, group: Any) -> None:
        add_group(optimizer, group)
        if optimizer not in steps:
            made.append(weakref.ref(optimizer))
            steps[optimizer] = vars(optimizer).get("step") and optimizer.step.__func__  # one that counts batches
            optimizer.step = MethodType(step, optimizer)

    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled() or args or not has_gradients(optimizer):
            return (steps[optimizer] or type(optimizer).step)(optimizer, *args, **kwargs)
        held = vars(optimizer).pop("step")
        try:
            return scaler.step(optimizer, **kwargs)
        finally:
            optimizer.step = held
            stepped.add(optimizer)
            if all(each in stepped for each in in_use() if has_gradients(each)):
                update()  # where a person has it: with batches in parts it counts at the end of a batch only

    def update() -> None:
        """Move the factor, once for all optimizers that share that of a loss."""
        scaler.update()
        unscaled.clear()
        stepped.clear()

    def parameters_of(optimizer: Any) -> list[Tensor]:
        return [each for group in optimizer.param_groups for each in group["params"]]

    def has_gradients(optimizer: Any) -> bool:
        return any(each.grad is not None for each in parameters_of(optimizer))

    def in_use() -> list[Any]:
        """The optimizers, without those whose parameters a later one was given: they may live on, and do not step."""
        found: list[Any] = []
        for optimizer in filter(None, (ref() for ref in reversed(made))):
            of_later = {id(each) for later in found for each in parameters_of(later)}
            if of_later.isdisjoint(map(id, parameters_of(optimizer))):
                found.insert(0, optimizer)
        return found

    def scaled(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        if not scaler.is_enabled() or getattr(is_inside, "backward", False):
            return backward(tensors, *args, **kwargs)
        if stepped:
            update()
        if any(has_gradients(each) and each in unscaled for each in in_use()):
            raise NotByHand
        is_inside.backward = True
        try:
            found = backward(tuple(map(scaler.scale, roots)), *args, **kwargs)
        finally:
            is_inside.backward = False
        for optimizer in in_use():
            if has_gradients(optimizer) and optimizer not in unscaled:
                scaler.unscale_(optimizer)
                unscaled.add(optimizer)
        return found

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        held = {id(each) for its in filter(None, (ref() for ref in made)) for each in parameters_of(its)}
        if getattr(is_inside, "model", False) or not any(id(each) in held for each in module.parameters()):
            return call(module, *args, **kwargs)
        is_inside.model = True
        try:
            with torch.autocast("cpu", DTYPES[name]):
                found = call(module, *args, **kwargs)
        finally:
            is_inside.model = False
        return fp32(found)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Optimizer, "add_param_group", given)
        patched.setattr(torch.autograd, "backward", scaled)
        patched.setattr(nn.Module, "__call__", called)
        yield


def fp32(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in DTYPES.values() else value
    if isinstance(value, dict):
        return {key: fp32(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(fp32, value))
    return type(value)(map(fp32, value)) if isinstance(value, (list, tuple)) else value
