"""Models as programs pass them to `prepare`: in DataParallel, quantised, on several devices, compiled. Runs in ranks.

This module decides what `prepare` may do with a model before a strategy takes it, and refuses what cannot be trained
here. It reads attributes with which transformers and accelerate mark such models and imports none of
them. It also compiles prepared models by ``torch.compile`` (`Compiling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import DataParallel, Module, ModuleList
from torch.nn.parallel import DistributedDataParallel

from nbaccel.base.quantised import is_quantised
from nbaccel.base.settings import RunSettings
from nbaccel.base.values import frozen
from nbaccel.base.world import World
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.step.kwargs_handlers import KwargsHandler
from nbaccel.train.step.precision import restore_forward
from nbaccel.train.strategies.single import waiting_names, without_compile

__all__ = [
    "Compiling",
    "TorchDynamoPlugin",
    "admit",
    "extract_model_from_parallel",
    "is_compiled_module",
    "is_spread",
    "keep_compiled",
    "may_move",
]

_NOWHERE = frozenset({"meta", "disk"})


def admit(model: Module, world: World, device: torch.device, trains: bool = True, shards: bool = False) -> Module:
    """Return `model` as it can be prepared in this rank: without ``nn.DataParallel``.

    Args:
        trains: Its gradients will be synchronised. Then parts that wait on the host or on the disk have to be frozen.
        shards: The strategy cuts it into rows, for which all of it has to be present.

    Raises:
        ValueError: The model is spread over several devices, and there are several ranks.
    """
    if isinstance(model, DataParallel):
        if world.is_main_process:
            warn_user(
                "the model was wrapped in nn.DataParallel; prepare took it out, since every process drives one "
                "device here. Leave the wrapper out.",
            )
        model = model.module
    if world.is_distributed:
        if trains:
            _refuse_waiting(model, world, shards)
        _refuse_spread(model, world, device, trains)
        _warn_of_neighbour(model, world, device)
    return model


def may_move(model: Module) -> bool:
    """Return whether we may call ``model.to(device)``: not on quantised models, nor on models on several devices.

    Nor on those with parts that wait on the disk, or on the host beside a device.
    """
    return not (is_quantised(without_compile(model)) or is_spread(model) or waiting_names(model))


def is_spread(model: Module) -> bool:
    """Return whether the parameters of `model` are on several devices."""
    return len(_devices(model)) > 1


def keep_compiled(model: Module, inner: Module) -> Module:
    """Return `inner`, the user's own module inside `model`, compiled if `model` is compiled."""
    if is_compiled_module(model):
        # The wrapper around DDP must not change, for the training; this one shares its compiler.
        return model if without_compile(model) is inner else type(model)(inner, model.dynamo_ctx)
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model if without_compile(model) is inner else inner


def is_compiled_module(module: Module) -> bool:
    """Return whether a module is what ``torch.compile`` returned.

    Args:
        module: Any module.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> is_compiled_module(layer), is_compiled_module(torch.compile(layer, backend="eager"))
        (False, True)
    """
    return "_orig_mod" in module._modules


def _refuse_waiting(model: Module, world: World, shards: bool) -> None:
    waiting = set(waiting_names(model))
    is_trained = any(each.requires_grad for name, each in model.named_parameters() if name in waiting)
    if waiting and (is_trained or shards):
        raise ValueError(
            f"{_name(model)} has parts that wait on the host or on the disk, and there are {world.world_size} "
            "processes, which exchange gradients of whole models: for inference accelerator.prepare_model(model, "
            "evaluation_mode=True) takes it, one such model in each process; to train adapters, freeze what waits "
            "(requires_grad_(False)) and use --strategy ddp; to train all of it, start one process (-n 1) with "
            "places on devices alone."
        )


def _refuse_spread(model: Module, world: World, device: torch.device, trains: bool) -> None:
    spread, own = _devices(model), _own_devices(world, device)
    if len(spread) > 1 and spread - own - (set() if trains else {"cpu"}):
        raise ValueError(
            f"{_name(model)} is spread over {', '.join(sorted(spread))}, and there are {world.world_size} processes "
            f"that need a whole model each: load it on one device (no device_map='auto'; device_map={{'': "
            f"accelerator.device}}), start one process that has several (-n 1 --devices 0,1), or give each process "
            f"as many (-n {world.world_size} --devices {','.join(map(str, range(2 * world.world_size)))})."
        )
    if spread - own and device.type != "cpu" and is_quantised(without_compile(model)):
        raise ValueError(
            f"{_name(model)} is quantised and lies on {spread.pop()}, so it cannot be moved to {device} of rank "
            f"{world.rank}: load it there, device_map={{'': accelerator.device}}."
        )


def _warn_of_neighbour(model: Module, world: World, device: torch.device) -> None:
    foreign = {place for place in _devices(model) if place.startswith("cuda")} - _own_devices(world, device)
    if foreign and device.type == "cuda":
        warn_user(
            f"{world.place} made {_name(model)} on {foreign.pop()}, where another rank "
            f"trains: prepare moves it to {device}, but what it took there is not given back. Leave .cuda() out, or "
            "use .to(accelerator.device).",
        )


def _own_devices(world: World, device: torch.device) -> set[str]:
    """Return the names of this rank's devices: `device`, and with several of its own these."""
    return {str(device), *(f"{device.type}:{number}" for number in range(world.own_devices) if world.own_devices > 1)}


def _devices(model: Module) -> set[str]:
    """Return the devices of the model: by transformers' map if it has one, else by its parameters.

    Parameters on the CPU beside others on one device are taken for an oversight, which moving the model corrects;
    in a map they are intended.
    """
    mapped = getattr(without_compile(model), "hf_device_map", None)
    # "cuda" means the current device of the process, and the parameters know which one that was.
    if isinstance(mapped, dict) and not any(str(place) in ("cuda", "xpu") for place in mapped.values()):
        return {_device_name(place) for place in mapped.values()} - _NOWHERE
    places = {str(parameter.device) for parameter in model.parameters()} - _NOWHERE
    return places - {"cpu"} or places


def _device_name(place: object) -> str:
    return f"cuda:{place}" if isinstance(place, int) else str(place)


def _name(model: Module) -> str:
    return type(without_compile(model)).__name__


_NOTHING = ("none", "no")
_DEFAULT_MODE = "default"


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments of ``torch.compile``, for ``Accelerator(dynamo_plugin=…)``. None is the launch's choice.

    Args:
        backend: The name of a backend, such as "inductor". "no" compiles nothing, and so does None without a launch's
            choice.
        mode, fullgraph, dynamic, options, disable: As ``torch.compile`` takes them.
        use_regional_compilation: Compile the blocks that a model repeats (a ``ModuleList`` of one class) instead of the
            whole.

    Example:
        >>> TorchDynamoPlugin(backend="eager", dynamic=True).to_kwargs()
        {'backend': 'eager', 'dynamic': True}
    """

    backend: str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def settings(self) -> RunSettings:
        """Return those of these choices that a launch can make too."""
        return RunSettings(
            dynamo_backend=None if self.backend is None else _backend_name(self.backend),
            dynamo_mode=self.mode,
            dynamo_use_fullgraph=self.fullgraph,
            dynamo_use_dynamic=self.dynamic,
            dynamo_use_regional_compilation=self.use_regional_compilation,
        )


@frozen
class Compiling:
    """Compiles the models of one run, by `settings` and by the options that only `plugin` has.

    A program chooses compiling with `TorchDynamoPlugin`. The choice of one run is the program's, and for what it leaves
    open the launch's. No device is touched.
    """

    settings: RunSettings
    plugin: TorchDynamoPlugin

    @property
    def is_on(self) -> bool:
        return (self.settings.dynamo_backend or _NOTHING[0]) not in _NOTHING

    def compiled(self, model: Module) -> Module:
        """Return `model` compiled, unless it is compiled already or nothing is to be compiled.

        With regional compilation it stays the same object, and the blocks that it repeats are compiled in place.
        """
        if not self.is_on or is_compiled_module(model):
            return model
        blocks = list(_repeated(without_compile(model))) if self.settings.dynamo_use_regional_compilation else []
        for block in blocks:
            if block._compiled_call_impl is None:
                self._compile_in_place(block)
        if blocks:
            return model
        wrapped: Module = torch.compile(model, **self._arguments())  # type: ignore[assignment]  # a module gives one
        return wrapped

    def _compile_in_place(self, block: Module) -> None:
        """Let calls of `block` run compiled.

        The compiler leaves functions of torch's own modules as they are, unless code of another module calls them.
        """
        if str(getattr(block.forward, "__module__", "")).startswith("torch."):
            block._compiled_call_impl = torch.compile(_called_from_here(block), **self._arguments())
        else:
            block.compile(**self._arguments())

    def _arguments(self) -> dict[str, Any]:
        mode = self.settings.dynamo_mode
        return {
            "backend": self.settings.dynamo_backend,
            "mode": None if mode == _DEFAULT_MODE else mode,  # torch takes no mode, not even this, beside options
            "fullgraph": bool(self.settings.dynamo_use_fullgraph),
            "dynamic": self.settings.dynamo_use_dynamic,
            "options": self.plugin.options,
            "disable": self.plugin.disable,
        }


def _backend_name(backend: Any) -> str:
    """Return ``torch.compile``'s name of `backend`, which Accelerate spells in capitals, in an enumeration."""
    return str(getattr(backend, "value", backend)).lower()


def _called_from_here(block: Module) -> Callable[..., Any]:
    """Return a function that calls `block` as torch does, hooks included."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return block._call_impl(*args, **kwargs)

    return call


def _repeated(model: Module) -> Iterator[Module]:
    for module in model.modules():
        if isinstance(module, ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1:
            yield from module


def extract_model_from_parallel(
    model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Module:
    """Return the program's own module, out of DDP, ``nn.DataParallel`` and ``torch.compile``.

    Args:
        model: The model.
        keep_fp32_wrapper: False also removes autocast from the module's forward, and restores the forward that the
            program (or Accelerate) has kept as ``_original_forward``.
        keep_torch_compile: A compiled model stays compiled. False returns the module that was compiled.
        recursive: Accepted as by Accelerate; every layer is removed in any case.

    Example:
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
