"""Programs that any strategy must train like one process: names for tests of strategies. It defines nothing.

Runs in test processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbaccel.features import feature

if TYPE_CHECKING:
    from nbaccel.features.conformance.strategy_programs import (
        PROGRAMS,
        ConformanceProgram,
        ProgramResult,
        Setting,
        check,
    )

__all__ = ["PROGRAMS", "ConformanceProgram", "ProgramResult", "Setting", "check"]


def __getattr__(name: str) -> Any:
    """Return what the feature of this name has."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(feature("testing: conformance"), name)
