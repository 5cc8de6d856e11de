"""PrecisionType: the names of mixed precision as an enumeration. Pure; for programs that list or compare them."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["PrecisionType"]


class PrecisionType(StrEnum):
    """Values that ``Accelerator(mixed_precision=…)`` takes; plain strings work as well.

    >>> PrecisionType.BF16 in PrecisionType.list()
    True
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"

    @classmethod
    def list(cls) -> list[str]:
        return [kind.value for kind in cls]
