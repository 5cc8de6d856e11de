"""Names that programs import from ``accelerate.logging``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.train.logs import RankLogger as MultiProcessAdapter, get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
