"""Choices and options as values: ``accelerate.utils.dataclasses``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by
from nbaccel.train.checkpoint.directory import ProjectConfiguration
from nbaccel.train.data import DataLoaderConfiguration
from nbaccel.train.distributed.process_control import DistributedType
from nbaccel.train.named_trackers import LoggerType
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
    "BaseEnum",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "EnumWithContains",
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


__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.enumerations import BaseEnum, DynamoBackend, EnumWithContains
    from nbaccel.features.accelerate_helpers.further_helpers import PrecisionType
    from nbaccel.features.accelerate_helpers.shared_generators import RNGType
with shown_by(__name__):
    from nbaccel.features.sharded.fsdp_options import FullyShardedDataParallelPlugin
