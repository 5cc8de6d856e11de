"""Enumerations of ``accelerate.utils.dataclasses`` that nothing here reads: programs do. Used anywhere."""

from __future__ import annotations

from enum import Enum, EnumMeta, StrEnum
from typing import Any

__all__ = ["BaseEnum", "DynamoBackend", "EnumWithContains"]


class EnumWithContains(EnumMeta):
    """A metaclass of enumerations: ``value in Enumeration`` says whether any value is one of its own.

    Example:
        >>> class Colour(Enum, metaclass=EnumWithContains):
        ...     RED = "red"
        >>> "red" in Colour, "blue" in Colour
        (True, False)
    """

    def __contains__(cls, item: Any) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration that prints as its value and lists its values.

    Example:
        >>> class Colour(BaseEnum):
        ...     RED = "red"
        >>> print(Colour.RED), Colour.list()
        red
        (None, ['red'])
    """

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Return the values."""
        return [member.value for member in cls]


class DynamoBackend(StrEnum):
    """Backends of ``torch.compile`` in Accelerate's spelling; `Accelerator(dynamo_backend=…)` takes torch's too.

    Example:
        >>> DynamoBackend("INDUCTOR") == "INDUCTOR"
        True
    """

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"
