"""Names that programs import from ``accelerate.utils.versions``. This module defines nothing."""

from __future__ import annotations

from nbaccel.missing_names import missing_from
from nbaccel.train.versions import compare_versions, is_torch_version

__all__ = ["compare_versions", "is_torch_version"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
