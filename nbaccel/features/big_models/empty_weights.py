"""Make models without memory for their weights: `init_empty_weights`, `init_on_device`. Runs anywhere.

While a block is entered, ``nn.Module.register_parameter`` is replaced, for all threads of the process: a parameter goes
to the device as soon as a module gets it, so one parameter at a time exists on the host. On the meta device the
initialisations of ``torch.nn.init`` return at once, since some of them have no form for it and import much. Parameters
that are on the device already stay the same objects, so that tied ones stay tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

__all__ = ["init_empty_weights", "init_on_device"]


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Make the models of this block on the meta device: they have shapes and types, and take no memory.

    Args:
        include_buffers: Buffers are on the meta device too. Otherwise they are real, since a model needs those that no
            checkpoint has.

    Example:
        >>> with init_empty_weights():
        ...     model = torch.nn.Linear(10_000, 10_000)
        >>> model.weight.device, model.weight.shape
        (device(type='meta'), torch.Size([10000, 10000]))
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Put the parameters of the models of this block on a device, each as soon as its module has it.

    Args:
        device: The device.
        include_buffers: Put buffers there too.

    Example:
        >>> with init_on_device("meta"):
        ...     torch.nn.Linear(2, 1).weight.device
        device(type='meta')
    """
    chosen = torch.device(device)
    with ExitStack() as stack:
        register = Module.register_parameter
        stack.callback(setattr, Module, "register_parameter", register)
        Module.register_parameter = _placing(register, chosen)  # type: ignore[method-assign]
        if include_buffers:
            keep = Module.register_buffer
            stack.callback(setattr, Module, "register_buffer", keep)
            Module.register_buffer = _placing_buffers(keep, chosen)  # type: ignore[method-assign]
        if chosen.type == "meta":
            for name in _initialisations():
                stack.callback(setattr, nn.init, name, getattr(nn.init, name))
                setattr(nn.init, name, _leave_empty(getattr(nn.init, name)))
        yield


def _placing(register: Callable[..., None], device: torch.device) -> Callable[..., None]:
    def register_parameter(self: Module, name: str, param: Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not is_lazy(param) and not _is_on(param, device):
            self._parameters[name] = _moved(param, device)

    return register_parameter


def _placing_buffers(register: Callable[..., None], device: torch.device) -> Callable[..., None]:
    def register_buffer(self: Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        register(self, name, tensor, persistent)
        if tensor is not None and not is_lazy(tensor):
            self._buffers[name] = tensor.to(device)

    return register_buffer


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _moved(parameter: Parameter, device: torch.device) -> Parameter:
    """Return a parameter of the same kind on `device`; its attributes go along."""
    marks = vars(parameter)
    if type(parameter) is Parameter:
        moved = Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
        vars(moved).update(marks)
        return moved
    kind: Any = type(parameter)  # of quantisation, whose attributes are its constructor's arguments
    made: Parameter = kind(parameter.data.to(device), requires_grad=parameter.requires_grad, **marks)
    return made


def _initialisations() -> list[str]:
    return [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]


def _leave_empty(initialise: Callable[..., Any]) -> Callable[..., Any]:
    def leave(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if tensor.is_meta else initialise(tensor, *args, **kwargs)

    return leave
