"""Holdings: the device memory that the launching process itself holds, by the notebook's own names. Runs in the kernel.

Ranks on the same device have to do without that memory, and a restart gives none of it back. If this process has never
used CUDA, it holds nothing, and nothing is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbaccel.launch.wire.delta import belongs_to_ipython
from nbaccel.launch.wire.weight import sizes_on_devices

__all__ = ["Holding", "held_here"]

_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Holding:
    """The memory that this process holds on one device.

    nbytes: bytes taken from the device: tensors and the allocator's reserve.  names: variables and their bytes, largest
    first.

    >>> str(Holding("cuda:0", 3_000_000_000, 16_000_000_000, (("model", 2_000_000_000),)))
    '3.0 of 16.0 GB on cuda:0 (model 2.0 GB)'
    """

    device: str
    nbytes: int
    total_bytes: int
    names: tuple[tuple[str, int], ...] = ()

    @property
    def share(self) -> float:
        """Return the fraction of the whole device."""
        return self.nbytes / self.total_bytes if self.total_bytes else 0.0

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {_gb(nbytes)} GB" for name, nbytes in self.names[:_NAMES_SHOWN])
        return f"{_gb(self.nbytes)} of {_gb(self.total_bytes)} GB on {self.device}{listed and f' ({listed})'}"


def held_here(namespace: Mapping[str, Any] | None) -> list[Holding]:
    """Return one holding for each CUDA device on which this process has memory. namespace: the notebook's variables."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    variables = dict(namespace or {})
    named = sizes_on_devices(
        {name: value for name, value in variables.items() if not (name.startswith("_") or belongs_to_ipython(name))}
    )
    holdings = []
    for number in range(torch.cuda.device_count()):
        nbytes = torch.cuda.memory_reserved(number)
        if nbytes:
            device = f"cuda:{number}"
            total_bytes = torch.cuda.get_device_properties(number).total_memory
            names = tuple(named[device].most_common()) if device in named else ()
            holdings.append(Holding(device, nbytes, total_bytes, names))
    return holdings


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f}"
