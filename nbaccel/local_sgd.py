"""The name that programs import from ``accelerate.local_sgd``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = ["LocalSGD"]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.local_sgd.averaged_models import LocalSGD
