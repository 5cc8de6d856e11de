"""Names of ``accelerate.scheduler``, for programs that import from there. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.train.prepare.optimizer import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
