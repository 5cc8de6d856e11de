"""Replicated: every rank holds the whole model, torch's DistributedDataParallel averages gradients. Runs in ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from nbaccel.train.handlers import DDPCommunicationHookType
from nbaccel.train.strategies.base import Strategy, without_compile
from nbaccel.train.strategies.complaints import explain_twice_ready, explain_unused

__all__ = ["Replica", "Replicated"]


class Replica(DistributedDataParallel):
    """DDP that names the parameters it complains about."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            explained = explain_unused(error, self.module)
            if explained is None:
                raise
            raise explained from error


class Replicated(Strategy):
    """DDP. Also understands DDP modules that the user made, and anything else that has a `no_sync`."""

    has_peers = True

    def setup(self, model: Module) -> Module:
        if _is_parallel(model) or not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # DDP refuses a module without gradients, and there is nothing to average
        replica = Replica(
            model,
            device_ids=[self.device] if next(model.parameters()).device.type == "cuda" else None,
            **self._options(),
        )
        options = self.handlers.ddp
        if {options.comm_hook, options.comm_wrapper} != {DDPCommunicationHookType.NO}:
            from nbaccel.train.strategies.compression import compress_gradients  # torch's hooks import slowly

            compress_gradients(replica, options, self.device)
        return replica

    def _options(self) -> dict[str, Any]:
        """What DDP is to be told: its defaults are its own, and some options are renamed from one torch to the next."""
        chosen = self.handlers.ddp.to_kwargs()
        return {name: value for name, value in chosen.items() if not name.startswith("comm_")}

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        try:
            loss.backward(**kwargs)
        except RuntimeError as error:
            explained = explain_twice_ready(error, _replicated_modules)
            if explained is None:
                raise
            raise explained from error

    def keeps_together(self, model: Module) -> bool:
        return _is_parallel(model) or not any(parameter.requires_grad for parameter in model.parameters())

    def no_sync(self, model: Module) -> AbstractContextManager[Any]:
        module = without_compile(model)
        if isinstance(module, DistributedDataParallel):
            return _NoReduce(module)
        no_sync = getattr(module, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()

    def sync_in_backward(self, model: Module) -> AbstractContextManager[Any]:
        module = without_compile(model)
        return _Reduce(module) if isinstance(module, DistributedDataParallel) else nullcontext()

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
        return any(_is_parallel(module) for module in _living_modules())


def _replicated_modules() -> list[Module]:
    return [thing.module for thing in _living_modules() if isinstance(thing, Replica)]


def _living_modules() -> Iterator[Module]:
    """Every module of this process. By type(): a lazy object's ``__class__`` may import what it stands for."""
    return (thing for thing in gc.get_objects() if issubclass(type(thing), Module))


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


class _Reduce:
    """Let the next backward reduce gradients, although its forward ran under `no_sync`.

    DDP prepares its reducer in the forward, and then only when gradients are to be reduced; here that is made up
    for. It is told of no outputs, hence expects a gradient for every parameter.
    """

    __slots__ = ("_before", "_module")

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module

    def __enter__(self) -> None:
        module = self._module
        self._before = (module.require_backward_grad_sync, module.require_forward_param_sync)
        module.require_backward_grad_sync = module.require_forward_param_sync = True
        module.reducer.prepare_for_backward([])

    def __exit__(self, *exception: object) -> None:
        self._module.require_backward_grad_sync, self._module.require_forward_param_sync = self._before


def _is_parallel(model: Module) -> bool:
    """Whether `model` synchronises its own gradients: DDP, or FSDP of either generation, ours or the user's."""
    module = without_compile(model)
    return isinstance(module, DistributedDataParallel) or any(
        kind.__name__ in ("FullyShardedDataParallel", "FSDPModule") and kind.__module__.startswith("torch.distributed")
        for kind in type(module).__mro__
    )
