"""A progress bar for several ranks, shown once: ``accelerate.utils.tqdm``. It defines nothing.

Runs in ranks and scripts.
"""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = ["tqdm"]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.further_helpers import tqdm
