"""Not here: ``accelerate.parallelism_config``. An import from it says what to use instead. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import ONE_DEVICE, missing_from

__all__: list[str] = []

__getattr__ = missing_from(__name__, "nbaccel.utils", instead=ONE_DEVICE)
