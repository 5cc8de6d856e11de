"""Two switches of FSDP's loading: ``accelerate.utils.fsdp_utils``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import ONE_DEVICE, missing_from
from nbaccel.features import shown_by

__all__ = ["disable_fsdp_ram_efficient_loading", "enable_fsdp_ram_efficient_loading"]

__getattr__ = missing_from(__name__, "nbaccel.utils", instead=ONE_DEVICE)

with shown_by(__name__):
    from nbaccel.features.sharded.fsdp_options import (
        disable_fsdp_ram_efficient_loading,
        enable_fsdp_ram_efficient_loading,
    )
