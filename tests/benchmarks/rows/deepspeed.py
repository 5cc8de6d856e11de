"""A step of DeepSpeed's ZeRO 2 in two gloo ranks, over its engine by hand. No rows without the package."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.harness import Row
from benchmarks.loops import NBACCEL, Training, loss_of, nbaccel
from benchmarks.party import Bout

__all__ = ["rows"]

_TRAINING = Training(batches=40, width=64)
_CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,  # by default DeepSpeed clips
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 10**9,
}


def rows() -> Sequence[Row]:
    if find_spec("deepspeed") is None:
        return []
    return [
        Row(
            name="step of 2 ranks, deepspeed",
            contenders={"raw": _raw, NBACCEL: lambda: nbaccel(_TRAINING, strategy="deepspeed")},
            units=_TRAINING.batches,
            world_size=2,
            turns=20,
            judged="wall",
            targets={NBACCEL: 1.05},
            tolerance=1e-4,
        )
    ]


def _raw() -> Bout:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed

    model, optimizer, loader = _TRAINING.things()
    torch.distributed.init_process_group("gloo")
    vars(deepspeed.ops)["__compatible_ops__"] = {}  # no exchange through shared memory, which it would compile
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_CONFIG, dist_init_required=False)
    loader = DataLoader(loader.dataset, batch_size=8, sampler=DistributedSampler(loader.dataset, shuffle=False))

    def turn() -> None:
        for (x,) in loader:
            engine.backward(loss_of(engine(x)))
            engine.step()

    return Bout(turn, lambda: torch.cat([weight.detach().flatten() for weight in model.parameters()]))
