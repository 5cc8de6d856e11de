"""Keep optimizers on the parameters of a model that is sharded, or whole again. Runs in ranks.

`fully_shard` replaces each parameter of a module by a shard, a new object. An optimizer that was made before holds the
old ones, with its state under them. `Replacements` remembers which parameter became which, and brings optimizers over,
whenever they come: in the same call of `prepare`, in a later one, or in an earlier one.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Replacements"]


class Replacements:
    """Parameters that were replaced, and by which. Holds neither: an old one lives as long as an optimizer has it."""

    def __init__(self) -> None:
        self._by_old: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}

    def add(self, pairs: Mapping[Tensor, Tensor]) -> None:
        """Remember that each key was replaced by its value."""
        self._by_old = {key: pair for key, pair in self._by_old.items() if pair[0]() is not None}
        for old, new in pairs.items():
            if old is not new:
                self._by_old[id(old)] = (weakref.ref(old), weakref.ref(new))

    def bring(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, which stays the same object with its groups and hooks, train the new parameters.

        State of a parameter's shape is sharded like it, each rank keeping its rows; the rest, step counters, stays.
        """
        for group in optimizer.param_groups:
            group["params"] = [self._newest(parameter) for parameter in group["params"]]
        for old in list(optimizer.state):
            new = self._newest(old)
            if new is not old:
                entries = optimizer.state.pop(old)
                optimizer.state[new] = {name: _like(value, new) for name, value in entries.items()}

    def _newest(self, parameter: Tensor) -> Tensor:
        """Return what `parameter` has become, through all replacements."""
        while (pair := self._by_old.get(id(parameter))) is not None and pair[0]() is parameter:
            new = pair[1]()
            if new is None:
                break
            parameter = new
        return parameter


def _like(value: Any, parameter: Tensor) -> Any:
    """Return state of an optimizer in the form of `parameter`: its rows of a whole tensor, or a whole one of rows."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
