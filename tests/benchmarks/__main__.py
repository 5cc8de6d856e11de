"""The command: ``python -m benchmarks``, which ``make bench`` runs. It measures, prints a table and writes JSON.

    make bench                                    every row and report, three rounds of fresh processes
    make bench ROWS=step,loader ROUNDS=5          some rows, more rounds
    make bench ROWS=planner                       a report: numbers that are no ratio to raw

Rows and reports go into the JSON alike. It ends with 1 where a cell was refused or a target was missed by more than
the noise, or where a report failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import measure
from benchmarks.rows import GROUPS, REPORTS, rows
from benchmarks.table import document, lines, machine
from benchmarks.targets import FALLS_SHORT

__all__ = ["environ_of_scripts", "main"]

_TESTS = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    about = machine()
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    documents: list[dict[str, Any]] = []
    reports: list[dict[str, Any]] = []
    whole = {"machine": about, "rounds": options.rounds, "rows": documents, "reports": reports}
    is_well = True
    for group in options.groups:
        if group in REPORTS:
            held, findings = _report(group)
            reports.append({"report": group, "held": held, "findings": findings})
            is_well &= held
        for row in rows(group) if group in GROUPS else ():
            measured = measure(row, options.rounds)
            text = "\n".join(lines(measured))
            print(f"\n{text}", flush=True)
            documents.append(document(measured))
            is_well &= not measured.refused and FALLS_SHORT not in text
        if options.json:  # after every group: whoever interrupts a run of an hour keeps what it has found
            Path(options.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(f"\nwritten to {options.json}")
    return 0 if is_well else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = (*GROUPS, *REPORTS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="nbaccel beside its peers.")
    parser.add_argument("--rows", default="", help=f"names, separated by commas: {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of fresh processes")
    parser.add_argument("--json", default="", help="file to write the results to")
    options = parser.parse_args(arguments)
    options.groups = [name for name in options.rows.replace(" ", "").split(",") if name] or list(known)
    unknown = [name for name in options.groups if name not in known]
    if unknown:
        parser.error(f"no rows called {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    return options


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
