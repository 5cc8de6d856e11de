"""The tree of the loops, branches and passes that a dry run has seen, with all their runs. Used in the kernel; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Node",
    "is_cut",
    "own_of_run",
    "rounds_by_round",
    "rounds_had",
    "rounds_of_run",
    "times_of",
    "tree_of",
    "with_inner_loops",
]

Record = Mapping[str, Any]

_KINDS = ("loop", "branch", "pass", "trainer_part")


@dataclass(slots=True)
class Node:
    """A loop, a branch or a pass at one place of the program, with all its runs of the dry run.

    Args:
        kind: "root", "loop", "branch", "pass" or "trainer_part".
        number: The number of its entry in the table; -1 for a pass.
    """

    kind: str
    number: int = -1
    runs: list[Record] = field(default_factory=list)
    inner: dict[Any, Node] = field(default_factory=dict)
    outer: Node | None = None

    def rounds_had(self) -> float:
        """Return in how many rounds what is inside could have run."""
        return sum(self.rounds_of(run) for run in self.runs)

    def rounds_of(self, run: Record) -> int:
        """Return in how many rounds of one run what is inside could have run: not in one that was left before it."""
        if self.kind != "loop":
            return 1
        began = {(each["outer"], each["outer_round"]) for node in self.inner.values() for each in node.runs}
        was_left = run["end"] in ("left", "error") and (run["id"], run["rounds"]) not in began
        return rounds_had(run) - was_left


def tree_of(records: list[Record]) -> Node:
    """Return the root. Records come when something ends, so that those of inner parts come first."""
    spans = {each["id"]: each for each in records if each["kind"] in _KINDS}
    root = Node("root", runs=[each for each in records if each["kind"] == "root"])
    nodes: dict[int, Node] = {}

    def node_of(record: Record) -> Node:
        if record["id"] not in nodes:
            above = spans.get(record["outer"])
            outer = root if above is None else node_of(above)
            key = record["kind"], record.get("number", record.get("place"))
            nodes[record["id"]] = outer.inner.setdefault(
                key, Node(record["kind"], record.get("number", -1), outer=outer)
            )
        return nodes[record["id"]]

    for number in sorted(spans):  # in the order in which they began
        node_of(spans[number]).runs.append(spans[number])
    return root


def with_inner_loops(node: Node) -> Iterator[Node]:
    if node.kind == "loop":
        yield node
    for inner in node.inner.values():
        yield from with_inner_loops(inner)


def rounds_by_round(node: Node, inner: Node) -> dict[int, dict[int, int]]:
    """Return for each run of a loop, by its id, the rounds that an inner loop has had in each of its rounds."""
    found: dict[int, dict[int, int]] = {run["id"]: {} for run in node.runs}
    between: dict[int, Record] = {}
    above = inner.outer
    while above is not None and above is not node:
        between.update({run["id"]: run for run in above.runs})
        above = above.outer
    for run in inner.runs:
        place = run
        while place["outer"] not in found:
            place = between[place["outer"]]
        rounds = found[place["outer"]]
        rounds[place["outer_round"]] = rounds.get(place["outer_round"], 0) + run["rounds"]
    return found


def times_of(inner: Node, had: float, rounds: float) -> tuple[float, float]:
    """Return the least and the most runs of a loop inside of another one, in `rounds` rounds of the outer one.

    A loop that ran in only some of the rounds seen depends on a condition. In the rounds to come the condition may
    never hold, or always. The exception is a loop that ran in every round after its first one, as a training does once
    enough data have been collected: it is expected to run in all further rounds.
    """
    if not had:
        return rounds, rounds
    in_rounds: int = len({(run["outer"], run["outer_round"]) for run in inner.runs})
    each = len(inner.runs) / max(in_rounds, 1)
    if in_rounds >= had:
        return each * rounds, each * rounds
    if (before := _rounds_before(inner)) is not None:
        return each * max(rounds - before, 1), each * max(rounds - before, 1)
    return min(each * in_rounds, each * rounds), each * rounds


def _rounds_before(inner: Node) -> float | None:
    """Return the rounds of a run around it before something ran in each round; None if it did not."""
    assert inner.outer is not None
    before: list[int] = []
    for run in inner.outer.runs:
        rounds = sorted({each["outer_round"] for each in inner.runs if each["outer"] == run.get("id", 0)})
        if len(rounds) < 2 or len(rounds) != inner.outer.rounds_of(run) - rounds[0] + 1:
            return None
        before.append(rounds[0] - 1)
    return sum(before) / len(before)


def rounds_had(run: Record) -> int:
    return int(run["count"] if run["kind"] == "pass" else run["rounds"])


def is_cut(run: Record) -> bool:
    return bool(run["is_cut"] if run["kind"] == "pass" else run["end"] == "cut" or run["is_cut_by_pass"])


def own_of_run(run: Record) -> float:
    return float(run["seconds"] - run["start_s"] if run["kind"] == "pass" else run["own_s"] + run["waited_s"])


def rounds_of_run(run: Record) -> float | None:
    """Return the rounds that a run of a loop or of a pass would have had; None if they are unknown."""
    if not is_cut(run):
        return rounds_had(run)
    totals = [run.get("total")]
    if run["kind"] == "pass":
        totals = [run["batches"]]
    elif run["is_cut_by_pass"]:
        totals += [each["batches"] for each in run["passes"]]
    return min((total for total in totals if total is not None), default=None)
