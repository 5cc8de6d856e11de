"""Snapshots: random generators and buffers as they were before a forward that may have to run again. Runs in ranks.

A repeated forward must draw the same dropout and count each sample once in BatchNorm's statistics. The
memory for the copies of buffers is allocated once, before memory is short.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Snapshot"]


class Snapshot:
    """State that a forward changes beside gradients: Python's, NumPy's and torch's generators, and `buffers`.

    device: its generator is saved beside the CPU's.
    """

    def __init__(self, buffers: Sequence[Tensor], device: torch.device) -> None:
        self._buffers = list(buffers)
        self._copies = [torch.empty_like(buffer) for buffer in self._buffers]
        self._device = device
        self._generators: list[Any] = []

    def take(self) -> None:
        """Save the present state."""
        numpy = sys.modules.get("numpy")
        self._generators = [random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()]
        if self._device.type == "cuda":
            self._generators.append(torch.cuda.get_rng_state(self._device))
        if self._device.type == "mps":
            self._generators.append(torch.mps.get_rng_state())
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    def restore(self) -> None:
        """Restore the state of the last `take`."""
        python, cpu, numpy_state, *device = self._generators
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)
        for state in device:
            getattr(torch, self._device.type).set_rng_state(state)
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._copies)
