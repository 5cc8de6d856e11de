"""Names that programs import from ``accelerate.logging``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = ["MultiProcessAdapter", "get_logger"]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.rank_logging import RankLogger as MultiProcessAdapter, get_logger
