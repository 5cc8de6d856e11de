"""The time of a whole run, from the records that rank 0 of a dry run wrote. Used in the kernel; runs no code of a user.

The loops, branches and passes that were seen form a tree. The time of a loop is the number of its rounds times the sum
of what a round takes itself and what is inside of it; that of a branch is counted by its period. Seconds of a round
come from `round_seconds`, numbers of rounds from `round_counts`. The range says how far the mean of so few rounds may
be off, and the machine's noise. A loop whose number of rounds nobody knows has no forecast: `Forecast.unknown` says so.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbaccel.base.quantities import duration
from nbaccel.features.check.forecasts.loop_tree import (
    Node,
    is_cut,
    own_of_run,
    rounds_by_round,
    rounds_had,
    rounds_of_run,
    times_of,
    tree_of,
    with_inner_loops,
)
from nbaccel.features.check.forecasts.round_counts import (
    RoundCounter,
    as_in_whole_runs,
    counter_of,
    rounds_until,
    times_that_hold,
)
from nbaccel.features.check.forecasts.round_seconds import RoundSeconds, Sample, round_seconds
from nbaccel.features.check.forecasts.trainer_counts import EVALUATION, SAVE, TRAINING, TrainerCounts

__all__ = ["Forecast", "ForecastPart", "forecast", "loops_open_at_end", "measure_noise"]

_LEAST_WIDTH = 0.06
"""Half of the range, relative, that no measurement makes narrower: a run of hours drifts by some percent."""

_EARLY = 0.1
"""Part of its time by which a later round may be faster: a dry run has the first rounds of a program. Measured,
thirteen whole runs of 13 to 27 s on two CPU ranks took 0.79 to 1.0 of what their dry runs said, 0.92 in the mean."""

_WIDTH = 1.7
"""Half of the range in standard errors: nine of ten runs lie inside."""

_CHUNK_S = 0.1
"""Seconds of the computation that `measure_noise` repeats: shorter disturbances are seen in the rounds themselves."""

Record = Mapping[str, Any]
Samples = list[Sample]


@dataclass(frozen=True, slots=True)
class ForecastPart:
    """One loop, branch or pass.

    Args:
        rounds: The rounds of one run of it; None unknown.
        runs: How often the whole program runs it.
        seconds: In the whole program, without the parts inside of it.
        number: In the table; -1 for a pass.
        had: Rounds of it in the dry run, or runs of a branch.
    """

    rounds: float | None
    runs: float
    seconds: float
    number: int = -1
    had: float = 0.0
    is_branch: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """The time of a whole run.

    Args:
        low_s, high_s: The range, with set-up; `high_s` is None where the rounds of a loop are not known.
        parts: The longest first.
        unknown: A sentence for each loop whose rounds are not known.
        may_end_early: A sentence for each loop that may end before its last round.
    """

    low_s: float
    high_s: float | None
    parts: tuple[ForecastPart, ...] = ()
    unknown: tuple[str, ...] = ()
    may_end_early: tuple[str, ...] = ()

    def times(self, number: int, seen: int) -> float | None:
        """Return how often the whole program does what the dry run has done `seen` times in a loop or branch.

        Args:
            number: The number of the innermost one around it; None if that is unknown.
        """
        parts = [part for part in self.parts if part.number == number and part.had]  # one for each caller of it
        if not parts or any(part.rounds is None and not part.is_branch for part in parts):
            return None
        whole = sum(part.runs * (1.0 if part.rounds is None else part.rounds) for part in parts)
        return seen / sum(part.had for part in parts) * whole


def forecast(records: Iterable[Record], table: Sequence[Record], noise: float = 0.0) -> Forecast:
    """Return the time of the whole run.

    Args:
        records: Those of one rank, see `dry_run.loop_log`.
        table: See `dry_run.rewriting`.
        noise: The noise of the machine, see `measure_noise`.
    """
    reckoning = _Reckoning({entry["number"]: entry for entry in table})
    total = reckoning.of(tree_of(list(records)), 1.0) + _exactly(reckoning.once_s)
    low_s, high_s = total.range(noise)
    return Forecast(
        low_s,
        None if reckoning.unknown else high_s,
        tuple(sorted(reckoning.parts, key=lambda part: -part.seconds)),
        tuple(reckoning.unknown),
        tuple(reckoning.may_end_early),
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


# --- the sum -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Seconds: the least and the most that counts and faster rounds allow, and the variance of what was measured.

    Args:
        fastest_s, slowest_s: Those of rounds that are all like the fastest ones, or like the slowest ones, that were
            measured.
    """

    low_s: float
    high_s: float
    fastest_s: float
    slowest_s: float
    variance: float = 0.0

    def __add__(self, other: _Seconds) -> _Seconds:
        return _Seconds(
            self.low_s + other.low_s,
            self.high_s + other.high_s,
            self.fastest_s + other.fastest_s,
            self.slowest_s + other.slowest_s,
            self.variance + other.variance,
        )

    def times(self, low: float, high: float) -> _Seconds:
        return _Seconds(
            self.low_s * low,
            self.high_s * high,
            self.fastest_s * low,
            self.slowest_s * high,
            self.variance * ((low + high) / 2) ** 2,
        )

    def range(self, noise: float) -> tuple[float, float]:
        """Return where the range begins and where it ends; not beyond the fastest and the slowest rounds, and noise."""
        middle_s = (self.low_s + self.high_s) / 2
        least_s = _LEAST_WIDTH * middle_s
        margin_s = least_s + math.hypot(_WIDTH * math.sqrt(self.variance), noise * middle_s)
        fastest_s = min(self.fastest_s, self.low_s - least_s) / (1 + noise)
        slowest_s = max(self.slowest_s, self.high_s + least_s) * (1 + noise)
        return max(self.low_s - margin_s, fastest_s), min(self.high_s + margin_s, slowest_s)


class _Reckoning:
    """Adds up a tree.

    Attributes:
        once_s: Seconds of warm-up, which the whole run has once.
        parts, unknown, may_end_early: See `Forecast`.
    """

    def __init__(self, entries: Mapping[int, Mapping[str, Any]]) -> None:
        self._entries = entries
        self.once_s = 0.0
        self.parts: list[ForecastPart] = []
        self.unknown: list[str] = []
        self.may_end_early: list[str] = []

    def of(self, node: Node, times: float) -> _Seconds:
        """Return the seconds of one run of a node that the whole program runs `times` times."""
        if node.kind == "root":
            own_s = sum(run["own_s"] for run in node.runs)
            return _exactly(own_s) + self._inner(node, 1.0, times)
        if node.number == TRAINING:
            return self._of_training(node, times)
        if node.kind in ("branch", "trainer_part"):
            own = round_seconds([Sample(run["own_s"]) for run in node.runs], None)
            self._note(node, None, times, own.mean_s * times)
            return _seconds(own) + self._inner(node, 1.0, times)
        return self._of_rounds(node, times)

    def _of_training(self, node: Node, times: float) -> _Seconds:
        """Return the seconds of one training by a library."""
        total = _exactly(sum(run["own_s"] for run in node.runs) / len(node.runs))
        passes = [run for each in node.inner.values() if each.kind == "pass" for run in each.runs]
        batches = max((run["batches"] for run in passes if run["batches"]), default=None)
        counts = TrainerCounts.mean([TrainerCounts.of(run, batches) for run in node.runs])
        epochs_had = max(len(passes) / len(node.runs), 1.0)
        for inner in node.inner.values():
            seen = len(inner.runs) / len(node.runs)
            if inner.kind == "pass":
                count = counts.epochs * seen / epochs_had
                rounds = None if counts.batches is None else counts.batches / counts.epochs
                total += self._of_rounds(inner, times * count, batches or rounds).times(count, count)
                continue
            known = {EVALUATION: counts.evaluations, SAVE: counts.saves}.get(inner.number)
            count = seen * counts.epochs / epochs_had if known is None else known
            total += self.of(inner, times * count).times(count, count)
        return total

    def _of_rounds(self, node: Node, times: float, planned: float | None = None) -> _Seconds:
        """Return the seconds of one run of a loop or of a pass.

        Args:
            planned: Rounds of it; None where its runs say.
        """
        own = _own_of_pass(node) if node.kind == "pass" else _own_of_loop(node)
        if times <= len(node.runs) and not any(map(is_cut, node.runs)):  # it has run as it will
            own = RoundSeconds(sum(map(own_of_run, node.runs)) / max(sum(map(rounds_had, node.runs)), 1))
        self.once_s += own.warm_up_s
        known = self._rounds(node, times) if planned is None else planned
        rounds = sum(map(rounds_had, node.runs)) / len(node.runs) if known is None else known
        starts = [run["start_s"] for run in node.runs]
        start_s = sum(starts[1:] or starts) / len(starts[1:] or starts)
        self.once_s += max(0.0, starts[0] - start_s)
        inside = _seconds(own).times(rounds, rounds) + self._inner(node, rounds, times)
        if known is None:
            self.unknown.append(self._unknown(node, inside.high_s / max(rounds, 1)))
        else:
            self._find_early_end(node)
        self._note(node, known, times, (own.mean_s * rounds + start_s) * times)
        return _exactly(start_s) + inside

    def _inner(self, node: Node, rounds: float, times: float) -> _Seconds:
        """Return the seconds of what is inside of a node, for all rounds of one run."""
        total = _exactly(0.0)
        had = node.rounds_had()
        for inner in node.inner.values():
            held = self._share_of_branch(inner, times) if inner.kind == "branch" else None
            if held is not None:
                low = high = held * rounds
            else:
                low, high = times_of(inner, had, rounds)
            total += self.of(inner, times * (low + high) / 2).times(low, high)
        return total

    # --- numbers of rounds --------------------------------------------------------------------------------------

    def _rounds(self, node: Node, times: float) -> float | None:
        """Return the mean rounds of one run in the whole program; None if they are unknown."""
        numbers = [rounds_of_run(run) for run in node.runs]
        known = [number for number in numbers if number is not None]
        rounds = sum(known) / len(known) if len(known) == len(numbers) else None
        if node.kind == "pass" or not any(map(is_cut, node.runs)):
            return rounds
        for limit, counter, inner in self._limits(node):
            if inner is not None:  # an inner loop counts, and its end is that of this one
                in_a_round = self._rounds_inside(node, inner)
                limit = limit / in_a_round if in_a_round else limit
            elif not counter.restarts and times > 1:
                limit = max(1.0, limit / times)
            rounds = limit if rounds is None else min(rounds, limit)
        return rounds

    def _limits(self, node: Node) -> Iterator[tuple[float, RoundCounter, Node | None]]:
        """Yield for each comparison that ends a loop by a counter: the rounds, the counter, and the inner loop."""
        for holder in with_inner_loops(node):
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

    def _counter_and_limit(self, node: Node, number: Any) -> tuple[RoundCounter, str, float] | None:
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

    def _counter(self, node: Node, values: list[tuple[int, list[list[Any]]]]) -> RoundCounter | None:
        """Return the counter that values show, as it moves where no inner loop is cut; None if they do not move alike.

        Args:
            values: For each run of `node` its id, and its values, see `counter_of`.
        """
        for inner in with_inner_loops(node):
            if inner is node or not any(map(is_cut, inner.runs)):
                continue
            whole = self._rounds_inside(node, inner)
            done = rounds_by_round(node, inner)
            if whole and (moved := as_in_whole_runs([(run, done.get(run_id, {})) for run_id, run in values], whole)):
                return counter_of(moved)
        return counter_of([run for _, run in values])

    def _rounds_inside(self, node: Node, inner: Node) -> float:
        """Return the rounds that an inner loop has in one round of `node`, in the whole program."""
        rounds = self._rounds(inner, 1.0) or 0.0
        while inner is not node and inner.outer is not None:
            rounds *= sum(times_of(inner, inner.outer.rounds_had(), 1.0)) / 2
            inner = inner.outer
            if inner is not node and inner.kind == "loop":
                rounds *= self._rounds(inner, 1.0) or 0.0
        return rounds

    def _share_of_branch(self, node: Node, times: float) -> float | None:
        """Return how often a branch runs in one round of what is around it; None if it has no period.

        Args:
            times: How often the whole program runs what is around it.
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

    def _held(self, branch: Node, times: float) -> tuple[Node, float, float] | None:
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

    def _times_held(self, loop: Node, number: int, rounds: float, times: float) -> float:
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

    def _note(self, node: Node, rounds: float | None, times: float, seconds: float) -> None:
        is_branch = node.kind in ("branch", "trainer_part")
        self.parts.append(
            ForecastPart(
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

    def _unknown(self, node: Node, seconds: float) -> str:
        one = duration(seconds) if seconds >= 1 else f"{seconds:.2g} s"
        if node.kind == "pass":
            return f"the loader {node.runs[0]['name']} has no length: each batch takes {one}"
        if any(run["is_cut_by_pass"] for run in node.runs):
            return (
                f"the loop in {self._place(node.number)} ends with a loader that has no length: each round takes {one}"
            )
        if self._entries.get(node.number, {}).get("kind") == "for":
            return (
                f"the loop in {self._place(node.number)} goes over an iterator whose length is not known, and each "
                f"round takes {one}: a list, a range or accelerator.epochs has one"
            )
        return f"the loop in {self._place(node.number)} ends by a condition: each round takes {one}"

    def _find_early_end(self, node: Node) -> None:
        """Note comparisons that end a loop by no counter, as those of early stopping do."""
        if node.kind == "pass" or not any(map(is_cut, node.runs)):
            return
        for holder in with_inner_loops(node):
            for number in sorted({int(number) for run in holder.runs for number in run["compared"]}):
                entry = self._entries.get(number, {})
                if node.number not in entry.get("ends", ()):
                    continue
                numbers = {key for run in holder.runs for key in run["compared"] if int(key) == number}
                if self._counter_and_limit(holder, numbers.pop()) is None:
                    loop = self._place(node.number)
                    self.may_end_early.append(f"the loop in {loop} may end earlier, by {self._place(number)}")


def _exactly(seconds: float) -> _Seconds:
    return _Seconds(seconds, seconds, seconds, seconds)


def _seconds(own: RoundSeconds) -> _Seconds:
    later_s = own.mean_s * (1 - _EARLY)
    return _Seconds(later_s, own.mean_s, later_s * own.least, own.mean_s * own.most, own.error_s**2)


def _numbered(found: Mapping[Any, Any]) -> dict[int, Any]:
    """Return a mapping with its numbers as keys: JSON makes texts of them."""
    return {int(key): value for key, value in found.items()}


def _slow_counter(runs: list[list[list[Any]]]) -> RoundCounter | None:
    """Return the counter of two values, where more is not known: the period itself says that it counts."""
    for run in runs:
        for before, after in itertools.pairwise(run):
            if after[0] != before[0] and after[1] != before[1]:
                return RoundCounter(before[1], (after[1] - before[1]) / (after[0] - before[0]), before[0])
    return None


def _own_of_loop(node: Node) -> RoundSeconds:
    samples: list[Samples] = []
    for run in node.runs:
        kept = [Sample(own, waited, size, is_first) for own, waited, size, is_first in run["kept"] if own is not None]
        samples.append(kept[:-1] if run["end"] in ("left", "error") and len(kept) > 1 else kept)
    passes = [run["passes"] for run in node.runs]
    found = _own_of_runs(samples, passes)
    timed = sum(run["timed"] for run in node.runs)
    if timed > 2 * sum(map(len, samples)):  # a long loop, of which the first rounds alone were kept
        found = replace(found, mean_s=sum(run["own_s"] + run["waited_s"] for run in node.runs) / timed, warm_up_s=0.0)
    return found


def _own_of_pass(node: Node) -> RoundSeconds:
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
