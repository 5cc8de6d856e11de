"""The exchange as functions, with the names and defaults of ``accelerate.utils``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel import PartialState, RanksFailed
from nbaccel.testing import run_ranks
from nbaccel.utils import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    wait_for_everyone,
)


def _exchanged() -> dict[str, Any]:
    rank = PartialState().process_index
    number = torch.tensor([float(rank + 1)])
    listed = ["of", rank]
    same = broadcast_object_list(listed, from_process=PartialState().num_processes - 1)
    wait_for_everyone()
    return {
        "gathered": gather({"x": number})["x"].tolist(),
        "objects": gather_object([rank, "text"]),
        "mean": reduce(number).tolist(),
        "sum": reduce(number, "sum").tolist(),
        "scaled": reduce(number, "max", scale=2).tolist(),
        "kept": number.tolist(),
        "broadcast": broadcast(number, from_process=0).tolist(),
        "list": (listed, same is listed),
        "padded": pad_across_processes(torch.ones(rank + 1), pad_index=7).tolist(),
    }


def test_two_ranks_exchange() -> None:
    first, second = run_ranks(2, _exchanged)
    assert first == {
        "gathered": [1, 2],
        "objects": [0, "text", 1, "text"],
        "mean": [1.5],
        "sum": [3],
        "scaled": [4],
        "kept": [1],
        "broadcast": [1],
        "list": (["of", 1], True),
        "padded": [1, 7],
    }
    assert second == first | {"kept": [2], "padded": [1, 1]}


def test_one_process_gets_back_what_it_gave() -> None:
    assert _exchanged() == {
        "gathered": [1],
        "objects": [0, "text"],
        "mean": [1],
        "sum": [1],
        "scaled": [2],
        "kept": [1],
        "broadcast": [1],
        "list": (["of", 0], True),
        "padded": [1],
    }


def test_gathering_tensors_mixed_with_something_else_names_it() -> None:
    with pytest.raises(RanksFailed, match=r"gather takes tensors.*\n?.*got str"):
        run_ranks(2, lambda: gather({"x": torch.ones(1), "y": "text"}))
