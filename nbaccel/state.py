"""Names that programs import from ``accelerate.state``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.train.distributed.partial_state import AcceleratorState, PartialState, is_initialized
from nbaccel.train.prepare.contexts import GradientState

__all__ = ["AcceleratorState", "GradientState", "PartialState", "is_initialized"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
