"""Names that programs import from ``accelerate.utils.dataclasses``. This module defines nothing."""

from __future__ import annotations

from nbaccel.missing_names import missing_from
from nbaccel.tracking import LoggerType
from nbaccel.train.checkpoint.directory import ProjectConfiguration
from nbaccel.train.data import DataLoaderConfiguration
from nbaccel.train.distributed.process_control import DistributedType
from nbaccel.train.distributed.rng import RNGType
from nbaccel.train.precision_type import PrecisionType
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
