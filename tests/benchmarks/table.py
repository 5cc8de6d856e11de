"""The table: medians, ratios and a verdict for each cell, as text for people and as JSON for notebooks. Pure.

A contender that is over its target falls short only where it also exceeds the spread of raw against itself in the same
run (third quartile of "raw again"). It measures nothing.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from benchmarks.harness import AGAIN, RAW, Measured

__all__ = ["Cell", "Ratio", "cells", "document", "lines", "machine"]

_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Quartiles of the ratio to raw in the same turn."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, mine: list[float], raw: list[float]) -> Ratio:
        """A clock too coarse for a turn gives no ratio for it."""
        ratios = [one / other for one, other in zip(mine, raw, strict=True) if other > 0]
        if len(ratios) < 2:
            only = ratios[0] if ratios else float("nan")
            return cls(only, only, only)
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(low, median, high)


@dataclass(frozen=True, slots=True)
class Cell:
    """One contender of a row: medians in the row's unit, ratios to raw, and what to think of them."""

    contender: str
    wall: float
    cpu: float
    wall_ratio: Ratio
    cpu_ratio: Ratio
    verdict: str


def cells(measured: Measured) -> list[Cell]:
    """The cells of a row that were not refused, raw first."""
    row, scale = measured.row, _PER_SECOND[measured.row.unit]
    wall = {name: [one.wall_s * scale for one in samples] for name, samples in measured.samples.items()}
    cpu = {name: [one.cpu_s * scale for one in samples] for name, samples in measured.samples.items()}
    judged = wall if row.judged == "wall" else cpu
    noise = Ratio.of(judged[AGAIN], judged[RAW]).high if AGAIN in judged else 1.0
    return [
        Cell(
            name,
            statistics.median(wall[name]),
            statistics.median(cpu[name]),
            Ratio.of(wall[name], wall[RAW]),
            Ratio.of(cpu[name], cpu[RAW]),
            _verdict(Ratio.of(judged[name], judged[RAW]).median, row.targets.get(name), noise),
        )
        for name in measured.samples
    ]


def _verdict(ratio: float, target: float | None, noise: float) -> str:
    if target is None:
        return ""
    if ratio <= target:
        return f"holds {target:g}"
    return f"over {target:g}, within the noise" if ratio <= noise else f"FALLS SHORT of {target:g}"


def lines(measured: Measured) -> Iterator[str]:
    """The row as text."""
    row = measured.row
    ranks = f"{row.world_size} ranks" if row.world_size > 1 else "1 process"
    yield f"{row.name} -- {ranks}, judged by {row.judged} time, {len(measured.samples[RAW])} turns"
    yield f"  {'':26}{f'wall {row.unit}':>10}{'x raw':>8}{f'cpu {row.unit}':>11}{'x raw':>8}   quartiles"
    for cell in cells(measured):
        judged = cell.wall_ratio if row.judged == "wall" else cell.cpu_ratio
        yield (
            f"  {cell.contender:26}{cell.wall:>10.1f}{cell.wall_ratio.median:>8.3f}{cell.cpu:>11.1f}"
            f"{cell.cpu_ratio.median:>8.3f}   {judged.low:.2f}-{judged.high:.2f}  {cell.verdict}".rstrip()
        )
    for name, why in measured.refused.items():
        yield f"  {name:26}REFUSED: {why.strip().splitlines()[-1]}"


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
    """The row as JSON."""
    row = measured.row
    return {
        "row": row.name,
        "unit": row.unit,
        "world_size": row.world_size,
        "judged": row.judged,
        "turns": len(measured.samples[RAW]),
        "cells": [asdict(cell) for cell in cells(measured)],
        "refused": measured.refused,
    }
