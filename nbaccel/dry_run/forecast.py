"""The time of a whole run, from the records that rank 0 of a dry run wrote. Used in the kernel; runs no code of a user.

The loops, branches and passes that were seen form a tree. The time of a loop is the number of its rounds times the sum
of what a round takes itself and what is inside of it; that of a branch is counted by its period. Seconds of a round
come from `round_seconds`, numbers of rounds from `round_counts`. The range says how far the mean of so few rounds may
be off, and the machine's noise. A loop that ends by a condition has no forecast: `Forecast.unknown` says so.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbaccel.dry_run.rewriting import Table
from nbaccel.dry_run.round_counts import RoundCounter, as_in_whole_runs, counter_of, rounds_until, times_that_hold
from nbaccel.dry_run.round_seconds import RoundSeconds, Sample, round_seconds
from nbaccel.quantities import duration

__all__ = ["Forecast", "ForecastPart", "forecast", "loops_open_at_end", "measure_noise"]

_LEAST_WIDTH = 0.06
"""Half of the range, relative, that no measurement makes narrower: a run of hours drifts by some percent."""

_WIDTH = 1.7
"""Half of the range in standard errors: nine of ten runs lie inside."""

_ROUGH = 0.2
"""Half of the range, relative, above which a forecast is rough."""

_CHUNK_S = 0.1
"""Seconds of the computation that `measure_noise` repeats: shorter disturbances are seen in the rounds themselves."""

Record = Mapping[str, Any]
Samples = list[Sample]


@dataclass(frozen=True, slots=True)
class ForecastPart:
    """One loop, branch or pass.

    line: of the program; 0 unknown.  file: empty for the checked program.  head: its source text.
    rounds: of one run of it; None unknown.  runs: how often the whole program runs it.
    seconds: in the whole program, without the parts inside of it.
    number: in the table; -1 for a pass.  had: rounds of it in the dry run, or runs of a branch.
    """

    line: int
    file: str
    head: str
    rounds: float | None
    runs: float
    seconds: float
    number: int = -1
    had: float = 0.0
    is_branch: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """The time of a whole run.

    low_s, high_s: the range, with set-up; `high_s` is None where a loop ends by a condition.
    setup_s: until the first loop that trains or draws.
    parts: the longest first.  unknown: a sentence for each loop that ends by a condition.
    may_end_early: a sentence for each loop that may end before its last round.
    is_rough: the range is wider than 20 % to each side, as the rounds differed.
    ended_well: the dry run came to the end of the program.
    """

    low_s: float
    high_s: float | None
    setup_s: float
    parts: tuple[ForecastPart, ...] = ()
    unknown: tuple[str, ...] = ()
    may_end_early: tuple[str, ...] = ()
    is_rough: bool = False
    ended_well: bool = True

    def times(self, number: int, seen: int) -> float | None:
        """Return how often the whole program does what the dry run has done `seen` times in a loop or branch.

        number: of the innermost one around it.  None: that is unknown.
        """
        part = next((part for part in self.parts if part.number == number and part.had), None)
        if part is None or (part.rounds is None and not part.is_branch):
            return None
        return seen / part.had * part.runs * (1.0 if part.rounds is None else part.rounds)


def forecast(records: Iterable[Record], table: Table, noise: float = 0.0) -> Forecast:
    """Return the time of the whole run.

    records: those of one rank, see `nbaccel.dry_run.loop_log`.  table: of all rewritten code, see `rewrite`.
    noise: of the machine, see `measure_noise`.
    """
    kept = list(records)
    whole = next((each for each in kept if each["kind"] == "whole"), {})
    setup = next((each for each in kept if each["kind"] == "setup"), whole)
    reckoning = _Reckoning({entry["number"]: entry for entry in table})
    total = reckoning.of(_tree(kept), 1.0) + _Seconds(reckoning.once_s, reckoning.once_s)
    middle_s = (total.low_s + total.high_s) / 2
    margin_s = _LEAST_WIDTH * middle_s + math.hypot(_WIDTH * math.sqrt(total.variance), noise * middle_s)
    low_s, high_s = max(total.low_s - margin_s, 0.0), total.high_s + margin_s
    is_rough = high_s - low_s > _ROUGH * (high_s + low_s) * (1 + 1e-9)
    return Forecast(
        low_s,
        None if reckoning.unknown else high_s,
        setup.get("setup_s", setup.get("seconds", 0.0)),
        tuple(sorted(reckoning.parts, key=lambda part: -part.seconds)),
        tuple(reckoning.unknown),
        tuple(reckoning.may_end_early),
        is_rough,
        bool(whole.get("ended_well", False)),
    )


def loops_open_at_end(records: Iterable[Record]) -> list[int]:
    """Return the numbers of the loops that a rank was in when its records ended, the outermost first.

    It is empty where the program came to its end. A loop that has run before, and has not drawn or stepped this time,
    is not known.
    """
    began: dict[int, int] = {}
    for record in records:
        if record["kind"] == "loop_began":
            began[record["id"]] = record["number"]
        elif record["kind"] in ("loop", "loop_ended"):
            began.pop(record["id"], None)
    return [number for _, number in sorted(began.items())]


def measure_noise(seconds: float = 1.0, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the relative spread of a small computation that is always the same: half the distance of its deciles.

    It blocks for about `seconds`; call it before ranks start.
    """
    count, end = 2_000, clock() + seconds
    taken: list[float] = []
    while (began := clock()) < end or len(taken) < 2:
        _compute(count)
        took = clock() - began
        if took < _CHUNK_S / 2 and not taken:
            count *= 2
            continue
        taken.append(took)
    deciles = statistics.quantiles(taken, n=10, method="inclusive")
    return float((deciles[-1] - deciles[0]) / 2 / statistics.median(taken))


def _compute(count: int) -> int:
    total = 0
    for number in range(count):
        total += number * number
    return total


# --- the tree ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Node:
    """A loop, a branch or a pass at one place of the program, with all its runs of the dry run.

    kind: "root", "loop", "branch" or "pass".  number: of its entry in the table; -1 for a pass.
    """

    kind: str
    number: int = -1
    runs: list[Record] = field(default_factory=list)
    inner: dict[Any, _Node] = field(default_factory=dict)
    outer: _Node | None = None

    def rounds_had(self) -> float:
        """Return in how many rounds what is inside could have run."""
        return sum(self.rounds_of(run) for run in self.runs)

    def rounds_of(self, run: Record) -> int:
        """Return in how many rounds of one run what is inside could have run: not in one that was left before it."""
        if self.kind != "loop":
            return 1
        began = {(each["outer"], each["outer_round"]) for node in self.inner.values() for each in node.runs}
        was_left = run["end"] in ("left", "error") and (run["id"], run["rounds"]) not in began
        return _rounds_had(run) - was_left


def _tree(records: list[Record]) -> _Node:
    """Return the root. Records come when something ends, so that those of inner parts come first."""
    spans = {each["id"]: each for each in records if each["kind"] in ("loop", "branch", "pass")}
    root = _Node("root", runs=[each for each in records if each["kind"] == "root"])
    nodes: dict[int, _Node] = {}

    def node_of(record: Record) -> _Node:
        if record["id"] not in nodes:
            above = spans.get(record["outer"])
            outer = root if above is None else node_of(above)
            key = record["kind"], record.get("number", record.get("place"))
            nodes[record["id"]] = outer.inner.setdefault(
                key, _Node(record["kind"], record.get("number", -1), outer=outer)
            )
        return nodes[record["id"]]

    for number in sorted(spans):  # in the order in which they began
        node_of(spans[number]).runs.append(spans[number])
    return root


# --- the sum -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Seconds: the least and the most that counts allow, and the variance of what was measured."""

    low_s: float
    high_s: float
    variance: float = 0.0

    def __add__(self, other: _Seconds) -> _Seconds:
        return _Seconds(self.low_s + other.low_s, self.high_s + other.high_s, self.variance + other.variance)

    def times(self, low: float, high: float) -> _Seconds:
        return _Seconds(self.low_s * low, self.high_s * high, self.variance * ((low + high) / 2) ** 2)


class _Reckoning:
    """Adds up a tree.

    once_s: seconds of warm-up, which the whole run has once.  parts, unknown, may_end_early: see `Forecast`.
    """

    def __init__(self, entries: Mapping[int, Mapping[str, Any]]) -> None:
        self._entries = entries
        self.once_s = 0.0
        self.parts: list[ForecastPart] = []
        self.unknown: list[str] = []
        self.may_end_early: list[str] = []

    def of(self, node: _Node, times: float) -> _Seconds:
        """Return the seconds of one run of a node that the whole program runs `times` times."""
        if node.kind == "root":
            own_s = sum(run["own_s"] for run in node.runs)
            return _Seconds(own_s, own_s) + self._inner(node, 1.0, times)
        if node.kind == "branch":
            own = round_seconds([Sample(run["own_s"]) for run in node.runs], None)
            self._note(node, None, times, own.mean_s * times)
            return _seconds(own) + self._inner(node, 1.0, times)
        return self._of_rounds(node, times)

    def _of_rounds(self, node: _Node, times: float) -> _Seconds:
        """Return the seconds of one run of a loop or of a pass."""
        own = _own_of_pass(node) if node.kind == "pass" else _own_of_loop(node)
        if times <= len(node.runs) and not any(map(_is_cut, node.runs)):  # it has run as it will
            own = RoundSeconds(sum(map(_own_of_run, node.runs)) / max(sum(map(_rounds_had, node.runs)), 1))
        self.once_s += own.warm_up_s
        known = self._rounds(node, times)
        rounds = sum(map(_rounds_had, node.runs)) / len(node.runs) if known is None else known
        starts = [run["start_s"] for run in node.runs]
        start_s = sum(starts[1:] or starts) / len(starts[1:] or starts)
        self.once_s += max(0.0, starts[0] - start_s)
        inside = _seconds(own).times(rounds, rounds) + self._inner(node, rounds, times)
        if known is None:
            self.unknown.append(self._unknown(node, (inside.low_s + inside.high_s) / 2 / max(rounds, 1)))
        else:
            self._find_early_end(node)
        self._note(node, known, times, (own.mean_s * rounds + start_s) * times)
        return _Seconds(start_s, start_s) + inside

    def _inner(self, node: _Node, rounds: float, times: float) -> _Seconds:
        """Return the seconds of what is inside of a node, for all rounds of one run."""
        total = _Seconds(0.0, 0.0)
        had = node.rounds_had()
        for inner in node.inner.values():
            held = self._share_of_branch(inner, times) if inner.kind == "branch" else None
            if held is not None:
                low = high = held * rounds
            else:
                low, high = _times_of(inner, had, rounds)
            total += self.of(inner, times * (low + high) / 2).times(low, high)
        return total

    # --- numbers of rounds --------------------------------------------------------------------------------------

    def _rounds(self, node: _Node, times: float) -> float | None:
        """Return the mean rounds of one run in the whole program; None if they are unknown."""
        numbers = [_rounds_of_run(run) for run in node.runs]
        known = [number for number in numbers if number is not None]
        rounds = sum(known) / len(known) if len(known) == len(numbers) else None
        if node.kind == "pass" or not any(map(_is_cut, node.runs)):
            return rounds
        for limit, counter, inner in self._limits(node):
            if inner is not None:  # an inner loop counts, and its end is that of this one
                in_a_round = self._rounds_inside(node, inner)
                limit = limit / in_a_round if in_a_round else limit
            elif not counter.restarts and times > 1:
                limit = max(1.0, limit / times)
            rounds = limit if rounds is None else min(rounds, limit)
        return rounds

    def _limits(self, node: _Node) -> Iterator[tuple[float, RoundCounter, _Node | None]]:
        """Yield for each comparison that ends a loop by a counter: the rounds, the counter, and the inner loop."""
        for holder in _with_inner_loops(node):
            numbers = {number for run in holder.runs for number in run["compared"]}
            for number in sorted(numbers, key=int):
                entry = self._entries.get(int(number), {})
                if node.number not in entry.get("ends", ()):
                    continue
                found = self._counter_and_limit(holder, number)
                if found is None:
                    continue
                counter, op, limit = found
                until = rounds_until(counter, op, limit, entry["when"], entry["is_test"])
                if until is not None:
                    yield until, counter, None if holder is node else holder

    def _counter_and_limit(self, node: _Node, number: Any) -> tuple[RoundCounter, str, float] | None:
        """Return the side of a comparison that counts, the operator that compares it, and the other side."""
        runs = [(run["id"], run["compared"][number]) for run in node.runs if number in run["compared"]]
        op = runs[0][1]["op"]
        lefts = [(at, [[value[0], value[1], value[3]] for value in run["values"]]) for at, run in runs]
        rights = [(at, [[value[0], value[2], value[3]] for value in run["values"]]) for at, run in runs]
        for counting, other, way in ((lefts, rights, op), (rights, lefts, op.translate(str.maketrans("<>", "><")))):
            limits = {value[1] for _, run in other for value in run}
            if len(limits) == 1 and (counter := self._counter(node, counting)) is not None:
                return counter, way, limits.pop()
        return None

    def _counter(self, node: _Node, values: list[tuple[int, list[list[Any]]]]) -> RoundCounter | None:
        """Return the counter that values show, as it moves where no inner loop is cut; None if they do not move alike.

        values: for each run of `node` its id, and its values, see `counter_of`.
        """
        for inner in _with_inner_loops(node):
            if inner is node or not any(map(_is_cut, inner.runs)):
                continue
            whole = self._rounds_inside(node, inner)
            done = _rounds_by_round(node, inner)
            if whole and (moved := as_in_whole_runs([(run, done.get(run_id, {})) for run_id, run in values], whole)):
                return counter_of(moved)
        return counter_of([run for _, run in values])

    def _rounds_inside(self, node: _Node, inner: _Node) -> float:
        """Return the rounds that an inner loop has in one round of `node`, in the whole program."""
        rounds = self._rounds(inner, 1.0) or 0.0
        while inner is not node and inner.outer is not None:
            rounds *= sum(_times_of(inner, inner.outer.rounds_had(), 1.0)) / 2
            inner = inner.outer
            if inner is not node and inner.kind == "loop":
                rounds *= self._rounds(inner, 1.0) or 0.0
        return rounds

    def _share_of_branch(self, node: _Node, times: float) -> float | None:
        """Return how often a branch runs in one round of what is around it; None if it has no period.

        times: how often the whole program runs what is around it.
        """
        found = self._held(node, times)
        if found is None or node.outer is None:
            return None
        loop, held, rounds = found
        if loop is node.outer:
            return held / rounds
        around = self._held(node.outer, times) if node.outer.kind == "branch" else None
        if around is not None and around[0] is loop:
            return min(held / around[1], 1.0) if around[1] else 0.0
        if node.outer.kind == "branch":
            return None
        in_a_run = len(node.runs) / len({run["outer"] for run in node.runs})
        return held / rounds * in_a_run * len(node.outer.runs) / max(node.outer.rounds_had(), 1)

    def _held(self, branch: _Node, times: float) -> tuple[_Node, float, float] | None:
        """Return the loop whose rounds a branch counts, in how many of them it runs, and how many there are."""
        numbers = self._entries.get(branch.number, {}).get("every", ())
        loop = branch.outer
        while loop is not None:
            seen = [n for n in numbers if any(n in _numbered(run.get("every", {})) for run in loop.runs)]
            if seen:
                rounds = self._rounds(loop, times)
                return (loop, min(self._times_held(loop, n, rounds, times) for n in seen), rounds) if rounds else None
            loop = loop.outer
        return None

    def _times_held(self, loop: _Node, number: int, rounds: float, times: float) -> float:
        seen = [(run["id"], held) for run in loop.runs if (held := _numbered(run["every"]).get(number)) is not None]
        runs = [each["values"] for _, each in seen]
        period, remainder = seen[0][1]["period"], seen[0][1]["remainder"]
        counter = self._counter(loop, [(run_id, each["values"]) for run_id, each in seen]) or _slow_counter(runs)
        if counter is None or not counter.step:  # it counts rounds of a loop around this one
            return rounds / abs(period) if period else 0.0
        if counter.restarts and len(runs) == 1 and times > 1:
            counter = RoundCounter(counter.first, counter.step, counter.first_round, restarts=False)
        return times_that_hold(counter, period, remainder, rounds)

    # --- words --------------------------------------------------------------------------------------------------

    def _note(self, node: _Node, rounds: float | None, times: float, seconds: float) -> None:
        entry = self._entries.get(node.number, {})
        head = entry.get("head") or node.runs[0].get("name", "")
        is_branch = node.kind == "branch"
        self.parts.append(
            ForecastPart(
                entry.get("line", 0),
                entry.get("file", ""),
                head,
                rounds,
                times,
                seconds,
                -1 if node.kind == "pass" else node.number,
                len(node.runs) if is_branch else node.rounds_had(),
                is_branch,
            )
        )

    def _place(self, number: int) -> str:
        entry = self._entries.get(number, {})
        file = f" of {os.path.basename(entry['file'])}" if entry.get("file") else ""
        return f"line {entry.get('line', '?')}{file}"

    def _unknown(self, node: _Node, seconds: float) -> str:
        one = duration(seconds) if seconds >= 1 else f"{seconds:.2g} s"
        if node.kind == "pass":
            return f"the loader {node.runs[0]['name']} has no length: each batch takes {one}"
        if any(run["is_cut_by_pass"] for run in node.runs):
            return (
                f"the loop in {self._place(node.number)} ends with a loader that has no length: each round takes {one}"
            )
        return f"the loop in {self._place(node.number)} ends by a condition: each round takes {one}"

    def _find_early_end(self, node: _Node) -> None:
        """Note comparisons that end a loop by no counter, as those of early stopping do."""
        if node.kind == "pass" or not any(map(_is_cut, node.runs)):
            return
        for holder in _with_inner_loops(node):
            for number in sorted({int(number) for run in holder.runs for number in run["compared"]}):
                entry = self._entries.get(number, {})
                if node.number not in entry.get("ends", ()):
                    continue
                numbers = {key for run in holder.runs for key in run["compared"] if int(key) == number}
                if self._counter_and_limit(holder, numbers.pop()) is None:
                    loop = self._place(node.number)
                    self.may_end_early.append(f"the loop in {loop} may end earlier, by {self._place(number)}")


def _seconds(own: RoundSeconds) -> _Seconds:
    return _Seconds(own.mean_s, own.mean_s, own.error_s**2)


def _numbered(found: Mapping[Any, Any]) -> dict[int, Any]:
    """Return a mapping with its numbers as keys: JSON makes texts of them."""
    return {int(key): value for key, value in found.items()}


def _with_inner_loops(node: _Node) -> Iterator[_Node]:
    if node.kind == "loop":
        yield node
    for inner in node.inner.values():
        yield from _with_inner_loops(inner)


def _rounds_by_round(node: _Node, inner: _Node) -> dict[int, dict[int, int]]:
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


def _rounds_had(run: Record) -> int:
    return int(run["count"] if run["kind"] == "pass" else run["rounds"])


def _is_cut(run: Record) -> bool:
    return bool(run["is_cut"] if run["kind"] == "pass" else run["end"] == "cut" or run["is_cut_by_pass"])


def _own_of_run(run: Record) -> float:
    return float(run["seconds"] - run["start_s"] if run["kind"] == "pass" else run["own_s"] + run["waited_s"])


def _rounds_of_run(run: Record) -> float | None:
    """Return the rounds that a run of a loop or of a pass would have had; None if they are unknown."""
    if not _is_cut(run):
        return _rounds_had(run)
    totals = [run.get("total")]
    if run["kind"] == "pass":
        totals = [run["batches"]]
    elif run["is_cut_by_pass"]:
        totals += [each["batches"] for each in run["passes"]]
    return min((total for total in totals if total is not None), default=None)


def _times_of(inner: _Node, had: float, rounds: float) -> tuple[float, float]:
    """Return the least and the most runs of something inside of a node, in `rounds` of its rounds.

    What ran in some rounds only runs by a condition: that may hold no more, or always. If it ran in each round since
    its first one, as a training does once enough has been collected, it goes on.
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


def _rounds_before(inner: _Node) -> float | None:
    """Return the rounds of a run around it before something ran in each round; None if it did not."""
    assert inner.outer is not None
    before: list[int] = []
    for run in inner.outer.runs:
        rounds = sorted({each["outer_round"] for each in inner.runs if each["outer"] == run.get("id", 0)})
        if len(rounds) < 2 or len(rounds) != inner.outer.rounds_of(run) - rounds[0] + 1:
            return None
        before.append(rounds[0] - 1)
    return sum(before) / len(before)


def _slow_counter(runs: list[list[list[Any]]]) -> RoundCounter | None:
    """Return the counter of two values, where more is not known: the period itself says that it counts."""
    for run in runs:
        for before, after in itertools.pairwise(run):
            if after[0] != before[0] and after[1] != before[1]:
                return RoundCounter(before[1], (after[1] - before[1]) / (after[0] - before[0]), before[0])
    return None


def _own_of_loop(node: _Node) -> RoundSeconds:
    samples: list[Samples] = []
    for run in node.runs:
        kept = [Sample(own, waited, size, is_first) for own, waited, size, is_first in run["kept"] if own is not None]
        samples.append(kept[:-1] if run["end"] in ("left", "error") and len(kept) > 1 else kept)
    passes = [run["passes"] for run in node.runs]
    found = _own_of_runs(samples, passes)
    timed = sum(run["timed"] for run in node.runs)
    if timed > 2 * sum(map(len, samples)):  # a long loop, of which the first rounds alone were kept
        found = RoundSeconds(sum(run["own_s"] + run["waited_s"] for run in node.runs) / timed, found.error_s)
    return found


def _own_of_pass(node: _Node) -> RoundSeconds:
    samples = [
        [
            Sample(own, waited, size, at == 0)
            for at, (own, waited, _, size, _) in enumerate(run["handed"])
            if own is not None
        ]
        for run in node.runs
    ]
    return _own_of_runs(samples, [[run] for run in node.runs])


def _own_of_runs(samples: list[Samples], passes: list[list[Record]]) -> RoundSeconds:
    """Return the seconds of a round; the first run has warm-up if there are others, else its first round."""
    warming = len(samples[0]) if sum(map(len, samples[1:])) >= 2 else 1
    workers, made_s = _workers(itertools.chain(*passes))
    return round_seconds(list(itertools.chain(*samples)), _mean_size(passes), workers, made_s, warming)


def _mean_size(of_runs: Iterable[Iterable[Record]]) -> float | None:
    """Return the mean size of the batches of a round: the sum over loaders that are drawn from side by side."""
    sizes = [[each["mean_size"] for each in passes] for passes in of_runs if passes]
    if not sizes or any(size is None for beside in sizes for size in beside):
        return None
    return sum(map(sum, sizes)) / len(sizes)


def _workers(passes: Iterable[Record]) -> tuple[int, float | None]:
    passes = list(passes)
    made = [each["made_s"] for each in passes if each["made_s"] is not None]
    return max((each["workers"] for each in passes), default=0), sum(made) / len(made) if made else None
