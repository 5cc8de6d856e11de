"""What a rank is given for a check; the tasks of a check name it by a string. Runs in ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nbaccel.features.check.dry_run.dry_run_hooks import DryRunParts
from nbaccel.features.check.dry_run.gradient_probe import GradientProbe
from nbaccel.features.check.dry_run.loop_log import LoopLog

__all__ = ["dry_run_parts", "gradient_probe"]


def dry_run_parts(log: LoopLog, write: Callable[[Mapping[str, Any]], None], folder: Path) -> DryRunParts:
    """Return what cuts the loaders of this rank in a dry run, and measures; see `%%accelerate --check`."""
    return DryRunParts(log, write, folder)


def gradient_probe(
    write: Callable[[Mapping[str, Any]], None], path: Path, turns: int, steps: int | None
) -> GradientProbe:
    """Return what records the gradients at the first step of a cell; see `%%accelerate --check full`."""
    return GradientProbe(write, path, turns, steps)
