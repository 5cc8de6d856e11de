"""Versions of installed packages, compared: ``accelerate.utils.versions``. It defines nothing. Runs anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = ["compare_versions", "is_torch_version"]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.further_helpers import compare_versions, is_torch_version
