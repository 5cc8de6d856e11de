"""The functions that ranks exchange values with, beside those of the real package: the same call, the same value."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nbaccel.utils as ours
from nbaccel import Accelerator, PartialState
from nbaccel.testing import run_ranks

accelerate = pytest.importorskip("accelerate")

Pair = namedtuple("Pair", "left right")


def _mine(rank: int) -> Any:
    return {"x": torch.full((2, 2), float(rank)), "pair": Pair(torch.tensor(rank), [torch.arange(2) + rank])}


def _uneven(rank: int) -> Any:
    return [torch.full((1 + rank, 2), rank), {"y": torch.full((2 - rank,), float(rank))}]


def _split(state: Any, inputs: Any, apply_padding: bool) -> Any:
    with state.split_between_processes(inputs, apply_padding=apply_padding) as mine:
        return mine


CASES: dict[str, Callable[[Any, Any, int], Any]] = {
    "gather": lambda utils, state, rank: utils.gather(_mine(rank)),
    "reduce": lambda utils, state, rank: utils.reduce(_mine(rank)["x"]),
    "reduce sum": lambda utils, state, rank: utils.reduce(_mine(rank)["x"], "sum"),
    "pad": lambda utils, state, rank: utils.pad_across_processes(_uneven(rank), pad_index=9),
    "pad first": lambda utils, state, rank: utils.pad_across_processes(_uneven(rank)[0], pad_first=True),
    "pad columns": lambda utils, state, rank: utils.pad_across_processes(torch.ones(2, 1 + rank), dim=1),
    "broadcast": lambda utils, state, rank: utils.broadcast(_mine(rank), from_process=1),
    "broadcast objects": lambda utils, state, rank: utils.broadcast_object_list(["a", rank], from_process=1),
    "gather objects": lambda utils, state, rank: utils.gather_object([f"rank {rank}", rank]),
    "concatenate": lambda utils, state, rank: utils.concatenate([_mine(0)["x"], _mine(1)["x"]], dim=1),
    "concatenate nested": lambda utils, state, rank: utils.concatenate([{"x": torch.ones(1)}, {"x": torch.zeros(2)}]),
    "apply": lambda utils, state, rank: utils.recursively_apply(lambda tensor: tensor + 1, _mine(rank)),
    "batch size": lambda utils, state, rank: utils.find_batch_size(_mine(rank)),
    "split list": lambda utils, state, rank: _split(state, list("abcde"), False),
    "split and pad list": lambda utils, state, rank: _split(state, list("abcde"), True),
    "split tensor": lambda utils, state, rank: _split(state, torch.arange(5), True),
    "split dict": lambda utils, state, rank: _split(state, {"x": [1, 2, 3], "y": torch.arange(3)}, False),
    "split few": lambda utils, state, rank: _split(state, ["only"], False),
}


def _plain(value: Any) -> Any:
    """`value` with its types, so that it compares."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_plain(child) for child in value]
    return value


def _results(real: bool) -> dict[str, Any]:
    if real:
        warnings.simplefilter("ignore")  # it warns of threads and of loopback
        accelerator = accelerate.Accelerator(cpu=True)
        utils, state = accelerate.utils, accelerate.PartialState()
    else:
        accelerator = Accelerator(cpu=True)
        utils, state = ours, PartialState()
    return {name: _plain(case(utils, state, accelerator.process_index)) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return run_ranks(2, _results, False), run_ranks(2, _results, True)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_get_what_accelerate_gives_them(name: str, results: Any) -> None:
    mine, theirs = results
    assert [rank[name] for rank in mine] == [rank[name] for rank in theirs]
