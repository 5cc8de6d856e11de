"""LocalSGD: ranks train independently and average their parameters every few steps. Runs in ranks.

Less communication, different numerics (Stich 2018, arXiv:1805.09767). Each rank has its own optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from nbaccel.train.accelerator import Accelerator
from nbaccel.train.strategies.single import is_sharded, without_compile

__all__ = ["LocalSGD"]

_GROUP_BYTES = 64 << 20
"""Large enough for the full speed of a sum, and small beside the model, of which an average is a whole copy."""


class LocalSGD:
    """Let each rank train by itself and average the parameters every `local_sgd_steps` steps, inside this block.

    Entering needs no other rank. `step` is collective at every `local_sgd_steps`-th call, and so is leaving the block
    without an exception.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The prepared model, replicated on every rank.
        local_sgd_steps: The number of calls of `step` between two averages. The last average is taken at the end of the
            block.
        enabled: False trains as without this block.

    Example:
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
        if enabled and is_sharded(without_compile(model)):
            raise NotImplementedError(
                f"LocalSGD: {type(without_compile(model)).__name__} is sharded (FSDP), so no rank has a model of its "
                'own to train between two averages. strategy="ddp" has'
            )
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
        """Count a step; call it once per batch, after ``optimizer.step()``."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = list(_grouped(parameters))
        with torch.no_grad():
            # All averages exist before the first parameter changes, in case the wait for one of them is aborted.
            averages = [self._mean_of(group) for group in groups]
            for group, average in zip(groups, averages, strict=True):
                parts = average.split([parameter.numel() for parameter in group])
                for parameter, part in zip(group, parts, strict=True):
                    parameter.copy_(part.view_as(parameter))

    def _mean_of(self, group: list[Parameter]) -> Tensor:
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in group])
        mean: Tensor = self.accelerator.reduce(flat, "mean")
        return mean


def _grouped(parameters: Iterable[Parameter]) -> Iterator[list[Parameter]]:
    """Yield parameters of one dtype and device to average at once: at most `_GROUP_BYTES` unless a single one."""
    open_groups: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        size_bytes = parameter.numel() * parameter.element_size()
        if kind in open_groups and sizes[kind] + size_bytes > _GROUP_BYTES:
            yield open_groups.pop(kind)
        if kind not in open_groups:
            open_groups[kind], sizes[kind] = [], 0
        open_groups[kind].append(parameter)
        sizes[kind] += size_bytes
    yield from open_groups.values()
