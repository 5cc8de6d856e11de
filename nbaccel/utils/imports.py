"""Names that programs import from ``accelerate.utils.imports``. This module defines nothing."""

from __future__ import annotations

from nbaccel.missing_names import missing_from
from nbaccel.train.available import (
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

__all__ = [
    "is_bf16_available",
    "is_bnb_available",
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
    "is_torch_xla_available",
    "is_torchvision_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
]

__getattr__ = missing_from(__name__, "nbaccel.utils")
