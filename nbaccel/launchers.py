"""Names that programs import from ``accelerate.launchers``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.features import shown_by

__all__ = ["debug_launcher", "notebook_launcher"]

__getattr__ = missing_from(__name__, "nbaccel.utils")

with shown_by(__name__):
    from nbaccel.features.accelerate_helpers.accelerate_launchers import debug_launcher, notebook_launcher
