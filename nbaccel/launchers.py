"""Names that programs import from ``accelerate.launchers``. It defines nothing. Used anywhere."""

from __future__ import annotations

from nbaccel.launch.accelerate_launchers import debug_launcher, notebook_launcher
from nbaccel.missing_names import missing_from

__all__ = ["debug_launcher", "notebook_launcher"]

__getattr__ = missing_from(__name__, "nbaccel.utils")
