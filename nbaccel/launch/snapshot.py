"""Snapshot: what one rank was doing when its run ended badly, as plain text. Written in ranks, read in the kernel.

It travels in the rank's report as JSON, so it can be read when no process of the run is left, and keeps no tensor
alive. How it is taken is `launch.rank.look`'s business, how ranks are compared the notebook's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["LIMIT_BYTES", "Call", "Scene", "Snapshot", "Value"]

LIMIT_BYTES = 200_000
"""What one rank may say at most."""


class Value(NamedTuple):
    """One name of the user's.

    form: what it is, "int64 (7,) on cpu, 56 B"; what should be alike on all ranks.
    text: a short repr of plain data, empty for all else.  flaw: "NaN", "NaN in fc.weight", empty where none was seen.
    """

    name: str
    form: str
    text: str = ""
    flaw: str = ""


class Scene(NamedTuple):
    """One frame of a rank's Python stack.

    source: its line as the rank saw it.  is_users: it is no library's.  values: the names that its code uses.
    """

    file: str
    line: int
    function: str
    source: str
    is_users: bool = True
    values: Sequence[Value] = ()


class Call(NamedTuple):
    """A collective of ours that the rank entered, and the line of the user's from where.

    file: empty if no line of the user's is above it, as in a thread of ours.
    """

    operation: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's stack, outermost frame first, and its last collectives, oldest first."""

    scenes: Sequence[Scene] = ()
    calls: Sequence[Call] = ()

    def to_json(self, limit_bytes: int = LIMIT_BYTES) -> dict[str, Any]:
        """As JSON of at most `limit_bytes`; names of the outermost frames go first where that is too little.

        >>> Snapshot([Scene("a.py", 3, "f", "g(x)")]).to_json()
        {'scenes': [Scene(file='a.py', line=3, function='f', source='g(x)', is_users=True, values=())], 'calls': []}
        """
        scenes, calls = list(self.scenes), list(self.calls)
        excess = len(json.dumps([scenes, calls])) - limit_bytes
        for at, scene in enumerate(scenes):
            if excess <= 0:
                break
            scenes[at] = scene._replace(values=())
            excess -= len(json.dumps(scene)) - len(json.dumps(scenes[at]))
        while excess > 0 and scenes:
            excess -= len(json.dumps(scenes.pop(0)))
        return {"scenes": scenes, "calls": calls}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Snapshot:
        scenes = [scene._replace(values=[Value(*value) for value in scene.values]) for scene in _scenes(data)]
        return cls(scenes, [Call(*call) for call in data["calls"]])


def _scenes(data: dict[str, Any]) -> list[Scene]:
    return [Scene(*scene) for scene in data["scenes"]]
