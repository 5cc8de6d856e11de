"""The face of ``accelerate.utils.tqdm``, for programs that import from there. It defines nothing."""

from __future__ import annotations

from nbaccel.missing_names import missing_from
from nbaccel.train.bars import tqdm

__all__ = ["tqdm"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
