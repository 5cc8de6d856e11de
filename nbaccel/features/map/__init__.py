"""The files of a map: which items were asked, who works on which, and the answers. Used in the kernel and in ranks.

Processes go on with a map, work on it together and join its answers through these files alone: no rank talks to
another one. `MapJob` puts them together.
"""

from __future__ import annotations

from nbaccel.features.map.answer_list import Answers as Answers, Failed as Failed
from nbaccel.features.map.map_job import MapJob as MapJob

__all__ = ["Answers", "Failed", "MapJob"]
