"""Names of ``accelerate.accelerator``, for programs that import from there. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.train.accelerator import Accelerator
from nbaccel.train.step.accumulation import GradientAccumulationPlugin

__all__ = ["Accelerator", "GradientAccumulationPlugin"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
