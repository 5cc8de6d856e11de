"""The face of logging: names that programs import from ``accelerate.logging``. It defines nothing."""

from __future__ import annotations

from nbaccel.train.logs import RankLogger as MultiProcessAdapter, get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
