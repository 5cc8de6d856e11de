"""Facts of shards: whether tensors and modules are sharded between ranks. Runs in ranks; imports nothing of torch's.

A process without FSDP or DTensors has not imported them, and is asked at every save and resume.
"""

from __future__ import annotations

import sys

from torch.nn import Module

from nbaccel.train.distributed.nested import leaves

__all__ = ["holds_shards", "is_sharded_module", "is_sharded_tensor", "may_be_sharded"]


def may_be_sharded() -> bool:
    """Return whether this process can have DTensors: whether the program has imported them."""
    return "torch.distributed.tensor" in sys.modules


def is_sharded_tensor(value: object) -> bool:
    """Return whether `value` is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(value, kind)


def is_sharded_module(module: Module) -> bool:
    """Return whether FSDP (of torch's ``fully_shard``) or a DTensor is anywhere in `module`.

    Between a forward and its backward FSDP has whole parameters in place of its DTensors; its class stays.
    """
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return any(isinstance(part, kind) for part in module.modules()) or any(map(is_sharded_tensor, module.parameters()))


def holds_shards(state: object) -> bool:
    """Return whether a DTensor is anywhere in the containers of `state`."""
    return may_be_sharded() and any(map(is_sharded_tensor, leaves(state)))
