"""Answer of `%accelerate why`: the state of the ranks of a run that ended badly. Runs in the kernel.

It is made of the snapshots that the ranks left in their reports: it needs no process of the run, and no tensor is kept.
A rank that died, or that did not react to the interrupt, has left none, and the text says so. The answer begins with
the names that differ between the ranks (`differences`, pure).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbaccel.launching.diagnosis import PostMortem, list_of_ranks
from nbaccel.launching.ipc.reports import CollectiveCall, FrameSnapshot, StackSnapshot, ValueSummary

__all__ = [
    "Difference",
    "differences",
    "last_line",
    "why_report",
]

_MOST_DIFFERENCES = 6
_MOST_CALLS = 4

Naming = Callable[[str], str | None]


def why_report(post_mortem: PostMortem | None, cell_name: Naming) -> str:
    """Return the text: the suspects first, then the place of every rank, its last collectives, and all its names."""
    if post_mortem is None:
        return "nothing to explain: nothing has run in ranks yet, or the last run ended well."
    return "\n".join(_Text(post_mortem, cell_name).lines())


class _Text:
    """The lines of one answer."""

    def __init__(self, post_mortem: PostMortem, cell_name: Naming) -> None:
        self._of = post_mortem
        self._cell_name = cell_name
        self._world_size = len(post_mortem.fates)
        first = post_mortem.first
        self._order = sorted(range(self._world_size), key=lambda rank: (rank != first, rank))

    def lines(self) -> Iterator[str]:
        of = self._of
        yield f"{of.title} {of.end}{self._on()}: {of.headline}"
        found = differences(of.snapshots, of.first)
        if found:
            yield "to look at first:"
        yield from (self._difference(each) for each in found[:_MOST_DIFFERENCES])
        yield "where the ranks were:"
        yield from self._together(self._where(rank) for rank in self._order)
        calls = [(rank, self._calls(snapshot.calls)) for rank, snapshot in of.snapshots.items() if snapshot.calls]
        if calls:
            yield "their last collectives, the latest first:"
            yield from self._together(dict(calls).get(rank, "none") for rank in self._order)
        yield from self._names()

    def _on(self) -> str:
        if self._of.first is None:
            return ""
        if self._of.is_everyones:
            return f" on all {self._world_size} ranks"
        return f" on rank {self._of.first} of {self._world_size}"

    def _difference(self, each: Difference) -> str:
        groups: dict[str, list[int]] = {}
        for rank in self._order:
            if rank in each.values:
                groups.setdefault(_shown(each.values[rank]), []).append(rank)
        sides = [f"{self._who(sorted(ranks))}: {each.name} {shown}" for shown, ranks in groups.items()]
        return f"  {' | '.join([*sides, self._place(each.scene)])}"

    def _where(self, rank: int) -> str:
        snapshot, fate = self._of.snapshots.get(rank), self._of.fates[rank]
        line = None if snapshot is None else last_line(snapshot)
        if line is None or not line.line:
            return fate
        return f"{fate} at {self._place(line)}{f': {line.source}' if line.source else ''}"

    def _calls(self, calls: Iterable[CollectiveCall]) -> str:
        """Return the collectives, the latest first; repeated ones, as of a loop, once."""
        told = [
            f"{call.operation} at {self._named(call.file)}, line {call.line}" if call.file else call.operation
            for call in calls
        ][::-1]
        shown = list(dict.fromkeys(told))[:_MOST_CALLS]
        return "; ".join(f"{text} ({count} times)" if (count := told.count(text)) > 1 else text for text in shown)

    def _names(self) -> Iterator[str]:
        """Yield every rank's frames of the user's, with all names."""
        for rank in self._order:
            snapshot = self._of.snapshots.get(rank)
            scenes = [scene for scene in snapshot.scenes if scene.is_users] if snapshot is not None else []
            for scene in scenes:
                yield f"rank {rank}, {self._place(scene)}{f': {scene.source}' if scene.source else ''}"
                yield from (f"    {value.name}  {_shown(value)}" for value in scene.values)

    def _together(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield one line for ranks with the same text; `texts` is in the order in which ranks are shown."""
        groups: dict[str, list[int]] = {}
        for rank, text in zip(self._order, texts, strict=True):
            groups.setdefault(text, []).append(rank)
        yield from (f"  {self._who(sorted(ranks))}: {text}" for text, ranks in groups.items())

    def _who(self, ranks: list[int]) -> str:
        is_everyone = len(ranks) == self._world_size > 1
        return "all ranks" if is_everyone else list_of_ranks(ranks)

    def _place(self, scene: FrameSnapshot) -> str:
        inside = "" if scene.function == "<module>" else f", in {scene.function}"
        return f"{self._named(scene.file)}{f', line {scene.line}' if scene.line else ''}{inside}"

    def _named(self, file: str) -> str:
        return self._cell_name(file) or file


def _shown(value: ValueSummary) -> str:
    text = f"{value.form}{f' = {value.text}' if value.text else ''}"
    return f"{text}, holds {value.flaw}" if value.flaw else text


_Key = tuple[str, str, str]  # file, function, name

_OWN = re.compile(r"(^|_)(rank|process_index|seed)$")
"""Names that are meant to differ."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One name.

    Args:
        name: As in the program.
        scene: The frame of the rank that is shown first.
        values: By rank, for the ranks that had it.
        weight: The order, lightest first.
    """

    name: str
    scene: FrameSnapshot
    values: Mapping[int, ValueSummary]
    weight: tuple[int, str]


def differences(snapshots: Mapping[int, StackSnapshot], first: int | None) -> list[Difference]:
    """Return the suspect names, most suspect first: those that differ, are not finite or are on failing lines.

    Ranks run one program. So a difference between them at the moment of a failure is suspect, most of all on the line
    that failed: first come names there that differ or are not finite, last plain numbers, which may rightly differ.

    Args:
        first: The rank that failed first; None if none did.
    """
    seen: dict[_Key, dict[int, tuple[FrameSnapshot, ValueSummary]]] = {}
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


def last_line(snapshot: StackSnapshot) -> FrameSnapshot | None:
    """Return the innermost line of the user's."""
    return next((scene for scene in reversed(snapshot.scenes) if scene.is_users), None)


def _weight(values: Sequence[ValueSummary], is_on_line: bool, is_own: bool) -> int | None:
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
