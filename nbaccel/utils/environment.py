"""Names that programs import from ``accelerate.utils.environment``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = ["clear_environment", "get_int_from_env", "patch_environment", "purge_accelerate_environment"]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.environment_blocks import (
        clear_environment,
        get_int_from_env,
        patch_environment,
        purge_accelerate_environment,
    )
