"""Names that programs import from ``accelerate.utils.dataclasses``. This module defines nothing."""

from __future__ import annotations

from nbaccel.missing_names import missing_from
from nbaccel.tracking import LoggerType
from nbaccel.train.accumulation import GradientAccumulationPlugin
from nbaccel.train.compiling import TorchDynamoPlugin
from nbaccel.train.data import DataLoaderConfiguration
from nbaccel.train.distributed_type import DistributedType
from nbaccel.train.handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from nbaccel.train.precision_type import PrecisionType
from nbaccel.train.project import ProjectConfiguration
from nbaccel.train.seeding import RNGType

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
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

__getattr__ = missing_from(__name__, "nbaccel.utils")
