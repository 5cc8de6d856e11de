"""EnginePrecision: fp16 and bf16 as DeepSpeed's engine does them, with its own loss scale. Runs in ranks.

The engine casts the weights themselves, so a forward has to get its inputs in the same type; what it returns is fp32
for the program, as with every other strategy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.train.distributed.nested import map_children
from nbaccel.train.step.kwargs_handlers import Handlers
from nbaccel.train.step.precision import Precision, to_fp32

__all__ = ["HALVES", "EnginePrecision", "compute_in_half", "refuse_precision"]

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class EnginePrecision(Precision):
    """The precision of an engine, which scales losses, unscales gradients and skips steps by itself."""

    def __init__(self, name: str, device: torch.device, handlers: Handlers | None, owner: Any) -> None:
        super().__init__(device, handlers)
        self.name = name
        self.skips_infinite = name == "fp16"
        self._owner = owner

    def state_dict(self) -> dict[str, Any]:
        scaler = self._owner.loss_scaler
        return {} if self.name != "fp16" or scaler is None else _plain_state(scaler)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        scaler = self._owner.loss_scaler
        if scaler is not None:
            vars(scaler).update({name: value for name, value in state.items() if name in vars(scaler)})

    def explain_skips(self) -> str:
        return (
            "their fp16 gradients were infinite or NaN at every loss scale of DeepSpeed's. Lower the learning rate, "
            "clip gradients, or use mixed_precision='bf16'."
        )


def refuse_precision(name: str, device: torch.device) -> None:
    """Refuse a precision in which DeepSpeed cannot compute on this device.

    Raises:
        ValueError: The message says what to choose.
    """
    from deepspeed.accelerator import get_accelerator

    if name == "fp16" and not get_accelerator().is_fp16_supported():
        raise ValueError(
            f"mixed_precision='fp16': DeepSpeed cannot compute in it on this {device.type}: use 'bf16' or 'no', or "
            "strategy='fsdp'"
        )


def _plain_state(scaler: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(scaler).items() if isinstance(value, bool | int | float)}


def compute_in_half(model: Module, precision: Precision) -> list[Any]:
    """Let `model` take inputs of any floating type, and return fp32; return the handles of the hooks."""
    dtype = HALVES.get(precision.name)
    if dtype is None:
        return []

    def before(module: Module, args: Any, kwargs: Any) -> Any:
        return _cast(args, dtype), _cast(kwargs, dtype)

    def after(module: Module, args: Any, output: Any) -> Any:
        return to_fp32(output)

    return [
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after),
    ]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    return map_children(lambda child: _cast(child, dtype), value)
