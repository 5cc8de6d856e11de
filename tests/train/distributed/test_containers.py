"""Nested containers survive gather, reduce, pad and broadcast: any nesting, any dtype, any shape, on two ranks."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import Tensor

from nbaccel import PartialState
from nbaccel.testing import run_ranks
from nbaccel.train.distributed.nested import children, is_container, leaves

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: Any
    hidden: Any


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]

tensors = st.builds(
    lambda shape, dtype: torch.arange(1, 1 + torch.Size(shape).numel()).remainder(7).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)


def _containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from("xyz"), inside, min_size=1, max_size=2)
    return st.one_of(
        st.lists(inside, min_size=1, max_size=3),
        st.lists(inside, min_size=1, max_size=2).map(tuple),
        st.builds(Pair, inside, inside),
        st.builds(Output, inside, inside),
        named,
        named.map(UserDict),
        named.map(OrderedDict),
    )


values = st.recursive(tensors, _containers, max_leaves=6)


def _exchanged(examples: list[Any]) -> list[dict[str, Any]]:
    """On each rank: what became of each example. Rank r's tensors are the example's plus r."""
    state = PartialState()
    rank = state.process_index
    return [
        {
            "gather": state.gather(_shifted(value, rank)),
            "max": state.reduce(_shifted(value, rank), "max"),
            "sum": state.reduce(_shifted(value, rank)),
            "pad": state.pad_across_processes(_longer(value, rank), pad_index=1),
            "broadcast": state.collectives.broadcast(_shifted(value, rank), 1),
        }
        for value in examples
    ]


def _mapped(function: Any, value: Any) -> Any:
    """A second, naive way through a container, to compare with."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (dict, UserDict)):
        return type(value)({key: _mapped(function, child) for key, child in value.items()})
    if isinstance(value, (Pair, Output)):
        return type(value)(*[_mapped(function, child) for _, child in children(value)])
    return type(value)(_mapped(function, child) for child in value)


def _shifted(value: Any, rank: int) -> Any:
    return _mapped(lambda tensor: _shift(tensor, rank), value)


def _shift(tensor: Tensor, rank: int) -> Tensor:
    if tensor.dtype is torch.bool:
        return ~tensor if rank else tensor
    return tensor + rank


def _longer(value: Any, rank: int) -> Any:
    return _mapped(lambda tensor: torch.cat([tensor] * (1 + rank)) if tensor.ndim else tensor, value)


def _joined(tensor: Tensor) -> Tensor:
    return torch.cat([_shift(tensor, rank) if tensor.ndim else _shift(tensor, rank)[None] for rank in (0, 1)])


def _total(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:
        return tensor.long() + (~tensor).long()
    return tensor + _shift(tensor, 1)


def _greatest(tensor: Tensor) -> Tensor:
    return tensor | ~tensor if tensor.dtype is torch.bool else _shift(tensor, 1)


def _padded(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, torch.ones_like(tensor)]) if tensor.ndim else tensor


def _skeleton(value: Any) -> Any:
    if isinstance(value, Tensor):
        return "tensor"
    return type(value).__name__, [(name, _skeleton(child)) for name, child in children(value)]


def _equal(result: Any, expected: Any) -> bool:
    assert _skeleton(result) == _skeleton(expected)
    pairs = zip(leaves(result), leaves(expected), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


# Each example is many containers, since two ranks take a third of a second to start; and for that reason it is shown
# as it was found, and not made smaller.
@settings(
    max_examples=5,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
@given(st.lists(values, min_size=10, max_size=30))
def test_containers_come_back_as_they_were_with_the_right_numbers(examples: list[Any]) -> None:
    everyone = run_ranks(2, _exchanged, examples)
    for rank, results in enumerate(everyone):
        for value, result in zip(examples, results, strict=True):
            assert _equal(result["gather"], _mapped(_joined, value))
            assert _equal(result["sum"], _mapped(_total, value))
            assert _equal(result["max"], _mapped(_greatest, value))
            assert _equal(result["broadcast"], _shifted(value, 1))
            expected = _mapped(_padded, value) if rank == 0 else _longer(value, 1)
            assert _equal(result["pad"], expected)


@given(values)
def test_a_container_has_the_leaves_that_its_children_have(value: Any) -> None:
    below = [leaf for _, child in children(value) for leaf in leaves(child)]
    assert is_container(value) == (not isinstance(value, Tensor))
    assert [id(leaf) for leaf in leaves(value)] == (
        [id(leaf) for leaf in below] if is_container(value) else [id(value)]
    )
