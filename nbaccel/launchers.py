"""Names that programs import from ``accelerate.launchers``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.base.missing_names import missing_from
from nbaccel.launching.accelerate_launchers import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
