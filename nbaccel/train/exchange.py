"""Exchange: values of all ranks, over nested containers. The face that states and Accelerators share. Runs in ranks.

Every method here is collective: every rank calls it, in the same order.
"""

from __future__ import annotations

from typing import Any

from nbaccel.train.control import ProcessControl

__all__ = ["Exchange"]


class Exchange(ProcessControl):
    """`gather`, `reduce` and their kin."""

    def gather(self, value: Any) -> Any:
        """Every tensor in `value`, those of all ranks joined along the first dimension, on every rank. Collective.

        Raises:
            CollectiveMismatch: the ranks called it with different structures or shapes.
        """
        return self.collectives.gather(value)

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Every tensor in `value` reduced over the ranks by "sum", "mean", "max" or "min". Collective."""
        return self.collectives.reduce(value, reduction, scale)

    def pad_across_processes(self, value: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Every tensor in `value` padded along `dim` to the longest of all ranks. Collective."""
        return self.collectives.pad(value, dim, pad_index, pad_first)
