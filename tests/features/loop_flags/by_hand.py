"""Accumulation as one writes it by hand, put into a loop from outside: the reference for `-a`.

It is another mechanism than the package's: gradients stay in ``p.grad``, and what stands under `if is_last:` by hand
(zeroing, clipping, a scaler's calls, the step) does nothing for the other batches. So it is wrong where one loss
reaches what another one trains, as in a GAN: there a person writes more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

__all__ = ["accumulated_by_hand"]


class _Counts:
    """Counts each optimizer's batches, and how many its present window has."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.left: int | None = None  # batches of the pass after this one
        self.batches = 0
        self._at: weakref.WeakKeyDictionary[Any, tuple[int, int, int]] = weakref.WeakKeyDictionary()
        self.last: Any = None  # the optimizer that was called last

    def window(self, optimizer: Any) -> tuple[int, int]:
        """Return how many batches are done, and how many the window has."""
        done, length, batch = self._at.get(optimizer, (0, 0, -1))
        if not done:
            is_new = self.batches != batch
            length = self.steps if self.left is None or not is_new else min(self.steps, self.left + 1)
        return done, length

    def is_last(self, optimizer: Any) -> bool:
        done, length = self.window(optimizer)
        return done + 1 >= length

    def call(self, optimizer: Any) -> bool:
        """Count a call of step; return whether it is taken."""
        done, length = self.window(optimizer)
        is_last = done + 1 >= length
        self._at[optimizer] = 0 if is_last else done + 1, length, self.batches
        return is_last


@contextmanager
def accumulated_by_hand(steps: int) -> Iterator[None]:
    """Let the loops in the block accumulate `steps` batches for each step, in this process."""
    counts = _Counts(steps)
    optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
    in_order: list[Any] = []
    is_inside: list[bool] = []  # of a backward, as that of a checkpoint is
    add_group, zero_optimizer, zero_module = Optimizer.add_param_group, Optimizer.zero_grad, nn.Module.zero_grad
    backward, following = torch.autograd.backward, _BaseDataLoaderIter.__next__
    scaler: Any = torch.amp.GradScaler

    def given(optimizer: Any, group: Any) -> None:
        add_group(optimizer, group)
        if optimizer not in optimizers:
            optimizers.add(optimizer)
            in_order.append(weakref.ref(optimizer))
            optimizer.step = MethodType(counted, optimizer)

    def counted(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return type(optimizer).step(optimizer, *args, **kwargs) if counts.call(optimizer) else None

    def owner_of(parameters: Any) -> Any:
        ids = {id(each) for each in parameters}
        held = [
            each for each in optimizers if any(id(p) in ids for group in each.param_groups for p in group["params"])
        ]
        return held[-1] if held else None

    def is_first(optimizer: Any) -> bool:
        return optimizer is None or counts.window(optimizer)[0] == 0

    def zero(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if is_first(optimizer):
            zero_optimizer(optimizer, *args, **kwargs)

    def zero_of(module: Any, *args: Any, **kwargs: Any) -> None:
        if is_first(owner_of(module.parameters())):
            zero_module(module, *args, **kwargs)

    def divided(tensors: Any, gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
        roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
        made = [each for ref in in_order if (each := ref()) is not None]
        if made and not is_inside:
            length = counts.window(made[-1])[1]
            roots = tuple(root / length for root in roots)
        is_inside.append(True)
        try:
            return backward(roots, gradients, *args, **kwargs)
        finally:
            is_inside.pop()

    def batch(iterator: Any) -> Any:
        counts.left = None  # where the pass is over
        found = following(iterator)
        counts.batches += 1
        try:
            counts.left = len(iterator._index_sampler) - iterator._num_yielded
        except TypeError:
            counts.left = None
        return found

    def are_all_waiting() -> bool:
        return bool(optimizers) and not any(map(counts.is_last, optimizers))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Optimizer, "add_param_group", given)
        patched.setattr(Optimizer, "zero_grad", zero)
        patched.setattr(nn.Module, "zero_grad", zero_of)
        patched.setattr(torch.autograd, "backward", divided)
        patched.setattr(_BaseDataLoaderIter, "__next__", batch)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            _unless(patched, nn.utils, name, are_all_waiting, torch.tensor(0.0))
        real_step = scaler.step

        def scaler_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not counts.call(optimizer):
                return None
            held = vars(optimizer).pop("step", None)  # none where a scaler's own caller has put it aside
            try:
                return real_step(self, optimizer, *args, **kwargs)
            finally:
                if held is not None:
                    optimizer.step = held

        patched.setattr(scaler, "step", scaler_step)
        _unless(patched, scaler, "unscale_", are_all_waiting)
        has_ended = lambda: any(counts.window(each)[0] for each in optimizers)  # noqa: E731  # after the call of step
        _unless(patched, scaler, "update", has_ended)
        yield


def _unless(patched: pytest.MonkeyPatch, owner: Any, name: str, waits: Any, instead: Any = None) -> None:
    real = getattr(owner, name)
    patched.setattr(owner, name, lambda *args, **kwargs: instead if waits() else real(*args, **kwargs))
