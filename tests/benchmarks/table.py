"""The table: medians, ratios and a verdict for each cell, as text for people and as JSON for notebooks. Pure.

What a target is, and when it is missed, is in `targets.py`. It measures nothing.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.harness import AGAIN, RAW, Measured
from benchmarks.targets import ratios

__all__ = ["LEGEND", "Cell", "Spread", "cells", "document", "lines", "machine"]

LEGEND = """\
x raw: the median, over turns, of the ratio to raw in the same turn. quartiles: of that, by the clock that judges.
raw again: raw against itself, the noise. REFUSED: it failed, or ended with another result than raw, and has no time."""

_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Spread:
    """Quartiles of the ratio to raw in the same turn."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, mine: list[float], raw: list[float]) -> Spread:
        found = ratios(mine, raw)
        if len(found) < 2:
            only = found[0] if found else float("nan")
            return cls(only, only, only)
        low, median, high = statistics.quantiles(found, n=4, method="inclusive")
        return cls(low, median, high)


@dataclass(frozen=True, slots=True)
class Cell:
    """One contender of a row: medians in the row's unit, ratios to raw, and what to think of them."""

    contender: str
    wall: float
    cpu: float
    wall_ratio: Spread
    cpu_ratio: Spread
    verdict: str


def cells(measured: Measured) -> list[Cell]:
    """The cells of a row that were not refused, raw first."""
    row, scale = measured.row, _PER_SECOND[measured.row.unit]
    wall = {name: [one.wall_s * scale for one in samples] for name, samples in measured.samples.items()}
    cpu = {name: [one.cpu_s * scale for one in samples] for name, samples in measured.samples.items()}
    judged = wall if row.judged == "wall" else cpu

    def verdict(name: str) -> str:
        target = row.target(name)
        again = judged.get(AGAIN, [math.nan] * len(judged[RAW]))
        return target.verdict(row.unit, judged[name], judged[RAW], again, row.enough_turns) if target else ""

    return [
        Cell(
            name,
            statistics.median(wall[name]),
            statistics.median(cpu[name]),
            Spread.of(wall[name], wall[RAW]),
            Spread.of(cpu[name], cpu[RAW]),
            verdict(name),
        )
        for name in measured.samples
    ]


def lines(measured: Measured) -> Iterator[str]:
    """The row as text; `LEGEND` says what its columns are."""
    row = measured.row
    ranks = f"{row.world_size} ranks" if row.world_size > 1 else "1 process"
    yield f"{row.name} -- {ranks}, judged by {row.judged} time, {_turns(measured)} turns"
    yield f"  {'':26}{f'wall {row.unit}':>10}{'x raw':>8}{f'cpu {row.unit}':>11}{'x raw':>8}   quartiles"
    for cell in cells(measured):
        judged = cell.wall_ratio if row.judged == "wall" else cell.cpu_ratio
        yield (
            f"  {cell.contender:26}{cell.wall:>10.1f}{_told(cell.wall_ratio.median):>8}{cell.cpu:>11.1f}"
            f"{_told(cell.cpu_ratio.median):>8}   {judged.low:.2f}-{judged.high:.2f}  {cell.verdict}".rstrip()
        )
    for name, why in measured.refused.items():
        yield f"  {name:26}REFUSED: {why.strip().splitlines()[-1]}"


def _told(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.3f}"


def _turns(measured: Measured) -> int:
    """None where raw itself failed."""
    return len(measured.samples.get(RAW, ()))


def machine() -> dict[str, object]:
    """Where and with what; the load says how alone the benchmark was."""
    return {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


def document(measured: Measured) -> dict[str, object]:
    """The row as JSON, where what is not a number is null."""
    row = measured.row
    return {
        "row": row.name,
        "unit": row.unit,
        "world_size": row.world_size,
        "judged": row.judged,
        "turns": _turns(measured),
        "cells": [_without_nan(asdict(cell)) for cell in cells(measured)],
        "refused": measured.refused,
    }


def _without_nan(told: Any) -> Any:
    if isinstance(told, dict):
        return {name: _without_nan(value) for name, value in told.items()}
    return None if isinstance(told, float) and math.isnan(told) else told
