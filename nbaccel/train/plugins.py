"""Plugins of Accelerate that have no counterpart here: their arguments, and what works instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from nbaccel.train.environment import parse_choice_from_env, parse_flag_from_env

__all__ = ["PluginsNotHere", "refuse_plugins", "refuse_plugins_of_the_environment"]


class PluginsNotHere(TypedDict, total=False):
    """Arguments of Accelerate's constructor that are accepted only as None."""

    fsdp_plugin: Any
    deepspeed_plugin: Any
    deepspeed_plugins: Any
    megatron_lm_plugin: Any
    torch_tp_plugin: Any
    parallelism_config: Any


_FITS = (
    "Every rank holds the whole model here (DDP). To make it fit: mixed_precision='bf16' or 'fp16', "
    "gradient_accumulation_steps with a smaller batch, accelerator.gradient_checkpointing(model)."
)

_INSTEAD = {
    "fsdp_plugin": f"a model cannot be sharded over the ranks yet. {_FITS}",
    "deepspeed_plugin": f"DeepSpeed does not drive the training here yet. {_FITS}",
    "deepspeed_plugins": f"DeepSpeed does not drive the training here yet. {_FITS}",
    "megatron_lm_plugin": f"Megatron-LM does not drive the training here. {_FITS}",
    "torch_tp_plugin": f"a model's layers are not split over the ranks here. {_FITS}",
    "parallelism_config": (
        "ranks are replicas here, one dimension of num_processes, which is what dp_replicate_size alone asks for: "
        f"leave it out for that. {_FITS}"
    ),
}

_BY_VARIABLE = {
    "ACCELERATE_USE_FSDP": "fsdp_plugin",
    "ACCELERATE_USE_DEEPSPEED": "deepspeed_plugin",
    "ACCELERATE_USE_MEGATRON_LM": "megatron_lm_plugin",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}
"""Variables by which `accelerate launch` tells a program to use one of them."""


def refuse_plugins(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Check the constructor arguments that are not nbaccel's.

    known: the names of nbaccel's arguments, to suggest one for a mistyped name.

    Raises:
        NotImplementedError: an argument of Accelerate that has no counterpart here.
        TypeError: neither library has such an argument.

    >>> refuse_plugins({"fsdp_plugin": None}, ())
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
            NotImplementedError: a plugin that has no counterpart here, or a device.
    """
    for variable, name in _BY_VARIABLE.items():
        if parse_flag_from_env(variable):
            raise NotImplementedError(f"{variable}=true in the environment: {_INSTEAD[name]}")
    if device := parse_choice_from_env("ACCELERATE_TORCH_DEVICE", ""):
        raise NotImplementedError(
            f"ACCELERATE_TORCH_DEVICE={device} in the environment: each rank takes the device of its number here. "
            "Choose the GPUs that it sees with CUDA_VISIBLE_DEVICES, or the CPU with Accelerator(cpu=True)."
        )
