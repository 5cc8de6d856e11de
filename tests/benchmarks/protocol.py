"""A run of the benchmark from the command line: what was asked for, and what was found, printed and kept as JSON.

Both commands, ``benchmarks`` and ``benchmarks.gpu``, go through it; which rows there are is theirs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RAW, Measured, Row, measure
from benchmarks.party import ContenderFailed
from benchmarks.table import LEGEND, document, lines
from benchmarks.targets import FALLS_SHORT

__all__ = ["Protocol", "parse", "parser"]


def parser(prog: str, description: str, known: Sequence[str]) -> argparse.ArgumentParser:
    """The options of both commands.  known: names of rows and reports."""
    options = argparse.ArgumentParser(prog=prog, description=description)
    options.add_argument("--rows", default="", help=f"names, separated by commas: {', '.join(known)}")
    options.add_argument("--rounds", type=int, default=3, help="rounds of fresh processes")
    options.add_argument("--json", default="", help="file to write the results to")
    return options


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, known: Sequence[str]) -> argparse.Namespace:
    """What was asked for; `groups` are the names of `known` to measure, all of them by default."""
    options = parser.parse_args(arguments)
    options.groups = [name for name in options.rows.replace(" ", "").split(",") if name] or list(known)
    unknown = [name for name in options.groups if name not in known]
    if unknown:
        parser.error(f"no rows called {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    return options


class Protocol:
    """What one run has found so far.

    machine: where it runs.  json: file that holds all of it after every row and report; empty for none.
    """

    def __init__(self, machine: dict[str, Any], rounds: int, json: str) -> None:
        self.is_well = True
        self._rounds = rounds
        self._json = json
        self._rows: list[dict[str, Any]] = []
        self._reports: list[dict[str, Any]] = []
        self._whole = {"machine": machine, "rounds": rounds, "rows": self._rows, "reports": self._reports}
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
        print(LEGEND, flush=True)

    def measure(self, rows: Sequence[Row]) -> None:
        for row in rows:
            try:
                measured = measure(row, self._rounds)
            except ContenderFailed as error:  # of raw: this row says nothing, the others may
                measured = Measured(row, {}, {RAW: str(error)})
            text = "\n".join(lines(measured))
            print(f"\n{text}", flush=True)
            self._rows.append(document(measured))
            self.is_well &= not measured.refused and FALLS_SHORT not in text
            self._keep()

    def add_report(self, name: str, held: bool, findings: list[dict[str, Any]]) -> None:
        self._reports.append({"report": name, "held": held, "findings": findings})
        self.is_well &= held
        self._keep()

    def end(self) -> int:
        """The exit status: 1 where a result was wrong or a target was missed."""
        if self._json:
            print(f"\nwritten to {self._json}")
        return 0 if self.is_well else 1

    def _keep(self) -> None:
        """Whoever interrupts a run of an hour keeps what it has found."""
        if self._json:
            Path(self._json).write_text(json.dumps(self._whole, indent=1) + "\n", encoding="utf-8")
