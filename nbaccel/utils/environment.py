"""The face of ``accelerate.utils.environment``, for programs that import from there. It defines nothing."""

from __future__ import annotations

from nbaccel.missing_names import missing_from
from nbaccel.train.environment import clear_environment, patch_environment

__all__ = ["clear_environment", "patch_environment"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
