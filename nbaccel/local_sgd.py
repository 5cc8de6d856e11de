"""The name that programs import from ``accelerate.local_sgd``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.train.local_sgd import LocalSGD

__all__ = ["LocalSGD"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
