"""Containers of tensors come back as what they were."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbaccel.train.distributed.nested import map_children
from nbaccel.train.distributed.nested_rows import count_rows, join_batches

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class ModelOutput(OrderedDict[str, Any]):
    """A mapping whose constructor takes something else, as transformers' outputs are."""

    def __init__(self, *, logits: Any) -> None:
        super().__init__()
        self["logits"] = logits


class Encoding(UserDict[str, Any]):
    pass


class Names(list[Any]):
    pass


@pytest.mark.parametrize(
    ("value", "child"),
    [
        ({"x": 1}, lambda v: v["x"]),
        ([1], lambda v: v[0]),
        ((1,), lambda v: v[0]),
        (Pair(1, 1), lambda v: v.right),
        (Frozen(1), lambda v: v.value),
        (Encoding({"x": 1}), lambda v: v["x"]),
        (Names([1]), lambda v: v[0]),
        (OrderedDict(x=1), lambda v: v["x"]),
    ],
)
def test_a_container_is_rebuilt_as_its_own_type_and_the_old_one_is_left(value: Any, child: Any) -> None:
    rebuilt = map_children(lambda x: x + 1, value)
    assert type(rebuilt) is type(value)
    assert (child(rebuilt), child(value)) == (2, 1)


def test_a_mapping_with_a_constructor_of_its_own_keeps_its_type() -> None:
    class Output(ModelOutput):
        def __reduce__(self) -> Any:
            return (_output, (), None, None, iter(self.items()))

    def _output() -> Output:
        return Output(logits=None)

    rebuilt = map_children(lambda x: x + 1, Output(logits=1))
    assert isinstance(rebuilt, Output)
    assert rebuilt["logits"] == 2


@pytest.mark.parametrize("value", [3, "text", None, SimpleNamespace(x=1), torch.Size([2])])
def test_what_is_no_container_comes_back_itself(value: Any) -> None:
    assert map_children(lambda x: x, value) == value


def test_rows_are_counted_and_joined_in_any_nesting() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "more": (torch.arange(3), [torch.arange(3, 6)])}
    assert count_rows(batch) == 3
    first, rest = (_part(batch, rows) for rows in (slice(1), slice(1, 3)))
    joined = join_batches([first, rest])
    assert torch.equal(joined["x"], batch["x"])
    assert torch.equal(joined["more"][0], batch["more"][0])
    assert torch.equal(joined["more"][1][0], batch["more"][1][0])


def _part(value: Any, rows: slice) -> Any:
    return value[rows] if isinstance(value, torch.Tensor) else map_children(lambda each: _part(each, rows), value)


def test_without_a_tensor_there_are_no_rows_to_count() -> None:
    assert count_rows({"names": ["a"]}) is None
    assert count_rows(torch.ones(())) is None
