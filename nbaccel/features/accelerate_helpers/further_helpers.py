"""Helpers of which a module of ``accelerate.utils`` has one or two: memory, versions, a bar, precisions.

Run anywhere.
"""

from __future__ import annotations

import gc
import importlib.metadata
import operator
from enum import StrEnum
from typing import Any

import torch
from torch.torch_version import TorchVersion

from nbaccel.base.failures import can_retry
from nbaccel.train.distributed.partial_state import current_world

__all__ = [
    "STR_OPERATION_TO_FUNC",
    "PrecisionType",
    "clear_device_cache",
    "compare_versions",
    "is_torch_version",
    "should_reduce_batch_size",
    "tqdm",
]

STR_OPERATION_TO_FUNC = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
"""Relations by the names that `accelerate.utils.constants` has for them."""


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


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an error says that memory ran out, so that a smaller batch may help.

    Args:
        exception: The error.

    Example:
        >>> should_reduce_batch_size(torch.OutOfMemoryError("CUDA out of memory"))
        True
    """
    return can_retry(exception)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Free the unused device memory that torch's allocator keeps, so that other processes can take it.

    Args:
        garbage_collection: Run Python's garbage collection first.

    Example:
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    for device in (torch.cuda, torch.xpu):
        if device.is_available():
            device.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Return whether a version stands in a relation to another one.

    Args:
        library_or_version: A package, whose installed version is compared, or a version itself.
        operation: One of ``>``, ``>=``, ``==``, ``!=``, ``<=``, ``<``.
        requirement_version: The version on the right side.

    Raises:
        ValueError: The relation is unknown.
        importlib.metadata.PackageNotFoundError: No such package is installed.

    Example:
        >>> compare_versions("torch", ">=", "2.0"), compare_versions("1.10.0", "<", "1.9")
        (True, False)
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"operation must be one of {', '.join(STR_OPERATION_TO_FUNC)}, got {operation!r}")
    text = str(library_or_version)
    version = text if text[:1].isdigit() else importlib.metadata.version(text)
    return bool(STR_OPERATION_TO_FUNC[operation](TorchVersion(version), requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version stands in a relation to another one; local parts such as ``+cpu`` are ignored.

    Args:
        operation: One of ``>``, ``>=``, ``==``, ``!=``, ``<=``, ``<``.
        version: The version on the right side.

    Example:
        >>> is_torch_version(">=", "2.0")
        True
    """
    return compare_versions(torch.__version__.partition("+")[0], operation, version)


def tqdm(*args: Any, main_process_only: bool = True, **options: Any) -> Any:
    """Return a progress bar of `tqdm.auto`, shown on the first rank of each machine.

    Args:
        main_process_only: False shows a bar on every rank.
        *args: Arguments of `tqdm.auto.tqdm`.
        **options: More of them.

    Example:
        >>> list(tqdm(range(2), disable=True))
        [0, 1]
    """
    from tqdm.auto import tqdm as bar

    if main_process_only and not current_world().is_local_main_process:
        options["disable"] = True
    return bar(*args, **options)
