"""From a new interpreter to the import, and to the first prepared model that made a step; torch's import is raw's.

Every turn is an interpreter of its own, on files that the first turn brought into memory.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.harness import Row, installed
from benchmarks.loops import NBACCEL
from benchmarks.party import Bout, Sample

__all__ = ["rows"]

_TIMED = """
import time
wall_s, cpu_s = time.perf_counter(), time.process_time()
import torch
{code}
print(time.perf_counter() - wall_s, time.process_time() - cpu_s)
"""

_STEP = """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{prepare}
{backward}
optimizer.step()
"""

_IMPORTS = {
    "raw": "",
    "Accelerate": "from accelerate import Accelerator, notebook_launcher",
    "Fabric": "from lightning.fabric import Fabric",
    NBACCEL: "import nbaccel",
}

_ACCELERATOR = "accelerator = Accelerator(cpu=True)\nmodel, optimizer = accelerator.prepare(model, optimizer)"
_LOSS = "model(torch.ones(1, 4)).sum()"
_FIRST_STEPS = {
    "raw": _STEP.format(prepare="", backward=f"{_LOSS}.backward()"),
    "Accelerate": "from accelerate import Accelerator\n"
    + _STEP.format(prepare=_ACCELERATOR, backward=f"accelerator.backward({_LOSS})"),
    "Fabric": "from lightning.fabric import Fabric\n"
    + _STEP.format(
        prepare="fabric = Fabric(accelerator='cpu')\nmodel, optimizer = fabric.setup(model, optimizer)",
        backward=f"fabric.backward({_LOSS})",
    ),
    NBACCEL: "from nbaccel import Accelerator\n"
    + _STEP.format(prepare=_ACCELERATOR, backward=f"accelerator.backward({_LOSS})"),
}


def _bout(code: str) -> Bout:
    def turn() -> Sample:
        line = [sys.executable, "-W", "ignore", "-c", _TIMED.format(code=code)]
        told = subprocess.run(line, capture_output=True, text=True)
        if told.returncode:
            raise RuntimeError(told.stderr)
        wall_s, cpu_s = told.stdout.split()[-2:]
        return Sample(float(wall_s), float(cpu_s))

    return Bout(turn, lambda: torch.zeros(1))  # the interpreter's exit status is the guard


def rows() -> Sequence[Row]:
    needs = {"Accelerate": "accelerate", "Fabric": "lightning"}
    return [
        Row(
            name=name,
            contenders=installed({way: partial(_bout, code) for way, code in codes.items()}, needs),
            unit="ms",
            turns=5,
        )
        for name, codes in (("import, torch's included", _IMPORTS), ("first step of a new interpreter", _FIRST_STEPS))
    ]
