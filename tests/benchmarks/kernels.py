"""Cells of a real Jupyter kernel, for the rows and reports that measure what a notebook's user waits for.

It knows how a contender's cells begin; what is in them, and what is made of the times, is the caller's.
"""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.party import free_port
from environments import NEWEST, Environment
from kernel.harness import RealKernel

__all__ = ["LAUNCHERS", "NEEDS", "PLAIN", "RANKS", "Launcher", "new_kernel"]

RANKS = 2

PLAIN = "raw"


@dataclass(frozen=True, slots=True)
class Launcher:
    """How somebody runs the same lines in two ranks, from a cell.

    setup: a cell before the first. cell: with {function} for the lines as the body of a function, {body} as they are,
    {port} for one that nobody listens on. ranks: how many run them.
    """

    setup: str
    cell: str
    ranks: int = RANKS

    def filled(self, body: str) -> str:
        body = textwrap.dedent(body).strip()
        return self.cell.format(body=body, function=textwrap.indent(body, "    "), port=free_port())


_WARM = "import torch, torch._dynamo, torch.nn.parallel\n"  # as in a notebook that has trained
_OURS = f"{_WARM}%load_ext nbaccel"

LAUNCHERS: Mapping[str, Launcher] = {
    PLAIN: Launcher(_WARM, "{body}", ranks=1),
    "Accelerate": Launcher(
        f"{_WARM}from accelerate import notebook_launcher",
        f"def function():\n{{function}}\nnotebook_launcher(function, num_processes={RANKS}, use_port='{{port}}')",
    ),
    "Fabric": Launcher(
        f"{_WARM}from lightning.fabric import Fabric",
        "def function(fabric):\n{function}\n"
        f"Fabric(accelerator='cpu', devices={RANKS}, strategy='ddp_notebook').launch(function)",
    ),
    "nbaccel, fork": Launcher(_OURS, f"%%accelerate --cpu -n {RANKS} --start fork\n{{body}}"),
    "nbaccel, zygote": Launcher(_OURS, f"%%accelerate --cpu -n {RANKS} --start zygote\n{{body}}"),
    "nbaccel, ranks that stay": Launcher(
        f"{_OURS}\n%accelerate start --cpu -n {RANKS} --start fork", "%%accelerate\n{body}"
    ),
}

NEEDS = {"Accelerate": "accelerate", "Fabric": "lightning"}


class _Quiet(Environment):
    """It does not warn on the terminal that its sockets are not encrypted."""

    @property
    def kernel_argv(self) -> list[str]:
        return [*super().kernel_argv, "--log-level=ERROR"]


@contextmanager
def new_kernel() -> Iterator[RealKernel]:
    """A kernel in a folder of its own, ended with the block."""
    with tempfile.TemporaryDirectory(prefix="nbaccel-bench-") as folder:
        kernel = RealKernel(_Quiet(NEWEST.name, NEWEST.python), Path(folder))
        try:
            yield kernel
        finally:
            kernel.close()
