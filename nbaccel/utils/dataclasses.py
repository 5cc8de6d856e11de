"""Choices and options as values: ``accelerate.utils.dataclasses``. Used anywhere."""

from __future__ import annotations

from enum import StrEnum

from nbaccel.base.missing_names import missing_from
from nbaccel.base.tracking import LoggerType
from nbaccel.features import shown_by
from nbaccel.train.checkpoint.directory import ProjectConfiguration
from nbaccel.train.data import DataLoaderConfiguration
from nbaccel.train.distributed.process_control import DistributedType
from nbaccel.train.distributed.rng import RNGType
from nbaccel.train.prepare.models import TorchDynamoPlugin
from nbaccel.train.step.accumulation import GradientAccumulationPlugin
from nbaccel.train.step.kwargs_handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TorchDynamoPlugin",
]


class PrecisionType(StrEnum):
    """Values that ``Accelerator(mixed_precision=…)`` takes; plain strings work as well.

    Example:
        >>> PrecisionType.BF16 in PrecisionType.list()
        True
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def list(cls) -> list[str]:
        """Return the names."""
        return [kind.value for kind in cls]


__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.sharded.fsdp_options import FullyShardedDataParallelPlugin
