"""Options for torch's DDP, GradScaler, autocast, process group and profiler, as Accelerate names them. Built anywhere.

The names and fields are those of `accelerate.utils`, so that programs keep their ``kwargs_handlers=[...]``. They are
values: nothing here calls torch; the parts that they configure read their fields. Plugins of Accelerate that have no
counterpart here are refused with what works instead. Enumerations that programs name have the values that stand in
Accelerate's configurations.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import StrEnum
from typing import Any, Literal, TypedDict

from nbaccel.base.values import frozen
from nbaccel.train.step.environment import parse_choice_from_env, parse_flag_from_env

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "Handlers",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "PluginsNotHere",
    "ProfileKwargs",
    "refuse_plugins",
    "refuse_plugins_of_the_environment",
]


class KwargsHandler:
    """Base of handlers: a dataclass of options. Fields may be assigned until an Accelerator is made with it.

    Example:
        >>> isinstance(AutocastKwargs(), KwargsHandler)
        True
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check the options, and normalise them; called again when an Accelerator takes them."""

    def to_kwargs(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name.

        Example:
            >>> GradScalerKwargs(growth_interval=100).to_kwargs()
            {'growth_interval': 100}
        """
        standard = type(self)()
        options = [option.name for option in fields(self)]  # type: ignore[arg-type]  # every subclass is a dataclass
        return {name: value for name in options if (value := getattr(self, name)) != getattr(standard, name)}


class DDPCommunicationHookType(StrEnum):
    """Compression of DDP's gradients: none, half precision, or low-rank factors (PowerSGD, arXiv:1905.13727).

    Example:
        >>> handler = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


def _hook_type(
    name: str, value: DDPCommunicationHookType | str, choices: Sequence[DDPCommunicationHookType]
) -> DDPCommunicationHookType:
    for choice in choices:
        if value == choice:
            return choice
    raise ValueError(f"{name} must be one of {', '.join(repr(choice.value) for choice in choices)}, got {value!r}")


@dataclass(slots=True)
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of torch's `DistributedDataParallel`; used with more than one process.

    Args:
        dim, broadcast_buffers, find_unused_parameters, check_reduction, static_graph: As torch documents them.
        bucket_cap_mb: The size of a bucket in MiB.
        gradient_as_bucket_view: Gradients are views of the buckets, which saves a copy of all gradients. For programs
            that do not use a ``parameter.grad`` after the next backward, which overwrites it in place.
        comm_hook: How gradients are sent.
        comm_wrapper: NO, FP16 or BF16: the precision in which `comm_hook` sends.
        comm_state_option: Arguments of torch's `PowerSGDState`, such as ``{"matrix_approximation_rank": 2}``.

    Example:
        >>> DistributedDataParallelKwargs(comm_hook="fp16").comm_hook
        <DDPCommunicationHookType.FP16: 'fp16'>
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hook = _hook_type("comm_hook", self.comm_hook, list(DDPCommunicationHookType))
        wrappers = [DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16]
        wrapper = _hook_type("comm_wrapper", self.comm_wrapper, wrappers)
        self.comm_hook, self.comm_wrapper = hook, wrapper


@dataclass(slots=True)
class GradScalerKwargs(KwargsHandler):
    """Options of torch's `GradScaler`; used with ``mixed_precision="fp16"``.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: As torch documents them.
        min_scale: The lower limit of the scale. Without it the scale reaches 0.0 after 166 skipped steps, and training
            continues without gradients.

    Example:
        >>> GradScalerKwargs(init_scale=1024.0).growth_interval
        2000
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.init_scale:
            raise ValueError(f"min_scale must lie above 0 and at most at init_scale {self.init_scale:g}, got "
                             f"{self.min_scale:g}")  # fmt: skip


@dataclass(slots=True)
class AutocastKwargs(KwargsHandler):
    """Options of ``torch.autocast``, for prepared models and for `Accelerator.autocast`.

    Args:
        enabled: False computes in full precision.
        cache_enabled: Whether casts of weights are cached; None leaves torch's choice.

    Example:
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(cache_enabled=False)])
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass(slots=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of ``torch.distributed.init_process_group``, where nbaccel forms the group.

    Args:
        backend: "gloo", "nccl" and so on; None chooses by device.
        init_method: Where the ranks meet; None is as they were launched.
        timeout: The longest time of a collective; None is torch's.

    Example:
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=30))])
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


Activity = Literal["cpu", "cuda", "xpu", "mtia", "hpu"]


@dataclass(slots=True)
class ProfileKwargs(KwargsHandler):
    """Options of ``torch.profiler.profile``, for `Accelerator.profile`.

    Args:
        activities: "cpu", "cuda", "xpu" and so on; None is what torch finds.
        schedule_option: Arguments of ``torch.profiler.schedule``, in steps: wait, warmup, active, repeat, skip_first.
        on_trace_ready: Called with the profiler after each cycle of the schedule.
        record_shapes, profile_memory, with_stack, with_flops, with_modules: As torch documents them.
        output_trace_dir: A folder, made if missing, for ``profile_{rank}.json`` (open it in chrome://tracing).

    Example:
        >>> from nbaccel import Accelerator
        >>> accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], record_shapes=True)])
    """

    activities: Sequence[Activity] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None


@frozen
class Handlers:
    """One handler of each kind: those that were given, and defaults for the others."""

    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    scaler: GradScalerKwargs = field(default_factory=GradScalerKwargs)
    autocast: AutocastKwargs = field(default_factory=AutocastKwargs)
    group: InitProcessGroupKwargs = field(default_factory=InitProcessGroupKwargs)
    profile: ProfileKwargs = field(default_factory=ProfileKwargs)

    @classmethod
    def of(cls, given: Sequence[KwargsHandler] | None) -> Handlers:
        """Return the handlers of ``kwargs_handlers=[...]``, in any order.

        Raises:
            TypeError: An object is no handler of ours.
            ValueError: Two handlers of one class.
        """
        places: dict[Any, str] = {known.default_factory: known.name for known in fields(cls)}
        chosen: dict[str, KwargsHandler] = {}
        for handler in given or ():
            kind = type(handler)
            if kind not in places:
                known = ", ".join(sorted(place.__name__ for place in places))
                raise TypeError(
                    f"kwargs_handlers takes {known} of nbaccel.utils, got {kind.__module__}.{kind.__qualname__}"
                )
            if places[kind] in chosen:
                raise ValueError(f"kwargs_handlers has two {kind.__name__}: which one holds? Give one")
            handler.__post_init__()
            chosen[places[kind]] = handler
        return cls(**chosen)  # type: ignore[arg-type]


class PluginsNotHere(TypedDict, total=False):
    """Arguments of Accelerate's constructor that are accepted only as None."""

    deepspeed_plugins: Any
    megatron_lm_plugin: Any
    torch_tp_plugin: Any
    parallelism_config: Any


_FITS = (
    "To make a model fit: strategy='fsdp', by which each rank holds a part of it, mixed_precision='bf16' or 'fp16', "
    "gradient_accumulation_steps with a smaller batch, accelerator.gradient_checkpointing(model)."
)

_INSTEAD = {
    "deepspeed_plugins": "one model is trained by DeepSpeed in a run: give its options as deepspeed_plugin.",
    "megatron_lm_plugin": f"Megatron-LM does not drive the training here. {_FITS}",
    "torch_tp_plugin": f"a model's layers are not split over the ranks here. {_FITS}",
    "parallelism_config": (
        "ranks are replicas here, one dimension of num_processes, which is what dp_replicate_size alone asks for: "
        f"leave it out for that. {_FITS}"
    ),
}

_BY_VARIABLE = {
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
"""Variables by which `accelerate launch` tells a program to use one of them."""


def refuse_plugins(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Check the constructor arguments that are not nbaccel's.

    Args:
        known: The names of nbaccel's arguments, to suggest one for a mistyped name.

    Raises:
        NotImplementedError: An argument of Accelerate that has no counterpart here.
        TypeError: Neither library has such an argument.

    Example:
        >>> refuse_plugins({"megatron_lm_plugin": None}, ())
    """
    for name, value in given.items():
        if name not in _INSTEAD:
            alike = difflib.get_close_matches(name, [*known, *_INSTEAD], n=1)
            meant = f"; did you mean {alike[0]}?" if alike else ""
            raise TypeError(f"Accelerator got an unexpected keyword argument {name!r}{meant}")
        if value is not None:
            raise NotImplementedError(f"Accelerator({name}=…): {_INSTEAD[name]}")


def refuse_plugins_of_the_environment() -> None:
    """Check what `accelerate launch` has chosen for this program, which would otherwise silently train by DDP.

    Raises:
        NotImplementedError: A plugin that has no counterpart here, or a device.
    """
    for variable, name in _BY_VARIABLE.items():
        if parse_flag_from_env(variable):
            raise NotImplementedError(f"{variable}=true in the environment: {_INSTEAD[name]}")
    if device := parse_choice_from_env("ACCELERATE_TORCH_DEVICE", ""):
        raise NotImplementedError(
            f"ACCELERATE_TORCH_DEVICE={device} in the environment: each rank takes the device of its number here. "
            "Choose the GPUs that it sees with CUDA_VISIBLE_DEVICES, or the CPU with Accelerator(cpu=True)."
        )
