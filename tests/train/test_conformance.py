"""Every strategy trains each of the conformance programs like one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from nbaccel.testing import conformance
from nbaccel.utils import FullyShardedDataParallelPlugin

WAYS: dict[str, tuple[str, int, Callable[[], Mapping[str, Any]]]] = {
    "single": ("auto", 1, dict),
    "ddp": ("ddp", 2, dict),
    "fsdp": ("fsdp", 2, dict),
    "zero2": ("fsdp", 2, lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(reshard_after_forward=False)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_strategy_trains_like_one_process(way: str) -> None:
    strategy, ranks, options = WAYS[way]
    is_older = (
        TorchVersion(torch.__version__.partition("+")[0]) < "2.10"
    )  # and cannot abandon a step of a sharded model
    programs = [name for name in conformance.PROGRAMS if name != "out of memory" or strategy != "fsdp" or not is_older]
    differences = conformance.check(strategy, programs, ranks=ranks, options=options)
    assert len(differences) == len(programs)
    assert not [str(difference) for difference in differences if not difference.is_within]
