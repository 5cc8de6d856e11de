"""DistributedType: names how the processes of a run work together. Pure; the value that programs compare."""

from __future__ import annotations

from enum import StrEnum

import torch

from nbaccel.world import World

__all__ = ["DistributedType"]


class DistributedType(StrEnum):
    """Kinds of cooperation between the processes of a run; Accelerate's names, so that comparisons keep their meaning.

    nbaccel uses NO (one process), MULTI_CPU, MULTI_GPU, MULTI_XPU (replicas on devices of that kind), FSDP, DEEPSPEED
    and XLA. The other names exist because programs compare with them; no run has them.

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
        """Return the type of replicas, which holds for a run whose strategy defines no other."""
        if device.type == "xla":
            return cls.XLA
        if not world.is_distributed:
            return cls.NO
        return {"cuda": cls.MULTI_GPU, "xpu": cls.MULTI_XPU}.get(device.type, cls.MULTI_CPU)
