"""The room that starts, feeds, interrupts and buries processes; it runs any torch code, ours or not.

The public function `nbaccel.launch` shares its name with this room, and Python keeps only one of them as an
attribute of `nbaccel`. So the room can be called, and calling it is `nbaccel.launch.functions.launch`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a function in ranks; see `nbaccel.launch.functions.launch`."""
        from nbaccel.launch.functions import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableRoom
