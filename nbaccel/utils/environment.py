"""Names that programs import from ``accelerate.utils.environment``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.train.step.environment import clear_environment, patch_environment

__all__ = ["clear_environment", "patch_environment"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
