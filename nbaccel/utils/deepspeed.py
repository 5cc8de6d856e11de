"""Names that programs import from ``accelerate.utils.deepspeed``; `features/deepspeed` defines them. Runs anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = ["DeepSpeedPlugin", "DummyOptim", "DummyScheduler", "HfDeepSpeedConfig"]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.deepspeed.plugin import DeepSpeedPlugin, DummyOptim, DummyScheduler, HfDeepSpeedConfig
