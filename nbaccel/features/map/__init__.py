"""`nbaccel.map` and `Accelerator.map`: a function over many items, by ranks that do not wait for each other.

It hooks in as these two names. Processes go on with a map, work on it together and join its results through files
alone (`MapJob`): no rank talks to another one. Runs in the kernel and in ranks. May import every folder of the core,
and `features/source`.
"""

from __future__ import annotations

from nbaccel.features.map.answer_list import Answers as Answers, Failed as Failed
from nbaccel.features.map.map_job import MapJob as MapJob

__all__ = ["Answers", "Failed", "MapJob"]
