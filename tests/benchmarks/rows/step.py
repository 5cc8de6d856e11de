"""A step of a prepared loop in one process: what a toolkit adds to PyTorch, in processor time."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import Row
from benchmarks.loops import NBACCEL, Training, contenders

__all__ = ["rows"]


def rows() -> Sequence[Row]:
    return [
        Row(
            name=f"step, {'bf16' if training.bf16 else 'fp32'}, accumulation {training.accumulation}",
            contenders=contenders(training),
            units=training.batches,
            targets={NBACCEL: 1.05, "nbaccel, reporting": 1.05},
            tolerance=2e-3 if training.bf16 else 1e-5,
        )
        for training in (Training(bf16=bf16, accumulation=steps) for bf16 in (False, True) for steps in (1, 4))
    ]
