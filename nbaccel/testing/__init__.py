"""Tools for tests of code that trains: ranks, memory limits and deliberate faults. Runs in test processes and ranks.

`run_ranks` forks gloo ranks, `MemLimit` imitates a device of a few megabytes on the CPU, and `Faults` makes a chosen
rank fail at a chosen place and step. They combine: an out-of-memory error in the backward pass of rank 1 takes two
lines. Loads no torch by itself. Imports `launching`, `train`, `base` and the table of `features`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbaccel.testing.faults import Fault, Faults
from nbaccel.testing.ranks import run_ranks

if TYPE_CHECKING:
    from nbaccel.train.oom.memory.mem_limit import MemLimit

__all__ = ["Fault", "Faults", "MemLimit", "run_ranks"]


def __getattr__(name: str) -> Any:
    """Return `MemLimit`; it is a mode of torch, which is loaded when the name is asked for."""
    if name != "MemLimit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nbaccel.train.oom.memory.mem_limit import MemLimit

    return MemLimit
