"""A step of a prepared loop in two gloo ranks: most of it is waiting for the peer, so wall time is what counts."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness import Row
from benchmarks.loops import NBACCEL, Training, contenders

__all__ = ["rows"]

_TARGETS = {1: 1.04, 4: 1.06}


def rows() -> Sequence[Row]:
    return [
        Row(
            name=f"step of 2 ranks, {'bf16' if training.bf16 else 'fp32'}, accumulation {training.accumulation}",
            contenders=contenders(training),
            units=training.batches,
            world_size=2,
            turns=20,
            judged="wall",
            targets={NBACCEL: _TARGETS[training.accumulation]},
            tolerance=2e-3 if training.bf16 else 1e-5,
        )
        for training in (
            Training(batches=60, bf16=bf16, accumulation=steps) for bf16 in (False, True) for steps in (1, 4)
        )
    ]
