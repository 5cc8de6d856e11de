"""DistributedType: in one word, how the processes of a run work together. Pure; the word that programs compare."""

from __future__ import annotations

from enum import StrEnum

import torch

from nbaccel.world import World

__all__ = ["DistributedType"]


class DistributedType(StrEnum):
    """How the processes of a run work together; Accelerate's words, so that comparisons keep their meaning.

    Ours are NO (one process), MULTI_CPU, MULTI_GPU, MULTI_XPU (replicas on devices of that kind), FSDP, DEEPSPEED
    and XLA. The other names exist because programs ask for them, and are never true.

    >>> DistributedType.NO == "NO"
    True
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"

    @classmethod
    def of(cls, world: World, device: torch.device) -> DistributedType:
        """The type of replicas: what a run is whose strategy says nothing else."""
        if device.type == "xla":
            return cls.XLA
        if not world.is_distributed:
            return cls.NO
        return {"cuda": cls.MULTI_GPU, "xpu": cls.MULTI_XPU}.get(device.type, cls.MULTI_CPU)
