"""Compression of DDP's gradients, and explanations of two errors of DDP about parameters. Runs in ranks.

torch gives indices in its errors, since its reducer knows no names; here they become the parameters' names and the
remedy. Both errors occur on every rank that has the fault; this module only makes the errors and raises nothing itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from nbaccel.train.step.kwargs_handlers import (
    DDPCommunicationHookType as Hook,
    DistributedDataParallelKwargs,
)

__all__ = [
    "compress_gradients",
    "explain_twice_ready",
    "explain_unused",
]

_UNUSED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_TWICE = re.compile(r"Parameter at index (\d+).* has been marked as ready twice")
_SHOWN = 8


# The error's two causes: https://github.com/pytorch/pytorch/issues/57776.
def explain_unused(text: str, module: Module, reduced: Sequence[Any] = ()) -> RuntimeError | None:
    """Return the error for parameters that took no part in the loss; None where torch's `text` is about something else.

    Args:
        reduced: The parameters that DDP counts, in its order; by default those of `module` that are trained now.
    """
    if "Expected to have finished reduction in the prior iteration" not in text:
        return None
    names = _names_of(module, reduced) if reduced else _reduced_names(module)
    found = _UNUSED.search(text)
    unused = [names[int(index)] for index in found.group(1).split() if int(index) < len(names)] if found else []
    which = f"{len(unused)} of {len(names)} parameters ({_shortened(unused)})" if unused else "some parameters"
    return RuntimeError(
        f"{_here()}: {which} of {type(module).__name__} got no gradient in the last backward, and "
        "DDP still waits for them.\n"
        "  Use them in the loss, freeze them before prepare (requires_grad_(False)), or let DDP look for unused ones "
        "in every step:\n"
        "    Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])"
    )


def explain_twice_ready(error: RuntimeError, find: Callable[[], Iterable[Module]]) -> RuntimeError | None:
    """Return the error for a parameter whose gradient was complete twice; None where `error` is another one.

    Args:
        find: Returns the modules that might be meant, since torch does not say which. Not called for other errors.
    """
    text = str(error)
    if "Expected to mark a variable ready only once" not in text:
        return None
    found = _TWICE.search(text)
    index = int(found.group(1)) if found else -1
    names = [
        f"{_reduced_names(module)[index]} of {type(module).__name__}"
        for module in find()
        if 0 <= index < len(_reduced_names(module))
    ]
    which = " or ".join(names) or "a parameter"
    return RuntimeError(
        f"{_here()}: the gradient of {which} was complete twice in one backward, so DDP would "
        "reduce it twice.\n"
        "  The parameter is used again inside a checkpointed block, or outside of the model's forward. Checkpoint "
        "with use_reentrant=False; accelerator.gradient_checkpointing(model) does. If the graph is the same in every "
        "step:\n"
        "    Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])"
    )


def _here() -> str:
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def _reduced_names(module: Module) -> list[str]:
    """Return the parameters that DDP counts, in its order."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad and name not in ignored]


def _names_of(module: Module, parameters: Sequence[Any]) -> list[str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names.get(id(parameter), "one that is replaced") for parameter in parameters]


def _shortened(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


_WRAPPERS = {Hook.FP16: default_hooks.fp16_compress_wrapper, Hook.BF16: default_hooks.bf16_compress_wrapper}


def compress_gradients(
    module: DistributedDataParallel, options: DistributedDataParallelKwargs, device: torch.device
) -> None:
    """Register the hook that `options` name; without one, gradients are sent uncompressed.

    The hooks are torch's communication hooks, named as in `DDPCommunicationHookType`. They change numerics:
    half-precision hooks round the averaged gradient, PowerSGD (arXiv:1905.13727) sends a low-rank approximation with
    error feedback and keeps per-rank state, which checkpoints do not hold.

    Raises:
        ValueError: The process group's backend cannot run this hook.
    """
    chosen, wrapper = Hook(options.comm_hook), Hook(options.comm_wrapper)
    if chosen is Hook.NO and wrapper is not Hook.NO:
        raise ValueError(
            f"comm_wrapper={wrapper.value!r} wraps a comm_hook, and there is none: use comm_hook={wrapper.value!r}"
        )
    if chosen is Hook.NO:
        return
    state, hook = _hook(options)
    wrap = _WRAPPERS.get(wrapper)
    try:
        module.register_comm_hook(state, hook if wrap is None else wrap(hook))
    except TypeError as error:  # torch's error for a backend without bf16
        raise ValueError(
            f"comm_hook={chosen.value!r} does not work on {device.type} with the "
            f"{dist.get_backend()} backend ({error}). Use 'fp16' or 'power_sgd', or leave the hook out."
        ) from error


def _hook(options: DistributedDataParallelKwargs) -> tuple[Any, Any]:
    """Return the hook's state and function."""
    if options.comm_hook is Hook.FP16:
        return None, default_hooks.fp16_compress_hook
    if options.comm_hook is Hook.BF16:
        return None, default_hooks.bf16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # brings numpy, so only when chosen

    state = powerSGD_hook.PowerSGDState(None, **options.comm_state_option)
    if options.comm_hook is Hook.POWER_SGD:
        return state, powerSGD_hook.powerSGD_hook
    try:
        # torch 2.13's batched hook passes this function one matrix, and it asserts on three dimensions: the run would
        # end without a message at step `start_powerSGD_iter`, which is 1000.
        powerSGD_hook._orthogonalize(torch.eye(2, device="cpu"))
    except AssertionError:
        raise ValueError(
            f"comm_hook='batched_power_sgd' does not work in torch {torch.__version__}, whose hook fails at its first "
            "compressed step. Use 'power_sgd'."
        ) from None
    return state, powerSGD_hook.batched_powerSGD_hook
