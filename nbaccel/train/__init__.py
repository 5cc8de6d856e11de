"""The training package: runs in ranks, under our launcher, under torchrun, or alone in a script. Needs torch only."""

from __future__ import annotations

from nbaccel.train.accelerator import Accelerator
from nbaccel.train.distributed.partial_state import PartialState

__all__ = ["Accelerator", "PartialState"]
