"""Containers of tensors come back as what they were."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbaccel.train.distributed.nested import map_children

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
