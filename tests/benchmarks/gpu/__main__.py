"""The command: ``python -m benchmarks.gpu``, which ``make bench-gpu`` runs on a machine with a CUDA device.

    make bench-gpu                                  every row and the report about memory
    make bench-gpu ROWS=steps,memory ROUNDS=5       some of them, more rounds
    python -m benchmarks.gpu --device cpu           the same cells on the host, small; their numbers say nothing

It ends with 1 where a cell was refused or a target was missed, and with 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.findings import tell
from benchmarks.gpu.memory import report
from benchmarks.gpu.place import PLACES, Place
from benchmarks.gpu.rows import GROUPS
from benchmarks.harness import measure
from benchmarks.table import document, lines, machine
from benchmarks.targets import FALLS_SHORT
from nbaccel.hardware import Survey

__all__ = ["main"]

_MEMORY = "memory"
_NO_DEVICE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    gpus = [gpu.name for gpu in Survey.take().gpus]
    if options.device == "cuda" and not gpus:
        print(
            "no CUDA device: NVML finds none here, and these numbers need one. --device cpu runs the same cells on the "
            "host, which proves their code and says nothing about a GPU.",
            file=sys.stderr,
        )
        return _NO_DEVICE
    about = {**machine(), "device": gpus[0] if options.device == "cuda" else "cpu"}
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    place = PLACES[options.device]
    documents: list[dict[str, object]] = []
    reports: list[dict[str, object]] = []
    is_well = True
    for group in options.groups:
        if group == _MEMORY:
            held, findings = _findings(place)
            reports.append({"report": _MEMORY, "held": held, "findings": findings})
            is_well &= held
            continue
        for row in GROUPS[group](place):
            measured = measure(row, options.rounds)
            text = "\n".join(lines(measured))
            print(f"\n{text}", flush=True)
            documents.append(document(measured))
            is_well &= not measured.refused and FALLS_SHORT not in text
    if options.json:
        whole = {"machine": about, "rounds": options.rounds, "rows": documents, "reports": reports}
        Path(options.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        print(f"\nwritten to {options.json}")
    return 0 if is_well else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    known = (*GROUPS, _MEMORY)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="nbaccel beside its peers on a GPU.")
    parser.add_argument("--device", choices=list(PLACES), default="cuda")
    parser.add_argument("--rows", default="", help=f"names, separated by commas: {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of fresh processes")
    parser.add_argument("--json", default="", help="file to write the results to")
    options = parser.parse_args(arguments)
    options.groups = [name for name in options.rows.replace(" ", "").split(",") if name] or list(known)
    unknown = [name for name in options.groups if name not in known]
    if unknown:
        parser.error(f"no rows called {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    return options


def _findings(place: Place) -> tuple[bool, list[dict[str, Any]]]:
    print(f"\n{_MEMORY}", flush=True)
    with tempfile.TemporaryDirectory(prefix="nbaccel-bench-") as folder:
        path = Path(folder, "findings.json")
        status = tell(report(place), str(path))
        return status == 0, json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
