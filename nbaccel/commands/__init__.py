"""Not here: ``accelerate.commands``. An import from it says what to use instead. Runs in any process.

Imports `base`.
"""

from __future__ import annotations

from nbaccel.base.missing_names import LAUNCH, missing_from

__all__: list[str] = []

__getattr__ = missing_from(__name__, "nbaccel.utils", instead=LAUNCH)
