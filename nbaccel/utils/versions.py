"""Versions of installed packages, compared: ``accelerate.utils.versions``. Runs anywhere."""

from __future__ import annotations

import importlib.metadata

import torch
from torch.torch_version import TorchVersion

from nbaccel.base.missing_names import missing_from
from nbaccel.utils.constants import STR_OPERATION_TO_FUNC

__all__ = [
    "compare_versions",
    "is_torch_version",
]


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


__getattr__ = missing_from(__name__, "nbaccel.utils")
