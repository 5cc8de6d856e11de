"""The command: ``python -m benchmarks.gpu``, which ``make bench-gpu`` runs on a machine with a CUDA device.

    make bench-gpu                                  every row and the report about memory
    make bench-gpu ROWS=steps,memory ROUNDS=5       some of them, more rounds
    python -m benchmarks.gpu --device cpu           the same cells on the host, small; their numbers say nothing

It ends with 1 where a cell was refused, a target was missed or a search failed, and with 2 where there is no CUDA
device.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.findings import tell
from benchmarks.gpu.memory import report
from benchmarks.gpu.place import PLACES, Place
from benchmarks.gpu.rows import GROUPS
from benchmarks.protocol import Protocol, parse, parser
from benchmarks.table import machine
from nbaccel.base.hardware import Survey

__all__ = ["main"]

_MEMORY = "memory"
_NO_DEVICE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    known = (*GROUPS, _MEMORY)
    asked = parser("python -m benchmarks.gpu", "nbaccel beside its peers on a GPU.", known)
    asked.add_argument("--device", choices=list(PLACES), default="cuda")
    options = parse(asked, arguments, known)
    gpus = [gpu.name for gpu in Survey.take().gpus]
    if options.device == "cuda" and not gpus:
        print(
            "no CUDA device: NVML finds none here, and these numbers need one. --device cpu runs the same cells on the "
            "host, which proves their code and says nothing about a GPU.",
            file=sys.stderr,
        )
        return _NO_DEVICE
    place = PLACES[options.device]
    about = {**machine(), "device": gpus[0] if options.device == "cuda" else "cpu"}
    protocol = Protocol(about, options.rounds, options.json)
    for group in options.groups:
        if group == _MEMORY:
            protocol.add_report(_MEMORY, *_findings(place))
        else:
            protocol.measure(GROUPS[group](place))
    return protocol.end()


def _findings(place: Place) -> tuple[bool, list[dict[str, Any]]]:
    print(f"\n{_MEMORY}", flush=True)
    with tempfile.TemporaryDirectory(prefix="nbaccel-bench-") as folder:
        path = Path(folder, "findings.json")
        try:
            held = tell(report(place), str(path)) == 0
        except Exception:  # of a search or a launch: what was found before is as good as ever
            traceback.print_exc()
            held = False
        return held, json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    # is_available() then asks NVML: CUDA, once asked, cannot be used by what is forked from here.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    sys.exit(main())
