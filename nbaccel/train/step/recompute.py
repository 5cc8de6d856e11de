"""Recompute the activations of a model's blocks in its backward instead of keeping them. Runs in ranks.

torch's own non-reentrant checkpoint does the work, the only kind that works with DDP, FSDP, accumulation and frozen
inputs. This module finds the blocks to apply it to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module, ModuleList, Sequential
from torch.utils.checkpoint import checkpoint

__all__ = ["members_of_lists", "recompute_activations"]

_OWN = {
    "activation_checkpointing_enable": "activation_checkpointing_kwargs",
    "gradient_checkpointing_enable": "gradient_checkpointing_kwargs",
}
"""Methods of models that do it themselves, newest spelling first, and their argument for torch's checkpoint."""


def recompute_activations(model: Module, blocks: Iterable[Module] | None = None) -> None:
    """Recompute each of `blocks`, or without `blocks` the members of the outermost lists of `model`.

    Activations are computed again in the backward instead of kept, which saves memory at the cost of one more forward.

    Raises:
        ValueError: No blocks were given, and none were found.
    """
    own = next((name for name in _OWN if hasattr(model, name)), None)
    if blocks is None and own is not None:
        getattr(model, own)(**{_OWN[own]: {"use_reentrant": False}})
        return
    chosen = list(members_of_lists(model)) if blocks is None else list(blocks)
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential to recompute block by block: name the blocks, "
            "accelerator.gradient_checkpointing(model, blocks=[model.encoder, model.decoder])"
        )
    for block in chosen:
        if not isinstance(block.forward, _Recomputed):
            block.forward = _Recomputed(block, block.forward)


def members_of_lists(module: Module) -> Iterator[Module]:
    """Yield the members of the outermost lists of `module` that have parameters (an activation is cheap to keep)."""
    if isinstance(module, ModuleList | Sequential):
        yield from (member for member in module if any(True for _ in member.parameters()))
        return
    for child in module.children():
        yield from members_of_lists(child)


class _Recomputed:
    """A block's forward under checkpoint while training. A class, so that such models can be pickled."""

    def __init__(self, block: Module, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward, updated=())
        self.block = block
        self.forward = forward

    def __nbaccel_unwrap__(self) -> Callable[..., Any]:
        """Return what is sent from a rank to the notebook in place of this object."""
        return self.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.block.training and torch.is_grad_enabled()):
            return self.forward(*args, **kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
