"""Hooks around a module's forward, in the form that programs for Accelerate write and ask for. Runs in ranks.

`dispatch_model` does not use them: these are for programs with hooks of their own, and for pipelines whose models take
turns on a device. A hooked module has the attributes ``_hf_hook`` and ``_old_forward``, as there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.features.big_models.dispatching import as_device, take_back
from nbaccel.features.big_models.forward_hooks import is_on
from nbaccel.features.big_models.module_sizes import (
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
)
from nbaccel.train.data.placement import to_device
from nbaccel.train.distributed.nested import leaves

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "cpu_offload_with_hook",
    "has_offloaded_params",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]


class ModelHook:
    """Base of hooks; it changes nothing.

    Attributes:
        no_grad: Run the forward under ``torch.no_grad``.
    """

    no_grad = False

    def init_hook(self, module: Module) -> Module:
        """Prepare `module` when the hook is added, and return it."""
        return module

    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Return the arguments for the forward."""
        return args, kwargs

    def post_forward(self, module: Module, output: Any) -> Any:
        """Return the output in place of the forward's."""
        return output

    def detach_hook(self, module: Module) -> Module:
        """Undo `init_hook` when the hook is removed, and return `module`."""
        return module


class SequentialHook(ModelHook):
    """Several hooks of one module, each called with what the one before has returned."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: Module) -> Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: Module) -> Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


class AlignDevicesHook(ModelHook):
    """Brings inputs, and offloaded weights, to a device for the forward.

    Args:
        execution_device: That device; None moves nothing.
        offload: Take the weights away after each forward.
        io_same_device: Bring the output to where the inputs were.
        weights_map: The offloaded weights by name; by default those of the module, kept on the host.
        offload_buffers: Buffers too.
        place_submodules: The tensors below the module, too.
        skip_keys: Names of arguments that are not moved.
        tied_params_map: Accepted, unused.
    """

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: Mapping[int, Any] | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = [skip_keys] if isinstance(skip_keys, str) else skip_keys
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}

    def init_hook(self, module: Module) -> Module:
        offloaded = self._offloaded(module)
        self.original_devices = {name: tensor.device for name, tensor in offloaded.items()}
        if self.offload and self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in offloaded.items()}
        for name, tensor in [*named_module_tensors(module, recurse=self.place_submodules)]:
            if name in offloaded:
                set_module_tensor_to_device(module, name, "meta")
            elif self.execution_device is not None and not tensor.is_meta:
                set_module_tensor_to_device(module, name, self._device())
        return module

    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self.io_same_device:
            tensors = (each for each in leaves((args, kwargs)) if isinstance(each, Tensor))
            self.input_device = next((tensor.device for tensor in tensors), None)
        if self.offload and self.weights_map is not None:
            for name in self.original_devices:
                set_module_tensor_to_device(module, name, self._device(), self.weights_map[name])
        if self.execution_device is None:
            return args, kwargs
        skipped = self.skip_keys or ()
        return to_device(args, self._device()), {
            name: value if name in skipped else to_device(value, self._device()) for name, value in kwargs.items()
        }

    def post_forward(self, module: Module, output: Any) -> Any:
        if self.offload:
            for name in self.original_devices:
                set_module_tensor_to_device(module, name, "meta")
        return output if self.input_device is None else to_device(output, self.input_device)

    def detach_hook(self, module: Module) -> Module:
        if self.offload and self.weights_map is not None:
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    set_module_tensor_to_device(module, name, device, self.weights_map[name])
        return module

    def _device(self) -> torch.device:
        return as_device("cpu" if self.execution_device is None else self.execution_device)

    def _offloaded(self, module: Module) -> dict[str, Tensor]:
        if not self.offload:
            return {}
        left = get_non_persistent_buffers(module, self.place_submodules, fqns=True)
        found = named_module_tensors(module, self.offload_buffers, self.place_submodules)
        return {name: tensor for name, tensor in found if name not in left}


class CpuOffload(ModelHook):
    """Keeps a model on the host until its forward; it stays on the device until `UserCpuOffloadHook.offload`.

    Args:
        execution_device: By default the accelerator of this machine, else the CPU.
        prev_module_hook: The hook of another model, which leaves the device before this one comes.
    """

    def __init__(
        self,
        execution_device: int | str | torch.device | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self.execution_device = as_device(found or "cpu" if execution_device is None else execution_device)

    def init_hook(self, module: Module) -> Module:
        return module.to("cpu")

    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        if any(not is_on(parameter, self.execution_device) for parameter in module.parameters()):
            module.to(self.execution_device)
        return to_device(args, self.execution_device), to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """A model and the hook that `cpu_offload_with_hook` has added to it."""

    def __init__(self, model: Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Bring the model back to the host."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook; the model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[Module, UserCpuOffloadHook]:
    """Keep a model on the host until it is called, for pipelines of models that take turns.

    Once called, it stays on its device until ``hook.offload()``, or until the model is called that was given this hook
    as `prev_module_hook`.

    Args:
        model: The model.
        execution_device: Where it computes; by default the accelerator of this machine, else the CPU.
        prev_module_hook: The hook of the model that goes back to the host when this one is called.

    Returns:
        The model and its hook.

    Example:
        >>> first, hook = cpu_offload_with_hook(torch.nn.Linear(2, 2), "cpu")
        >>> second, hook = cpu_offload_with_hook(torch.nn.Linear(2, 2), "cpu", prev_module_hook=hook)
        >>> second(first(torch.ones(1, 2))).shape
        torch.Size([1, 2])
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


class _Hooked:
    """A module's forward between the two halves of its hook. A class, so that such modules can be pickled."""

    def __init__(self, module: Module, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward, updated=())
        self._module = module
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook: Any = self._module._hf_hook
        args, kwargs = hook.pre_forward(self._module, *args, **kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not hook.no_grad):
            output = self._forward(*args, **kwargs)
        return hook.post_forward(self._module, output)


def add_hook_to_module(module: Module, hook: ModelHook, append: bool = False) -> Module:
    """Let `hook` act around the forward of `module`, and return the module.

    Args:
        append: After the hook that the module has; otherwise in place of it.
    """
    marks = vars(module)
    if append and marks.get("_hf_hook") is not None:
        before: Any = marks["_hf_hook"]
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    forward: Any = marks.get("_old_forward") or module.forward
    module._old_forward = forward
    module = hook.init_hook(module)
    module._hf_hook = hook  # type: ignore[assignment]  # an attribute, and no module
    module.forward = _Hooked(module, forward)
    return module


def remove_hook_from_module(module: Module, recurse: bool = False) -> Module:
    """Remove the hook of `module`, and what `dispatch_model` did to it; return the module, as it was before.

    Args:
        recurse: The hooks of the modules below it, too.
    """
    take_back(module)
    marks = vars(module)
    if (hook := marks.pop("_hf_hook", None)) is not None:
        hook.detach_hook(module)
    if (forward := marks.pop("_old_forward", None)) is not None:
        module.forward = forward
        if getattr(forward, "__func__", None) is type(module).forward:
            del module.forward  # the class has it
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: Module) -> None:
    """Remove the hooks of `module` and of all modules below it; what was offloaded is in the host's memory then."""
    for part in module.modules():
        remove_hook_from_module(part)


def has_offloaded_params(module: Module) -> bool:
    """Return whether the parameters of `module` itself are elsewhere between forwards."""
    return any(parameter.is_meta for parameter in module.parameters(recurse=False)) and _reads(module) is not None


@contextmanager
def align_module_device(module: Module, execution_device: int | str | torch.device | None = None) -> Iterator[None]:
    """Have the tensors of `module` itself in memory while entered, for programs that read or change them.

    Args:
        execution_device: Where; by default where the module computes. What is changed of offloaded weights is lost
            after.
    """
    read, before = _reads(module), dict(module._parameters)
    try:
        for name, parameter in before.items():
            if parameter is not None and (parameter.is_meta or execution_device is not None):
                value = read(name) if parameter.is_meta and read is not None else None
                set_module_tensor_to_device(module, name, as_device(execution_device or "cpu"), value)
        yield
    finally:
        for name, parameter in before.items():
            held = module._parameters[name]
            if parameter is not None and held is not None and held is not parameter:
                if not parameter.is_meta:
                    parameter.data.copy_(held.data)
                module._parameters[name] = parameter


def _reads(module: Module) -> Callable[[str], Tensor] | None:
    """Return a function that reads an offloaded tensor of `module` by its name; None if nothing knows where it is."""
    hook: Any = vars(module).get("_hf_hook")
    kept = getattr(hook, "weights_map", None)
    if kept is not None:
        return kept.__getitem__  # type: ignore[no-any-return]
    state = module.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        return None
    return state.__getitem__
