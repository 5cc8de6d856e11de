"""The command: ``python -m benchmarks``, which ``make bench`` runs. It measures, prints a table and writes JSON.

    make bench                                    every row and report, three rounds of fresh processes
    make bench ROWS=step,loader ROUNDS=5          some rows, more rounds
    make bench ROWS=planner                       a report: numbers that are no ratio to raw

Rows and reports go into the JSON alike. It ends with 1 where a cell was refused or a target was missed by more than
the noise, or where a report failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.protocol import Protocol, parse, parser
from benchmarks.rows import GROUPS, REPORTS, rows
from benchmarks.table import machine

__all__ = ["environ_of_scripts", "main"]

_TESTS = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    known = (*GROUPS, *REPORTS)
    asked = parser("python -m benchmarks", "nbaccel beside its peers.", known)
    options = parse(asked, arguments, known)
    protocol = Protocol(machine(), options.rounds, options.json)
    for group in options.groups:
        if group in REPORTS:
            protocol.add_report(group, *_report(group))
        else:
            protocol.measure(rows(group))
    return protocol.end()


def environ_of_scripts() -> dict[str, str]:
    """Variables of a process that finds the benchmark's modules."""
    path = os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def _script(name: str) -> list[str]:
    """What to run of a report, for the interpreter."""
    return ["-m", f"benchmarks.{name}"]


def _report(name: str) -> tuple[bool, list[dict[str, Any]]]:
    """Run a script; whether it ended well, and what it found."""
    print(f"\n{name}", flush=True)
    with tempfile.TemporaryDirectory(prefix="nbaccel-bench-") as folder:
        written = Path(folder, "findings.json")
        line = [sys.executable, *_script(name), "--json", written]
        status = subprocess.run(line, env=environ_of_scripts()).returncode
        return status == 0, json.loads(written.read_text()) if written.exists() else []


if __name__ == "__main__":
    # Users' packages were compiled when pip installed them: no import of theirs compiles anything.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.exit(main())
