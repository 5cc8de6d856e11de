"""Testing: ranks, limits and faults on purpose, for tests of code that trains. Runs in test processes and ranks.

`run_ranks` forks gloo ranks, `MemLimit` is a device of a few megabytes on the CPU, and `Faults` lets a chosen rank
fail at a chosen place and step. They go together: out of memory in the backward pass of rank 1 is two lines.
Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbaccel.testing.faults import Fault, Faults
from nbaccel.testing.ranks import run_ranks

if TYPE_CHECKING:
    from nbaccel.train.memlimit import MemLimit

__all__ = ["Fault", "Faults", "MemLimit", "run_ranks"]


def __getattr__(name: str) -> Any:
    """`MemLimit` is a mode of torch, which is loaded when it is asked for."""
    if name != "MemLimit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nbaccel.train.memlimit import MemLimit

    return MemLimit
