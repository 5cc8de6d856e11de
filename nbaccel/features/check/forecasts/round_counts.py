"""The rounds that loops of the whole run will have, and how often periodic parts run. Used in the kernel; arithmetic.

A counter is a value that moves by the same amount in each round. Where it counts the batches of an inner loop, which
the dry run has cut, it moves faster in the whole run. Values that move otherwise, such as a loss or the rounds without
progress, foretell nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RoundCounter", "as_in_whole_runs", "counter_of", "rounds_until", "times_that_hold"]

Record = Mapping[str, Any]

_MOST_ROUNDS = 100_000
"""Rounds of which each one is asked whether a period holds; of longer loops, these are taken for all."""

_ROUNDING = 1e-9

_LEAST_INNER = 2
"""Rounds of an inner loop from which on a counter of them differs from one of the rounds around it."""


@dataclass(frozen=True, slots=True)
class RoundCounter:
    """A value that moves by `step` in each round.

    Args:
        first: Its value in round `first_round` (1-based).
        is_late: It is looked at after the round has drawn or stepped.
        restarts: It begins anew with each run of its loop; otherwise it goes on counting.
    """

    first: float
    step: float
    first_round: int
    is_late: bool = False
    restarts: bool = True


def as_in_whole_runs(
    runs: Sequence[tuple[Sequence[Sequence[Any]], Mapping[int, int]]], whole: float
) -> list[list[list[Any]]] | None:
    """Return the values of a counter as they would be without cuts; None if it does not count an inner loop's rounds.

    Args:
        runs: For each run its values, see `counter_of`, and how many rounds the inner loop has had in each of its
            rounds.
        whole: Rounds of the inner loop in a round of the whole run.

    Example:
        >>> as_in_whole_runs([([[1, 3, True], [2, 9, True]], {1: 3, 2: 6})], 100)
        [[[1, 100.0, True], [2, 200.0, True]]]
    """
    told = [[(value, _had_until(value, had)) for value in values] for values, had in runs]
    moves = [
        (after[0][1] - before[0][1], after[1][0] - before[1][0])
        for run in told
        for before, after in itertools.pairwise(run)
        if after[1] != before[1]
    ]
    if not moves or any(not counted for _, counted in moves):
        return None
    each = moves[0][0] / moves[0][1]
    # a counter of the rounds themselves moves by one, as that of an inner loop of one round would
    is_inner = each and each.is_integer() and all(moved == each * counted for moved, counted in moves)
    if not is_inner or min(counted for _, counted in moves) < _LEAST_INNER:
        return None
    return [
        [[value[0], value[1] + each * (whole * rounds - counted), *value[2:]] for value, (counted, rounds) in run]
        for run in told
    ]


def _had_until(value: Sequence[Any], had: Mapping[int, int]) -> tuple[int, int]:
    """Return the rounds of the inner loop, and of the loop itself, that were over when a value was looked at."""
    is_late = bool(value[2]) if len(value) > 2 else False
    rounds = value[0] if is_late else value[0] - 1
    return sum(count for at, count in had.items() if at <= rounds), rounds


def counter_of(runs: Sequence[Sequence[Sequence[Any]]]) -> RoundCounter | None:
    """Return the counter that the values of all runs of a loop show; None if they do not move alike.

    Args:
        runs: For each run [round, value] in their order; a third entry says whether the round had acted before.
    """
    runs = [run for run in runs if run]
    if not runs:
        return None
    moves = [
        (after[1] - before[1]) / (after[0] - before[0])
        for run in runs
        for before, after in itertools.pairwise(run)
        if after[0] != before[0]
    ]
    first = runs[0][0]
    is_late = bool(first[2]) if len(first) > 2 else False
    restarts = len(runs) == 1 or all(run[0][1] == first[1] for run in runs[1:] if run[0][0] == first[0])
    if not moves:
        return None
    step = moves[0]
    if not step or any(abs(move - step) > _ROUNDING * abs(step) for move in moves):
        return None
    if len(moves) < 2 and not _begins_as_a_counter(first, step, is_late):
        return None
    return RoundCounter(first[1], step, first[0], is_late, restarts)


def _begins_as_a_counter(first: Sequence[Any], step: float, is_late: bool) -> bool:
    """Return whether two values are those of a counter: rounds without progress may also go from 0 to 1."""
    value = first[1]
    return bool(value == (step * first[0] if is_late else step * (first[0] - 1)))


def rounds_until(counter: RoundCounter, op: str, limit: float, when: bool, is_test: bool) -> float | None:
    """Return the rounds that a loop has until ``counter op limit`` is `when`; None if that never comes.

    Args:
        is_test: The comparison is the test of a `while`, before a round; else it is inside of the body.

    Example:
        >>> rounds_until(RoundCounter(0, 1, 1), "<", 1000, when=False, is_test=True)
        1000.0
        >>> rounds_until(RoundCounter(1, 1, 1, is_late=True), ">=", 10, when=True, is_test=False)  # at its end
        10.0
    """
    first, step = counter.first - limit, counter.step
    if op == "==":
        moves = -first / step
        if not when or moves < 0 or abs(moves - round(moves)) > _ROUNDING:
            return None
        moves = round(moves)
    else:
        rises = (op in (">", ">=")) is when  # the outcome comes for large values
        if (step > 0) is not rises:
            return None
        exact = -first / step
        is_strict = (op in (">", "<")) is when
        moves = math.floor(exact + _ROUNDING) + 1 if is_strict else math.ceil(exact - _ROUNDING)
        moves = max(moves, 0)
    ends_in = counter.first_round + moves
    return float(ends_in if counter.is_late and not is_test else ends_in - 1)


def times_that_hold(counter: RoundCounter | None, period: int, remainder: int, rounds: float) -> float:
    """Return in how many of `rounds` rounds ``counter % period == remainder``; on average if it goes on counting.

    Example:
        >>> times_that_hold(RoundCounter(0, 1, 1), 5, 0, 12)
        3.0
    """
    if not period:
        return 0.0
    if counter is None or not float(counter.step).is_integer() or not float(counter.first).is_integer():
        return rounds / abs(period)
    first, step = int(counter.first), int(counter.step)
    if not counter.restarts:
        common = math.gcd(step, period)
        return rounds * common / abs(period) if (first - remainder) % common == 0 else 0.0
    asked = min(math.ceil(rounds), _MOST_ROUNDS)
    first -= step * (counter.first_round - 1)
    held = sum((first + step * each) % period == remainder for each in range(counter.first_round - 1, asked))
    return held * rounds / asked if asked < rounds else float(held)
