"""A state packs into JSON and tensors, and comes back as it was."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from nbaccel.train.checkpoint.serialization import CannotPack, pack, unpack

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
_STATES = st.recursive(
    _SCALARS,
    lambda below: st.lists(below) | st.tuples(below, below) | st.dictionaries(_KEYS, below) | st.frozensets(_SCALARS),
    max_leaves=12,
)


def there_and_back(state: Any) -> Any:
    packed = pack(state)
    return unpack(json.loads(json.dumps(packed.structure)), packed.tensors)


@settings(max_examples=60, deadline=None)
@given(_STATES)
def test_nested_states_come_back_equal_and_of_the_same_types(state: Any) -> None:
    again = there_and_back(state)
    assert again == state
    assert repr(type(again)) == repr(type(state))


@pytest.mark.parametrize(
    "state",
    [
        OrderedDict(b=1, a=2),
        Counter({3: 1, 1: 2}),
        deque([1, 2], maxlen=5),
        {1, 2},
        3 + 4j,
        torch.Size([2, 3]),
        torch.device("cpu"),
        torch.bfloat16,
        (math.inf, -0.0, 2**100),
    ],
    ids=lambda state: type(state).__name__,
)
def test_kinds_that_optimizers_and_schedulers_use_are_kept(state: Any) -> None:
    again = there_and_back(state)
    assert again == state
    assert type(again) is type(state)
    assert getattr(again, "maxlen", None) == getattr(state, "maxlen", None)


OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and kind.__name__ not in ("Optimizer", "SparseAdam")
]


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_packs_after_a_step(kind: Any) -> None:
    layer = torch.nn.Linear(2, 2, bias=False)

    def loss() -> torch.Tensor:
        value = layer(torch.ones(1, 2)).square().sum()
        value.backward()
        return value.detach()  # torch 2.8 warns of what its own LBFGS does with one that is not

    optimizer = kind(layer.parameters(), lr=0.1)
    loss()
    optimizer.step(loss)
    state = optimizer.state_dict()
    assert str(there_and_back(state)) == str(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype).t()
    again = there_and_back({"a": tensor, "scalar": tensor[0, 0], "empty": tensor[:0]})
    assert torch.equal(again["a"], tensor)
    assert again["a"].dtype is dtype
    assert again["scalar"].shape == ()
    assert again["empty"].shape == (0, 2)


def test_numpy_arrays_and_numbers_come_back() -> None:
    again = there_and_back({"a": np.arange(3.0), "n": np.float32(0.1), "i": np.int64(2**40)})
    assert again["a"].tolist() == [0.0, 1.0, 2.0]
    assert isinstance(again["a"], np.ndarray)
    assert again["n"] == np.float32(0.1)
    assert type(again["i"]) is np.int64


def test_a_tensor_that_occurs_twice_is_stored_once_and_its_other_name_is_noted() -> None:
    weight = torch.randn(2, 2)
    packed = pack({"first": weight, "second": weight, "part": weight[0]})
    assert list(packed.tensors) == ["first", "part"]
    assert packed.aliases == {"second": "first"}
    assert packed.tensors["part"].untyped_storage().nbytes() == 8


def test_names_that_meet_do_not_overwrite_each_other() -> None:
    again = there_and_back({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "x": {1: torch.ones(2), "1": 5}})
    assert again["a"]["b"].item() == 1
    assert again["a.b"].item() == 0
    assert again["x"]["1"] == 5


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"best": {"model": object()}}, r"a checkpoint holds tensors, .*; best\.model is an object$"),
        ({"f": print}, "f is a builtin_function_or_method"),
        ({"s": torch.eye(2).to_sparse()}, r"s is a tensor without plain memory \(torch.sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, r"m is a tensor without plain memory \(on the meta device\)"),
        ({"o": np.array(["a", None])}, "o is an array of object, which is no tensor"),
    ],
)
def test_what_is_not_data_is_refused_with_its_place(state: Any, message: str) -> None:
    with pytest.raises(CannotPack, match=message):
        pack(state)


def test_unpacking_builds_nothing_but_the_kinds_it_knows() -> None:
    with pytest.raises(KeyError):
        unpack({"os.system": ["true"]}, {})
    with pytest.raises(ValueError, match=r"torch\.ones is no dtype"):
        unpack({"dtype": ["torch.ones"]}, {})
