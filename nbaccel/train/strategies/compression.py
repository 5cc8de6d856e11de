"""Compression of DDP's gradients by torch's communication hooks, named as in `DDPCommunicationHookType`. In ranks.

They change numerics: half-precision hooks round the averaged gradient, PowerSGD (arXiv:1905.13727) sends a low-rank
approximation with error feedback and keeps per-rank state, which checkpoints do not hold.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from nbaccel.train.handlers import DDPCommunicationHookType as Hook, DistributedDataParallelKwargs

__all__ = ["compress_gradients"]

_WRAPPERS = {Hook.FP16: default_hooks.fp16_compress_wrapper, Hook.BF16: default_hooks.bf16_compress_wrapper}


def compress_gradients(
    module: DistributedDataParallel, options: DistributedDataParallelKwargs, device: torch.device
) -> None:
    """Register the hook that `options` name; without one, gradients are sent uncompressed.

    Raises:
        ValueError: the process group's backend cannot run this hook.
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
