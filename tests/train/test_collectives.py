"""Collectives over nested containers, and what happens when ranks call different ones."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nbaccel import Accelerator, CollectiveMismatch, PartialState
from nbaccel.testing import run_ranks
from nbaccel.train.collectives import CHECKED_CALLS

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    hidden: Any


def _gathered() -> dict[str, Any]:
    accelerator = Accelerator()
    rank = accelerator.process_index
    value = {"scalar": torch.tensor(rank), "pair": Pair(torch.full((2, 1), rank), [torch.tensor([rank])])}
    whole = accelerator.gather(value)
    output = accelerator.gather(Output(torch.full((1,), float(rank)), (torch.ones(1),)))
    assert isinstance(whole["pair"], Pair)
    assert isinstance(output, Output)
    assert isinstance(output.hidden, tuple)
    return {
        "scalar": whole["scalar"].tolist(),
        "left": whole["pair"].left.tolist(),
        "right": whole["pair"].right[0].tolist(),
        "logits": output.logits.tolist(),
    }


def test_gather_keeps_types_and_makes_scalars_one_dimensional() -> None:
    expected = {"scalar": [0, 1], "left": [[0], [0], [1], [1]], "right": [0, 1], "logits": [0.0, 1.0]}
    assert run_ranks(2, _gathered) == [expected, expected]


def _dtypes() -> list[bool]:
    accelerator = Accelerator()
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    kinds += [torch.uint8, torch.int8, torch.bool]
    one = [torch.ones(2, 2, dtype=kind).t() for kind in kinds]
    return [
        bool(whole.dtype == kind and whole.shape == (4, 2) and whole.all())
        for whole, kind in zip(accelerator.gather(one), kinds, strict=True)
    ]


def test_gather_takes_every_dtype_also_without_contiguous_memory() -> None:
    assert all(all(rank) for rank in run_ranks(2, _dtypes))


def _reduced() -> tuple[Any, ...]:
    accelerator = Accelerator()
    mine = torch.tensor([1.0, 2.0]) * (1 + accelerator.process_index)
    results = [accelerator.reduce(mine, kind).tolist() for kind in ("sum", "mean", "max", "min")]
    scaled = accelerator.reduce({"x": mine}, scale=0.5)["x"].tolist()
    return (*results, scaled, mine.tolist())


def test_reduce_knows_its_operations_and_does_not_change_its_input() -> None:
    first, second = run_ranks(2, _reduced)
    assert first[:5] == ([3.0, 6.0], [1.5, 3.0], [2.0, 4.0], [1.0, 2.0], [1.5, 3.0])
    assert (first[5], second[5]) == ([1.0, 2.0], [2.0, 4.0])


def test_an_unknown_reduction_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="reduction must be one of 'sum', 'mean', 'max', 'min', 'none', got 'product'"):
        Accelerator().reduce(torch.ones(1), "product")


def test_one_process_gets_back_what_it_gave() -> None:
    accelerator = Accelerator()
    value = {"x": torch.ones(())}
    assert accelerator.gather(value) is value
    assert accelerator.gather_for_metrics(["text"]) == ["text"]
    assert accelerator.pad_across_processes(value) is value
    accelerator.wait_for_everyone()


def _padded() -> tuple[Any, Any]:
    accelerator = Accelerator()
    mine = torch.full((1, accelerator.process_index + 1), 5)
    padded = accelerator.pad_across_processes(mine, dim=1, pad_index=-1)
    first = accelerator.pad_across_processes(mine, dim=1, pad_first=True)
    return accelerator.gather(padded).tolist(), accelerator.gather(first).tolist()


def test_pad_fills_up_to_the_longest_rank() -> None:
    assert run_ranks(2, _padded)[0] == ([[5, -1], [5, 5]], [[0, 5], [5, 5]])


def _broadcast() -> list[int]:
    state = PartialState()
    values: list[int] = state.collectives.broadcast([torch.tensor(state.process_index)], source=1)
    return [int(value) for value in values]


def test_broadcast_gives_the_sources_values() -> None:
    assert run_ranks(2, _broadcast) == [[1], [1]]


def _mismatch(kind: str) -> str:
    accelerator = Accelerator()
    rank = accelerator.process_index
    with pytest.raises(CollectiveMismatch) as caught:
        if kind == "shape":
            accelerator.gather({"x": torch.ones(2 + rank, 3)})
        elif kind == "operation":
            accelerator.gather(torch.ones(2)) if rank else accelerator.reduce(torch.ones(2))
        elif kind == "barrier":
            accelerator.wait_for_everyone() if rank else accelerator.gather(torch.ones(2))
        else:
            accelerator.gather(torch.ones(2, dtype=torch.float64 if rank else torch.float32))
    accelerator.wait_for_everyone()  # nothing was exchanged, so the group is still good
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "sides"),
    [
        ("shape", ["rank 0: gather {x: float32[2, 3]}", "rank 1: gather {x: float32[3, 3]}"]),
        ("operation", ["rank 0: reduce sum float32[2]", "rank 1: gather float32[2]"]),
        ("barrier", ["rank 0: gather float32[2]", "rank 1: wait_for_everyone"]),
        ("dtype", ["rank 0: gather float32[2]", "rank 1: gather float64[2]"]),
    ],
)
def test_different_calls_are_an_error_on_every_rank_that_names_both_sides(kind: str, sides: list[str]) -> None:
    for message in run_ranks(2, _mismatch, kind):
        assert all(side in message for side in sides)
        assert "call 1 of this process group" in message
        assert "pad_across_processes first" in message


def _late_mismatch(debug: bool) -> int:
    import os

    os.environ["ACCELERATE_DEBUG_MODE"] = str(int(debug))
    accelerator = Accelerator()
    for _ in range(CHECKED_CALLS):
        accelerator.reduce(torch.ones(1))
    if not debug:
        return accelerator.state.collectives.calls
    with pytest.raises(CollectiveMismatch):
        accelerator.gather(torch.ones(1 + accelerator.process_index))
    return accelerator.state.collectives.calls


def test_the_first_calls_are_checked_and_in_debug_mode_all() -> None:
    assert run_ranks(2, _late_mismatch, False) == [CHECKED_CALLS] * 2
    assert run_ranks(2, _late_mismatch, True) == [CHECKED_CALLS + 1] * 2


def _gather_a_mixture() -> str:
    with pytest.raises(TypeError) as caught:
        Accelerator().gather({"x": torch.ones(1), "y": "text"})
    return str(caught.value)


def test_gather_of_tensors_and_something_else_says_what_takes_it() -> None:
    for message in run_ranks(2, _gather_a_mixture):
        assert "got str. gather_for_metrics takes any picklable object" in message
