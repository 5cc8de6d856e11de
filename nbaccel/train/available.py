"""Available: which packages and devices are there, for programs that ask. Runs anywhere.

This house itself does not ask: what it can do with a package is chosen by name and imported when used.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch

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


def _installed(package: str) -> Callable[[], bool]:
    @functools.cache
    def is_installed() -> bool:
        return importlib.util.find_spec(package) is not None

    is_installed.__doc__ = f"Whether the package {package} is installed; it is not imported."
    return is_installed


is_bnb_available = _installed("bitsandbytes")
is_datasets_available = _installed("datasets")
is_deepspeed_available = _installed("deepspeed")
is_matplotlib_available = _installed("matplotlib")
is_mlflow_available = _installed("mlflow")
is_pandas_available = _installed("pandas")
is_peft_available = _installed("peft")
is_rich_available = _installed("rich")
is_tensorboard_available = _installed("tensorboard")
is_torchvision_available = _installed("torchvision")
is_transformers_available = _installed("transformers")
is_wandb_available = _installed("wandb")


def is_cuda_available() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def is_mps_available() -> bool:
    """Whether torch can compute on an Apple GPU."""
    return torch.backends.mps.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether torch sees an Intel GPU."""
    return torch.xpu.is_available()


def is_npu_available(check_device: bool = False) -> bool:
    """False: nbaccel does not know these devices."""
    return False


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether the package torch_xla is installed; it is not imported."""
    return importlib.util.find_spec("torch_xla") is not None


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether the device that this process would compute on knows bfloat16 by itself. Makes a CUDA context."""
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True
