"""Differences: the names that ranks of one run had in common, and the differences between them. Pure; in the kernel.

Ranks run one program. So a difference between them at the moment of a failure is suspect, most of all on the line that
failed: first come names there that differ or are not finite, last plain numbers, which may rightly differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbaccel.launch.snapshot import Scene, Snapshot, Value

__all__ = ["Difference", "differences", "last_line"]

_Key = tuple[str, str, str]  # file, function, name

_OWN = re.compile(r"(^|_)(rank|process_index|seed)$")
"""Names that are meant to differ."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One name.

    name: as in the program.  scene: the frame of the rank that is shown first.
    values: by rank, for the ranks that had it.  weight: the order, lightest first.
    """

    name: str
    scene: Scene
    values: Mapping[int, Value]
    weight: tuple[int, str]


def differences(snapshots: Mapping[int, Snapshot], first: int | None) -> list[Difference]:
    """Return the suspect names, most suspect first: those that differ, are not finite or are on failing lines.

    first: the rank that failed first; None if none did.
    """
    seen: dict[_Key, dict[int, tuple[Scene, Value]]] = {}
    for rank, snapshot in snapshots.items():
        for scene in snapshot.scenes:
            for value in scene.values:
                seen.setdefault((scene.file, scene.function, value.name), {})[rank] = (scene, value)
    lines = [last_line(snapshot) for rank, snapshot in snapshots.items() if first in (None, rank)]
    found = []
    for (file, function, name), by_rank in seen.items():
        values = {rank: value for rank, (_, value) in by_rank.items()}
        is_on_line = any(
            line is not None and (line.file, line.function) == (file, function) and _mentions(line.source, name)
            for line in lines
        )
        weight = _weight(list(values.values()), is_on_line, _OWN.search(name) is not None)
        if weight is not None:
            scene = by_rank[first if first in by_rank else min(by_rank)][0]
            found.append(Difference(name, scene, values, (weight, name)))
    return sorted(found, key=lambda each: each.weight)


def last_line(snapshot: Snapshot) -> Scene | None:
    """Return the innermost line of the user's."""
    return next((scene for scene in reversed(snapshot.scenes) if scene.is_users), None)


def _weight(values: Sequence[Value], is_on_line: bool, is_own: bool) -> int | None:
    """Return the weight of a name; None if it is not suspect."""
    has_flaw = any(value.flaw for value in values)
    differs = len({value.form for value in values}) > 1
    reasons: Iterator[bool] = iter([
        is_on_line and (has_flaw or differs),
        has_flaw,
        differs,
        is_on_line,
        len({value.text for value in values if value.form != "float"}) > 1 and not is_own,
        len({value.text for value in values}) > 1,
    ])  # fmt: skip
    return next((at for at, holds in enumerate(reasons) if holds), None)


def _mentions(source: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None
