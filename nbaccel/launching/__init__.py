"""The package that starts, feeds, interrupts and reaps worker processes; it runs any torch code, ours or not.

The public function `nbaccel.launch` has the same name as this package, and Python keeps only one of them as an
attribute of `nbaccel`. So the package can be called, and calling it runs `nbaccel.launching.api.launch`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a function in ranks; see `nbaccel.launching.api.launch`."""
        from nbaccel.launching.api import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableRoom
