"""The face of the states: names that programs import from ``accelerate.state``. It defines nothing."""

from __future__ import annotations

from nbaccel.train.gradient_state import GradientState
from nbaccel.train.state import AcceleratorState, PartialState

__all__ = ["AcceleratorState", "GradientState", "PartialState"]
