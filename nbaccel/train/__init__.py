"""The Accelerator and its parts. Runs in ranks, under our launcher, under torchrun, or alone in a script.

Imports torch, `base` and the table of `features`; never `launching` or `notebook`.
"""

from __future__ import annotations

from nbaccel.train.accelerator import Accelerator
from nbaccel.train.distributed.partial_state import PartialState

__all__ = ["Accelerator", "PartialState"]
