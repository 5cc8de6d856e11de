"""The face of the launchers: names that programs import from ``accelerate.launchers``. It defines nothing."""

from __future__ import annotations

from nbaccel.launch.functions import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
