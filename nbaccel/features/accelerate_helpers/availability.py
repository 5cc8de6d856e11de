"""Checks of installed packages and devices, for programs that ask: ``accelerate.utils.imports``. Runs anywhere.

nbaccel itself does not use them: what it can do with a package is chosen by name and imported when used.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from nbaccel.features.accelerate_helpers.further_helpers import compare_versions, is_torch_version

_PACKAGES = {
    "is_aim_available": "aim",
    "is_amdsmi_available": "amdsmi",
    "is_boto3_available": "boto3",
    "is_clearml_available": "clearml",
    "is_comet_ml_available": "comet_ml",
    "is_dvclive_available": "dvclive",
    "is_lomo_available": "lomo_optim",
    "is_megatron_lm_available": "megatron",
    "is_msamp_available": "msamp",
    "is_numpy_available": "numpy",
    "is_pynvml_available": "pynvml",
    "is_pytest_available": "pytest",
    "is_sagemaker_available": "sagemaker",
    "is_schedulefree_available": "schedulefree",
    "is_swanlab_available": "swanlab",
    "is_timm_available": "timm",
    "is_torchao_available": "torchao",
    "is_torchdata_available": "torchdata",
    "is_tqdm_available": "tqdm",
    "is_trackio_available": "trackio",
    "is_transformer_engine_available": "transformer_engine",
    "is_triton_available": "triton",
}
"""Further functions that programs use, each with the package that it looks for."""

_UNKNOWN_DEVICES = ["hpu", "mlu", "musa", "neuron", "sdaa"]

__all__ = [
    *_PACKAGES,
    *(f"is_{device}_available" for device in _UNKNOWN_DEVICES),
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_bf16_available",
    "is_bnb_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_fp8_available",
    "is_fp16_available",
    "is_matplotlib_available",
    "is_mlflow_available",
    "is_mps_available",
    "is_npu_available",
    "is_pandas_available",
    "is_peft_available",
    "is_rich_available",
    "is_rocm_available",
    "is_tensorboard_available",
    "is_torch_xla_available",
    "is_torch_distributed_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
]


_INSTALLED = """Return whether the package {package} is installed; it is not imported.

Example:
    >>> has_{package} = {function}()
"""


@functools.cache
def _installed(package: str, name: str = "") -> Callable[[], bool]:
    @functools.cache
    def is_installed() -> bool:
        return importlib.util.find_spec(package) is not None

    is_installed.__qualname__ = is_installed.__name__ = name or f"is_{package}_available"  # pickle finds it by that
    is_installed.__doc__ = _INSTALLED.format(package=package, function=is_installed.__name__)
    return is_installed


is_4bit_bnb_available = is_8bit_bnb_available = _installed("bitsandbytes", "is_4bit_bnb_available")


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
    """Return whether torch sees a CUDA device.

    Example:
        >>> device = "cuda" if is_cuda_available() else "cpu"
    """
    return torch.cuda.is_available()


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether the package bitsandbytes is installed; it is not imported.

    Args:
        min_version: The lowest version that counts; None for any.

    Example:
        >>> has_bitsandbytes = is_bnb_available(min_version="0.43")
    """
    there = importlib.util.find_spec("bitsandbytes") is not None
    return there and (min_version is None or compare_versions("bitsandbytes", ">=", min_version))


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether torch can compute on an Apple GPU.

    Args:
        min_version: The lowest version of torch that counts.

    Example:
        >>> device = "mps" if is_mps_available() else "cpu"
    """
    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def is_rocm_available() -> bool:
    """Return whether this torch computes on AMD GPUs, and sees one.

    Example:
        >>> kind = "AMD" if is_rocm_available() else "another"
    """
    return torch.version.hip is not None and torch.cuda.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Return whether torch sees an Intel GPU.

    Args:
        check_device: Accepted as by Accelerate, without effect.

    Example:
        >>> device = "xpu" if is_xpu_available() else "cpu"
    """
    return torch.xpu.is_available()


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return _installed(_PACKAGES[name], name)
    if name in __all__:
        return _unknown_device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _unknown_device(check_device: bool = False) -> bool:
    """Return False: nbaccel does not know these devices.

    Args:
        check_device: Accepted as by Accelerate, without effect.

    Example:
        >>> from nbaccel.utils.imports import is_hpu_available
        >>> is_hpu_available()
        False
    """
    return False


def is_torch_distributed_available() -> bool:
    """Return whether this torch can form process groups.

    Example:
        >>> is_torch_distributed_available()
        True
    """
    return torch.distributed.is_available()


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return False: every prepared loader has a ``state_dict`` here, and torchdata is not used.

    Example:
        >>> is_torchdata_stateful_dataloader_available()
        False
    """
    return False


def is_fp16_available() -> bool:
    """Return True: float16 works on every device, with a gradient scaler.

    Example:
        >>> is_fp16_available()
        True
    """
    return True


def is_fp8_available() -> bool:
    """Return False: nbaccel does not compute in fp8.

    Example:
        >>> is_fp8_available()
        False
    """
    return False


def is_npu_available(check_device: bool = False) -> bool:
    """Return False: nbaccel does not know these devices.

    Args:
        check_device: Accepted as by Accelerate, without effect.

    Example:
        >>> is_npu_available()
        False
    """
    return False


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether the package torch_xla is installed; it is not imported.

    Args:
        check_is_tpu, check_is_gpu: Accepted as by Accelerate, without effect.

    Example:
        >>> has_torch_xla = is_torch_xla_available()
    """
    return importlib.util.find_spec("torch_xla") is not None


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the device that this process would compute on supports bfloat16 natively. Makes a CUDA context.

    Args:
        ignore_tpu: Accepted as by Accelerate, without effect.

    Example:
        >>> mixed_precision = "bf16" if is_bf16_available() else "no"
    """
    return torch.cuda.is_bf16_supported(including_emulation=False) if torch.cuda.is_available() else True
