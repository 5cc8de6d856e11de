"""Calls the function of a sweep in a rank. Runs in ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nbaccel.train.accelerator import Accelerator

__all__ = ["call_with_accelerator"]


def call_with_accelerator(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the value of a function that also gets this rank's `accelerator`, by keyword; see `nbaccel.sweep`."""
    return function(*args, **kwargs, accelerator=Accelerator())
