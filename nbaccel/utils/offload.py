"""Folders of offloaded weights, for programs that write them: ``accelerate.utils.offload``. It defines nothing.

Runs anywhere.
"""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = ["load_offloaded_weight", "offload_state_dict", "offload_weight", "save_offload_index"]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.big_models.offload_folder import (
        load_offloaded_weight,
        offload_state_dict,
        offload_weight,
        save_offload_index,
    )
