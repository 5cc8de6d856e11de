"""Device memory that the notebook's own process holds, and what of it could be moved. Runs in the kernel.

`held_here` measures what the process holds, by the notebook's own names: ranks on the same device have to do without
that memory, and a restart gives none of it back. If this process has never used CUDA, it holds nothing, and nothing is
asked. `--free-kernel` moves models to the host; that is a feature, which `movable` asks for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from nbaccel.base.quantities import in_gb
from nbaccel.errors import FeatureMissing
from nbaccel.features import feature
from nbaccel.namespace.inventory import belongs_to_ipython
from nbaccel.namespace.nbytes import sizes_on_devices

__all__ = ["KernelHolding", "Unmoved", "held_here", "movable"]


class Unmoved:
    """Memory of the notebook that can leave the GPUs for a run: none."""

    @property
    def names(self) -> dict[str, int]:
        """Bytes on GPUs by name."""
        return {}

    def bytes_on(self, device: str) -> int:
        """Return the bytes that are freed on a GPU."""
        return 0

    def freed(self, say: Callable[[str], None]) -> AbstractContextManager[None]:
        """Return a block in which they are free; `say` is told what was moved."""
        return nullcontext()


def movable(namespace: Mapping[str, Any], numbers: Collection[int], *, is_asked_for: bool) -> Unmoved:
    """Return the memory of the notebook's variables that can leave the GPUs with these numbers.

    Args:
        is_asked_for: It is to be moved; else it is only spoken of.

    Raises:
        FeatureMissing: It is asked for, and what moves it is not there.
    """
    try:
        found: Unmoved = feature("free_kernel")(namespace, numbers)
    except FeatureMissing:
        if is_asked_for:
            raise
        return Unmoved()
    return found


_NAMES_SHOWN = 4


@dataclass(frozen=True, slots=True)
class KernelHolding:
    """The memory that this process holds on one device.

    Args:
        nbytes: Bytes taken from the device: tensors and the allocator's reserve.
        names: Variables and their bytes, largest first.

    Example:
        >>> str(KernelHolding("cuda:0", 3_000_000_000, 16_000_000_000, (("model", 2_000_000_000),)))
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
        listed = ", ".join(f"{name} {in_gb(nbytes)}" for name, nbytes in self.names[:_NAMES_SHOWN])
        held = in_gb(self.nbytes).removesuffix(" GB")
        return f"{held} of {in_gb(self.total_bytes)} on {self.device}{listed and f' ({listed})'}"


def held_here(namespace: Mapping[str, Any] | None) -> list[KernelHolding]:
    """Return one holding for each CUDA device on which this process has memory.

    Args:
        namespace: The notebook's variables.
    """
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
            holdings.append(KernelHolding(device, nbytes, total_bytes, names))
    return holdings
