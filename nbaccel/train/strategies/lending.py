"""Lending: decides whose gradients `forward_backward` may take over, and explains a refusal. Runs in ranks.

A rank may repeat a forward alone only if nothing in it waits for peers. This module inspects modules; it runs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch.nn import Module, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from nbaccel.errors import CannotSplit
from nbaccel.train.strategies.base import without_compile

__all__ = ["is_parallel", "lendable"]

_M = TypeVar("_M", bound=Module)

_INSTEAD = (
    "For this model use accelerator.backward; if that does not fit into memory, find_executable_batch_size tries "
    "smaller batches on all ranks, and %%accelerate --oom shrink starts the cell again with smaller ones."
)


def lendable(models: Sequence[Module], kind: type[_M]) -> list[_M]:
    """Return those of `models` that exchange gradients, without ``torch.compile``; all are of the class `kind`.

    Raises:
        CannotSplit: one of them cannot run in micro-batches; gives the reason, and an alternative.
    """
    found: list[_M] = []
    for model in map(without_compile, models):
        for name, module in model.named_modules():
            if isinstance(module, SyncBatchNorm):
                raise CannotSplit(
                    f"forward_backward cannot lead {_name(model)}: {name.removeprefix('module.')} is a SyncBatchNorm, "
                    "which exchanges statistics in every forward. A rank that ran out of memory would repeat its "
                    f"forward alone, and wait for peers that do not. BatchNorm and GroupNorm work. {_INSTEAD}"
                )
            if is_sharded(module):
                raise CannotSplit(
                    f"forward_backward cannot lead {_name(model)}: it is sharded (FSDP), so every forward gathers its "
                    "parameters from all ranks. A rank that ran out of memory would repeat its forward alone, and "
                    f"wait for peers that do not. {_INSTEAD}"
                )
        if isinstance(model, kind):
            found.append(model)
        elif is_parallel(model):
            raise CannotSplit(
                f"forward_backward exchanges gradients itself, and {_name(model)} came to prepare inside a "
                f"DistributedDataParallel of the program's own: hand prepare the bare model. {_INSTEAD}"
            )
    return found


def is_parallel(model: Module) -> bool:
    """Return whether `model` synchronises its own gradients: DDP, or FSDP of either generation, ours or the user's."""
    module = without_compile(model)
    return isinstance(module, DistributedDataParallel) or is_sharded(module)


def is_sharded(module: Module) -> bool:
    """Return whether `module` is FSDP's, of either generation; by name, since importing them costs half a second."""
    return any(
        kind.__name__ in ("FullyShardedDataParallel", "FSDPModule") and kind.__module__.startswith("torch.distributed")
        for kind in type(module).__mro__
    )


def _name(model: Module) -> str:
    return type(model.module if isinstance(model, DistributedDataParallel) else model).__name__
