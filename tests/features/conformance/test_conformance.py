"""Every strategy trains each of the conformance programs like one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


LONGER = ("brought back", "resumed")
"""Programs that start ranks several times, or launch them."""


def _differences(way: str, programs: Iterable[str]) -> list[str]:
    strategy, ranks, options = WAYS[way]
    is_older = (
        TorchVersion(torch.__version__.partition("+")[0]) < "2.10"
    )  # and cannot abandon a step of a sharded model
    chosen = [name for name in programs if name != "out of memory" or strategy != "fsdp" or not is_older]
    differences = conformance.check(strategy, chosen, ranks=ranks, options=options)
    assert [difference.program for difference in differences] == chosen
    return [str(difference) for difference in differences if not difference.is_within]


@pytest.mark.parametrize("way", WAYS)
def test_a_strategy_trains_like_one_process(way: str) -> None:
    assert len(conformance.PROGRAMS) == 15
    assert not _differences(way, conformance.PROGRAMS.keys() - LONGER)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", LONGER)
def test_a_strategy_goes_on_in_other_ranks_and_brings_its_objects_back(way: str, program: str) -> None:
    assert not _differences(way, [program])
