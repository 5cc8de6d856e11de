"""Replicated: every rank holds the whole model, torch's DistributedDataParallel averages gradients. Runs in ranks."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from nbaccel.train.strategies.base import Strategy, without_compile

__all__ = ["Replicated"]


class Replicated(Strategy):
    """DDP. Also understands DDP modules that the user made, and anything else that has a `no_sync`."""

    has_peers = True

    def setup(self, model: Module) -> Module:
        if _is_parallel(model) or not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # DDP refuses a module without gradients, and there is nothing to average
        device_ids = [self.device] if next(model.parameters()).device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids)

    def keeps_together(self, model: Module) -> bool:
        return _is_parallel(model) or not any(parameter.requires_grad for parameter in model.parameters())

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        module = without_compile(model)
        if isinstance(module, DistributedDataParallel):
            return _NoReduce(module)
        no_sync = getattr(module, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def reduce_gradients(self, model: Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world.world_size

    def unwrap(self, model: Module) -> Module:
        module = without_compile(model)
        while isinstance(module, DistributedDataParallel):
            module = without_compile(module.module)
        return module

    def finds_parallel(self) -> bool:
        # Some 10 ms, so it is asked once, before refusing.
        return any(issubclass(type(thing), Module) and _is_parallel(thing) for thing in gc.get_objects())


class _NoReduce:
    """DDP's own ``no_sync`` without a generator: it is entered for every batch of an accumulation window."""

    __slots__ = ("_before", "_module")

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module

    def __enter__(self) -> None:
        self._before = self._module.require_backward_grad_sync
        self._module.require_backward_grad_sync = False

    def __exit__(self, *exception: object) -> None:
        self._module.require_backward_grad_sync = self._before


def _is_parallel(model: Module) -> bool:
    """Whether `model` synchronises its own gradients: DDP, or FSDP of either generation, ours or the user's."""
    module = without_compile(model)
    return isinstance(module, DistributedDataParallel) or any(
        kind.__name__ in ("FullyShardedDataParallel", "FSDPModule") and kind.__module__.startswith("torch.distributed")
        for kind in type(module).__mro__
    )
