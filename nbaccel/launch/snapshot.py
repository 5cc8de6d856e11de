"""Snapshot: the state of one rank when its run ended badly, as plain text. Written in ranks, read in the kernel.

It is sent in the rank's report as JSON, so it can be read when no process of the run is left, and keeps no tensor
alive. `launch.rank.look` takes it, and the notebook compares those of the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["LIMIT_BYTES", "Call", "Scene", "Snapshot", "Value"]

LIMIT_BYTES = 200_000
"""Largest size of the snapshot of one rank."""


class Value(NamedTuple):
    """One name of the user's.

    form: type and size, "int64 (7,) on cpu, 56 B"; it should be the same on all ranks.
    text: a short repr of plain data, empty for other values.  flaw: "NaN", "NaN in fc.weight", empty if none was seen.
    """

    name: str
    form: str
    text: str = ""
    flaw: str = ""


class Scene(NamedTuple):
    """One frame of a rank's Python stack.

    source: its line as the rank saw it.  is_users: it belongs to no library.  values: the names that its code uses.
    """

    file: str
    line: int
    function: str
    source: str
    is_users: bool = True
    values: Sequence[Value] = ()


class Call(NamedTuple):
    """A collective of the project that the rank entered, and the line of the user's that called it.

    file: empty if no line of the user's is above it, as in a thread of the project.
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
        """Return JSON of at most `limit_bytes`; if that is too little, names of the outermost frames are dropped first.

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
