"""From a new interpreter to the import, and to the first prepared model that made a step; torch's import is raw's.

Every turn is an interpreter of its own, on files that the first turn brought into memory. ``import nbaccel`` loads its
names when they are first used, so the peers' imports compare with "nbaccel, Accelerator" too, which uses the same ones.
The garbage collector is off while imports are timed: one full collection of the 177,000 objects of torch takes as long
as such an import, and falls into one or another by the number of objects that were made before. First steps have it.
`%load_ext` is measured in a new kernel each turn, beside an extension that does nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.harness import Row, installed
from benchmarks.kernels import new_kernel
from benchmarks.loops import NBACCEL
from benchmarks.party import Bout, Sample
from benchmarks.targets import OverRaw

__all__ = ["rows"]

_TIMED = """
import gc, time
{gc}
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
    f"{NBACCEL}, Accelerator": "from nbaccel import Accelerator, notebook_launcher",
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


def _bout(code: str, is_collected: bool) -> Bout:
    def turn() -> Sample:
        collector = "" if is_collected else "gc.disable()"
        line = [sys.executable, "-W", "ignore", "-c", _TIMED.format(code=code, gc=collector)]
        told = subprocess.run(line, capture_output=True, text=True)
        if told.returncode:
            raise RuntimeError(told.stderr)
        wall_s, cpu_s = told.stdout.split()[-2:]
        return Sample(float(wall_s), float(cpu_s))

    return Bout(turn, lambda: torch.zeros(1))  # the interpreter's exit status is the guard


_LOAD = """
import time
wall_s, cpu_s = time.perf_counter(), time.process_time()
get_ipython().run_line_magic("load_ext", "{name}")
print(time.perf_counter() - wall_s, time.process_time() - cpu_s)
"""

_NOTHING = "def load_ipython_extension(shell):\n    pass\n"


def _loading(name: str) -> Bout:
    until_closed = ExitStack()
    kernel = until_closed.enter_context(new_kernel())
    (kernel.folder / "extension_that_does_nothing.py").write_text(_NOTHING)

    def turn() -> Sample:
        kernel.restart()
        wall_s, cpu_s = kernel.do(_LOAD.format(name=name)).stdout.split()
        return Sample(float(wall_s), float(cpu_s))

    def loaded() -> torch.Tensor:
        """Whether the kernel has the extension."""
        return torch.tensor(kernel.value(f"{name!r} in get_ipython().extension_manager.loaded"))

    return Bout(turn, loaded, until_closed.close)


def rows() -> Sequence[Row]:
    needs = {"Accelerate": "accelerate", "Fabric": "lightning"}
    extensions = {"raw": partial(_loading, "extension_that_does_nothing"), NBACCEL: partial(_loading, "nbaccel")}
    return [
        *(
            Row(
                name=name,
                contenders=installed({way: partial(_bout, code, is_collected) for way, code in codes.items()}, needs),
                unit="ms",
                turns=5,
                targets=targets,
            )
            for name, codes, is_collected, targets in (
                (
                    "import, torch's included",
                    _IMPORTS,
                    False,
                    {NBACCEL: OverRaw(20), f"{NBACCEL}, Accelerator": OverRaw(60)},
                ),
                ("first step of a new interpreter", _FIRST_STEPS, True, {NBACCEL: OverRaw(60)}),
            )
        ),
        Row("%load_ext of a new kernel", extensions, unit="ms", turns=3, targets={NBACCEL: OverRaw(20)}),
    ]
