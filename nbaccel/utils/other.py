"""Names that programs import from ``accelerate.utils.other``. This module defines nothing."""

from __future__ import annotations

from nbaccel.missing_names import missing_from
from nbaccel.train.functions import wait_for_everyone
from nbaccel.train.parallel import extract_model_from_parallel
from nbaccel.train.prepare.models import is_compiled_module
from nbaccel.train.saving import load, save

__all__ = [
    "extract_model_from_parallel",
    "is_compiled_module",
    "load",
    "save",
    "wait_for_everyone",
]

__getattr__ = missing_from(__name__, "nbaccel.utils")
