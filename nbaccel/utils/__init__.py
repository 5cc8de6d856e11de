"""Names that programs import from ``accelerate.utils``. It defines nothing. Runs in any process.

`notebooks/03_accelerate_compatibility.ipynb` lists which of Accelerate's names are here, and what differs on purpose.
Imports `train`, `base` and the table of `features`.
"""

from __future__ import annotations

import nbaccel.utils.tqdm  # noqa: F401 - imported later, the module would take the place of the function
from nbaccel.base.missing_names import missing_from
from nbaccel.errors import CollectiveMismatch as DistributedOperationException
from nbaccel.features import shown_by
from nbaccel.train.checkpoint.directory import ProjectConfiguration
from nbaccel.train.checkpoint.model_weights import load_model
from nbaccel.train.data import DataLoaderConfiguration
from nbaccel.train.distributed.process_control import DistributedType
from nbaccel.train.distributed.rng import set_seed
from nbaccel.train.named_trackers import LoggerType
from nbaccel.train.oom.memory.free_memory import release_memory
from nbaccel.train.prepare.models import TorchDynamoPlugin, extract_model_from_parallel, is_compiled_module
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
    "DistributedOperationException",
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
    "broadcast",
    "broadcast_object_list",
    "clear_environment",
    "compare_versions",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "is_bf16_available",
    "is_bnb_available",
    "is_compiled_module",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_matplotlib_available",
    "is_mlflow_available",
    "is_mps_available",
    "is_npu_available",
    "is_pandas_available",
    "is_peft_available",
    "is_rich_available",
    "is_tensorboard_available",
    "is_torch_tensor",
    "is_torch_version",
    "is_torch_xla_available",
    "is_torchvision_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
    "listify",
    "load",
    "load_model",
    "pad_across_processes",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "slice_tensors",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]

__getattr__ = missing_from(
    __name__,
    "nbaccel.train.step.environment",
    "nbaccel.train.step.kwargs_handlers",
    "nbaccel.train.distributed.partial_state",
    "nbaccel.train.prepare.contexts",
    inside=(
        "constants",
        "dataclasses",
        "environment",
        "imports",
        "memory",
        "operations",
        "other",
        "modeling",
        "offload",
        "bnb",
        "deepspeed",
        "fsdp_utils",
    ),
)

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.availability import (
        is_bf16_available,
        is_bnb_available,
        is_cuda_available,
        is_datasets_available,
        is_deepspeed_available,
        is_matplotlib_available,
        is_mlflow_available,
        is_mps_available,
        is_npu_available,
        is_pandas_available,
        is_peft_available,
        is_rich_available,
        is_tensorboard_available,
        is_torch_xla_available,
        is_torchvision_available,
        is_transformers_available,
        is_wandb_available,
        is_xpu_available,
    )
    from nbaccel.features.accelerate_helpers.batch_operations import (
        broadcast,
        broadcast_object_list,
        concatenate,
        convert_outputs_to_fp32,
        convert_to_fp32,
        find_batch_size,
        gather,
        gather_object,
        is_torch_tensor,
        listify,
        pad_across_processes,
        recursively_apply,
        reduce,
        send_to_device,
        slice_tensors,
    )
    from nbaccel.features.accelerate_helpers.environment_blocks import clear_environment, patch_environment
    from nbaccel.features.accelerate_helpers.further_helpers import (
        PrecisionType,
        compare_versions,
        is_torch_version,
        tqdm,
    )
    from nbaccel.features.accelerate_helpers.shared_generators import (
        RNGType,
        synchronize_rng_state,
        synchronize_rng_states,
    )
    from nbaccel.features.accelerate_helpers.small_functions import load, save, wait_for_everyone, write_basic_config
with shown_by(__name__):
    from nbaccel.features.retry import find_executable_batch_size
with shown_by(__name__):
    from nbaccel.features.sharded.fsdp_options import FullyShardedDataParallelPlugin
