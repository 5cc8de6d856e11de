"""Not here: ``accelerate.utils.ao``. An import from it says what to use instead. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import FP8, missing_from

__all__: list[str] = []

__getattr__ = missing_from(__name__, "nbaccel.utils", instead=FP8)
