"""LocalSGD: ranks train for themselves and average their parameters every few steps. Runs in ranks.

Less communication, other numerics (Stich 2018, arXiv:1805.09767). Optimizer state is each rank's own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Module

from nbaccel.train.accelerator import Accelerator

__all__ = ["LocalSGD"]


class LocalSGD:
    """While entered, gradients of `model` stay in their rank; every `local_sgd_steps` steps parameters are averaged.

    accelerator, model: the model prepared by this accelerator, replicated on every rank.
    local_sgd_steps: calls of `step` between two averages. The last average is taken when the block is left.
    enabled: False trains as without this block.

    Entering needs no other rank; `step` is collective at every `local_sgd_steps`-th call, and so is leaving
    without an exception.

    >>> from nbaccel import Accelerator
    >>> accelerator = Accelerator()
    >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
    >>> with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
    ...     local_sgd.step()
    """

    def __init__(
        self, accelerator: Accelerator, model: Module, local_sgd_steps: int | None, enabled: bool = True
    ) -> None:
        if enabled and (local_sgd_steps is None or local_sgd_steps < 1):
            raise ValueError(f"local_sgd_steps must be at least 1, got {local_sgd_steps}")
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps or 1
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self._holding: AbstractContextManager[Any] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._holding = self.accelerator.hold_gradients(self.model)
            self._holding.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if self._holding is None:
            return
        self._holding.__exit__(None, None, None)
        self._holding = None
        if kind is None:  # after an exception the other ranks may never come
            self._average()

    def step(self) -> None:
        """Call once per batch, after ``optimizer.step()``."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        averaged = self.accelerator.reduce([parameter.detach() for parameter in parameters], "mean")
        with torch.no_grad():
            for parameter, value in zip(parameters, averaged, strict=True):
                parameter.copy_(value)
