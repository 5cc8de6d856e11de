"""The harness: every contender of a row in shuffled turns, in fresh processes each round. Runs as the benchmark.

The machine's mood falls on all contenders alike: in each turn all of them run once, in random order and alone, and what
counts is the median over the turns of the ratio to raw in the same turn. "raw again" is raw against itself, the noise.
A contender whose result differs from raw's measured something else: its cell is refused. It prints nothing.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from benchmarks.party import Bout, ContenderFailed, Party, Sample
from benchmarks.targets import Ratio, Target

__all__ = ["AGAIN", "RAW", "Measured", "Row", "installed", "measure"]

RAW = "raw"
AGAIN = "raw again"

_TURNS_OF_RANKS = 60
"""So many tell of two ranks: they wait for each other, and for a core."""

Make = Callable[[], Bout]


@dataclass(frozen=True)
class Row:
    """One line of the comparison.

    contenders: by name, what makes its `Bout` in each of its ranks; "raw" is among them.
    units: of work in one turn, such as steps; times are told for one. turns: per round.
    judged: "cpu" where processor time tells, "wall" where waiting for others or for disks is the matter.
    targets: by contender, the ratio to raw that it should hold, or another target.
    tolerance: how far results may lie from raw's.
    """

    name: str
    contenders: Mapping[str, Make]
    units: int = 1
    unit: str = "us"
    world_size: int = 1
    turns: int = 10
    judged: str = "cpu"
    targets: Mapping[str, float | Target] = field(default_factory=dict)
    tolerance: float = 1e-5

    def __post_init__(self) -> None:
        if RAW not in self.contenders:
            raise ValueError(f"row {self.name!r} has no contender {RAW!r} to compare with")
        if self.judged not in ("cpu", "wall"):
            raise ValueError(f"row {self.name!r} is judged by {self.judged!r}; it must be 'cpu' or 'wall'")

    def target(self, contender: str) -> Target | None:
        """What it should hold, if anything."""
        told = self.targets.get(contender)
        return Ratio(told) if isinstance(told, float | int) else told

    @property
    def enough_turns(self) -> int:
        """How many it takes to say that a target is missed."""
        return 1 if self.world_size == 1 else _TURNS_OF_RANKS

    @property
    def all_contenders(self) -> dict[str, Make]:
        """Those of the row, and raw a second time."""
        return {RAW: self.contenders[RAW], AGAIN: self.contenders[RAW], **self.contenders}


@dataclass
class Measured:
    """What a row's turns took.

    samples: by contender, one per turn, for one unit. refused: by contender, why it has no numbers.
    """

    row: Row
    samples: dict[str, list[Sample]]
    refused: dict[str, str] = field(default_factory=dict)


def measure(row: Row, rounds: int = 3, seed: int = 0) -> Measured:
    """Run `row` for `rounds` rounds of fresh processes.

    Raises:
        ContenderFailed: raw itself failed.
    """
    measured = Measured(row, {name: [] for name in row.all_contenders})
    order = random.Random(seed)
    for _ in range(rounds):
        _run_round(measured, order)
    for name in measured.refused:
        del measured.samples[name]
    return measured


def _run_round(measured: Measured, order: random.Random) -> None:
    row = measured.row
    with ExitStack() as until_ended:
        parties: dict[str, Party] = {}

        def refuse(name: str, why: object) -> None:
            if name == RAW:
                raise ContenderFailed(f"row {row.name!r} cannot be compared with anything: {why}")
            measured.refused[name] = str(why)
            if name in parties:
                parties.pop(name).close()

        for name, make in row.all_contenders.items():
            if name in measured.refused:
                continue
            inherited = [end for party in parties.values() for end in party.connections]
            try:
                party = Party(name, make, row.world_size, inherited)
                until_ended.callback(party.close)
                parties[name] = party
                party.turn()  # the first turn allocates; what it led to is what the guard looks at
                _compare(parties[RAW], party, row.tolerance)
            except (ContenderFailed, _WrongResult) as error:
                refuse(name, error)
        for _ in range(row.turns):
            for name in order.sample(list(parties), len(parties)):
                try:
                    sample = parties[name].turn()
                except ContenderFailed as error:
                    refuse(name, error)
                    continue
                measured.samples[name].append(Sample(sample.wall_s / row.units, sample.cpu_s / row.units))


class _WrongResult(Exception):
    """What a contender computed is not what raw did."""


def _compare(raw: Party, party: Party, tolerance: float) -> None:
    expected, result = raw.result(), party.result()
    if expected.shape != result.shape:
        raise _WrongResult(f"WRONG RESULT: {result.size} values where raw has {expected.size}")
    difference = float(np.abs(expected - result).max(initial=0.0))
    if not difference <= tolerance:  # also refuses NaN
        raise _WrongResult(f"WRONG RESULT: differs from raw's by {difference:.2g}, allowed are {tolerance:.0e}")


def installed(contenders: Mapping[str, Make], needs: Mapping[str, str]) -> dict[str, Make]:
    """`contenders` without those whose package is not there. needs: the package of each that has one."""
    return {name: make for name, make in contenders.items() if name not in needs or _is_there(needs[name])}


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
