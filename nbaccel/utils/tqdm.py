"""Names that programs import from ``accelerate.utils.tqdm``. This module defines nothing."""

from __future__ import annotations

from nbaccel.missing_names import missing_from
from nbaccel.train.bars import tqdm

__all__ = ["tqdm"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
