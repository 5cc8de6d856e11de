"""The results of a map, for programs that ask for their class: `Answers`, and `Failed` where there is none. Anywhere.

It defines nothing.
"""

from __future__ import annotations

from nbaccel.features import needed_by

__all__ = ["Answers", "Failed"]

with needed_by(__name__):
    from nbaccel.features.map import Answers, Failed
