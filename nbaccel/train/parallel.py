"""Parallel wrappers: gets a model out of the wrappers of training. Runs in ranks, and wherever such a model is used."""

from __future__ import annotations

from torch.nn import DataParallel, Module
from torch.nn.parallel import DistributedDataParallel

from nbaccel.train.prepare.models import keep_compiled
from nbaccel.train.step.precision import restore_forward
from nbaccel.train.strategies.single import without_compile

__all__ = ["extract_model_from_parallel"]


def extract_model_from_parallel(
    model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Module:
    """Return the user's own module, out of DDP, ``nn.DataParallel`` and ``torch.compile``.

    keep_fp32_wrapper: False also removes autocast from the module's forward, and restores the forward that the program
        (or Accelerate) has kept as ``_original_forward``.
    keep_torch_compile: a compiled model stays compiled; False returns the module below.
    recursive: accepted; every layer is removed in any case.

    >>> import torch
    >>> layer = torch.nn.Linear(1, 1)
    >>> extract_model_from_parallel(torch.nn.DataParallel(layer)) is layer
    True
    """
    inner = without_compile(model)
    while isinstance(inner, DistributedDataParallel | DataParallel):
        inner = without_compile(inner.module)
    if not keep_fp32_wrapper:
        restore_forward(inner)
        _restore_original_forward(inner)
    return keep_compiled(model, inner) if keep_torch_compile else inner


def _restore_original_forward(model: Module) -> None:
    original = vars(model).pop("_original_forward", None)
    if original is None:
        return
    model.forward = original
    if getattr(original, "__func__", None) is type(model).forward:
        del model.forward  # the class has it
