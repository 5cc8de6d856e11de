"""Hooks of dispatched models: inputs come to the device that computes, and nothing may move what waits. In ranks.

They are classes and not functions in functions, so that models which have them can be pickled and copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.features.big_models.weight_slots import Slot
from nbaccel.train.data.placement import to_device
from nbaccel.train.distributed.nested import leaves

__all__ = ["Bridge", "InputsTo", "StaysThere", "fill", "is_on", "refuse_to_load"]


class InputsTo:
    """Moves the tensors among a module's arguments to the device on which it computes."""

    def __init__(self, device: torch.device, skipped: frozenset[str]) -> None:
        self._device = device
        self._skipped = skipped

    def __call__(self, module: Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        moved = (
            _on(args, self._device),
            {name: value if name in self._skipped else _on(value, self._device) for name, value in kwargs.items()},
        )
        return moved


class Bridge:
    """Brings the inputs of a model to its first device, and its outputs to where the inputs were."""

    def __init__(self, device: torch.device, skipped: frozenset[str]) -> None:
        self._inputs = InputsTo(device, skipped)
        self._origins: list[torch.device | None] = []

    def before(self, module: Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tensors = (value for value in leaves((args, kwargs)) if isinstance(value, Tensor))
        self._origins.append(next((tensor.device for tensor in tensors), None))
        return self._inputs(module, args, kwargs)

    def after(self, module: Module, args: Any, output: Any) -> Any:
        origin = self._origins.pop() if self._origins else None
        return None if origin is None or output is None else _on(output, origin)


def _on(value: Any, device: torch.device) -> Any:
    """Return `value` with its tensors on `device`; the same object if they are there already."""
    elsewhere = any(isinstance(each, Tensor) and not is_on(each, device) for each in leaves(value))
    return to_device(value, device) if elsewhere else value


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Return whether `tensor` is on `device`, any of its kind if the device has no number."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


class StaysThere:
    """Takes the place of ``Module._apply``, by which `to`, `cuda`, `half` and others change every tensor of a model."""

    def __init__(self, kind: str, count: int) -> None:
        self._kind = kind
        self._count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self._kind} was dispatched, and {self._count} of its tensors wait on the host or on the disk, so it "
            "cannot be moved or converted: choose devices by the map, and the type by dtype= when it is loaded; "
            "remove_hook_from_submodules(model) brings everything into the host's memory"
        )


def fill(slots: Sequence[Slot], module: Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Put stored tensors into the state dict of the module that owns them, in place of those on the meta device."""
    opened: dict[str, Any] = {}
    for slot in slots:
        held = state.get(prefix + slot.leaf)
        if held is not None and held.is_meta:
            state[prefix + slot.leaf] = slot.read(opened).detach()


def refuse_to_load(slots: Sequence[Slot], module: Module, state: Mapping[str, Any], prefix: str, *others: Any) -> None:
    """Refuse ``load_state_dict``, which would write into tensors that have no memory.

    Raises:
        RuntimeError: `state` has one of them.
    """
    if any(prefix + slot.leaf in state for slot in slots):
        raise RuntimeError(
            f"{prefix.removesuffix('.') or type(module).__name__} waits on the host or on the disk: load the weights "
            "before the model is dispatched, or by load_checkpoint_and_dispatch"
        )
