"""The results of a map, for programs that ask for their class: `Answers`, and `Failed` where there is none. Anywhere.

It defines nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbaccel.features import module_of

if TYPE_CHECKING:
    from nbaccel.features.map import Answers, Failed
else:
    Answers, Failed = (getattr(module_of(__name__, "nbaccel.features.map"), name) for name in ("Answers", "Failed"))

__all__ = ["Answers", "Failed"]
