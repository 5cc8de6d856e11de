"""Which names keep how many bytes of tensors alive."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from nbaccel.train.oom.memory.holdings import Holding, Search, holdings, holds_tensors

FLOAT = 4


def tensor(count: int) -> torch.Tensor:
    return torch.zeros(count)


def by_name(*groups: dict[str, Any], beside: Any = ()) -> dict[str, int]:
    return {holding.name: holding.bytes for holding in holdings(*groups, beside=beside)}


def test_a_model_its_gradients_and_its_optimizers_state_have_a_line_each() -> None:
    model = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    assert by_name({"opt": optimizer, "model": model}) == {"model": 400}
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert by_name({"opt": optimizer, "model": model}) == {"opt.state": 800 + FLOAT, "model": 400, "model.grad": 400}
    assert by_name({"opt": optimizer}) == {"opt.state": 800 + FLOAT, "opt": 400, "opt.grad": 400}


def test_memory_counts_once_whatever_leads_to_it() -> None:
    whole = tensor(100)
    model = torch.nn.Linear(10, 10, bias=False)
    names = {"row": whole[:10], "whole": whole, "again": [whole, whole], "weight": model.weight, "model": model}
    assert by_name(names) == {"row": 400, "model": 400}, "a view holds all of it, and the model is the name for its own"


def test_what_is_in_an_earlier_group_counts_there() -> None:
    shared = tensor(100)
    assert by_name({"mine": [shared]}, {"Out[7]": shared}) == {"mine": 400}
    assert by_name({}, {"Out[7]": shared, "_7": shared}) == {"Out[7]": 400}


Pair = namedtuple("Pair", "x y")


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor


class Trainer:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(10, 10, bias=False)

    def step(self) -> None: ...


def made_by_a_generator() -> Any:
    def batches() -> Any:
        held = tensor(100)
        yield held[:1].clone()
        yield held

    iterator = batches()
    next(iterator)
    return iterator


def a_closure() -> Any:
    held = tensor(100)
    return lambda x=1: held


@functools.lru_cache
def cached() -> torch.Tensor:
    return tensor(100)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tensor(100),
        lambda: [tensor(50), (tensor(50),)],
        lambda: {"a": {"b": tensor(100)}},
        lambda: UserDict(a=tensor(100)),
        lambda: Pair(tensor(50), tensor(50)),
        lambda: Slotted(tensor(100)),
        Trainer,
        lambda: Trainer().step,
        lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tensor(100))),
        lambda: functools.partial(print, tensor(100)),
        made_by_a_generator,
        a_closure,
        lambda: torch.nn.Parameter(tensor(100)),
    ],
)
def test_tensors_are_found_in_whatever_holds_them(make: Any) -> None:
    assert by_name({"thing": make()}) == {"thing": 400}


def test_a_cache_of_a_function_is_found() -> None:
    cached()
    assert by_name({"cached": cached}) == {"cached": 400}
    cached.cache_clear()


def test_modules_classes_and_globals_of_functions_are_not_followed() -> None:
    assert by_name({"torch": torch, "tensor": tensor, "Trainer": Trainer, "print": print, "n": 3, "s": "text"}) == {}


def test_what_is_beside_is_not_followed() -> None:
    shell = {"namespace": tensor(100)}
    assert by_name({"get_ipython": [shell]}, beside=[shell]) == {}


def test_tensors_without_memory_and_sparse_ones_do_no_harm() -> None:
    assert by_name({"meta": torch.zeros(100, device="meta"), "sparse": torch.eye(3).to_sparse()}) == {}


def test_a_tensor_beside_very_many_objects_is_found() -> None:
    assert by_name({"rows": [[number] for number in range(310_000)] + [tensor(100)]}) == {"rows": 400}


def test_a_search_ends_by_the_objects_it_has_looked_at_and_not_by_a_clock() -> None:
    rows = [tensor(1), [[number] for number in range(5000)]]
    assert holds_tensors(rows, Search(3))  # tensors come first
    assert not holds_tensors(rows, Search(1))
    search = Search(10_000)
    assert holds_tensors(list(reversed(rows)), search)
    assert not holds_tensors(rows[1:], search)
    assert 0 <= search.left < 10_000


def test_strange_tensors_and_objects_do_no_harm() -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __getattr__  # type: ignore[assignment]

    with FakeTensorMode():
        fake = torch.ones(10**9)
    lazy = torch.nn.LazyLinear(3)
    assert by_name({"hostile": [Hostile()], "fake": fake, "lazy": lazy, "proxy": weakref.proxy(lazy)}) == {}


@pytest.mark.full
@pytest.mark.slow
def test_looking_at_many_objects_ends_and_large_names_come_first() -> None:
    class Node:
        def __init__(self, number: int) -> None:
            self.numbers = [number]

    rows = {f"rows{number}": [Node(row) for row in range(60_000)] for number in range(8)}
    began = time.monotonic()
    assert by_name(rows | {"x": tensor(100), "model": torch.nn.Linear(10, 10, bias=False)}) == {"model": 400, "x": 400}
    assert time.monotonic() - began < 10


def test_classes_of_tensors_are_not_asked() -> None:
    class Hostile(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("asked")

    assert by_name({"x": [tensor(100).as_subclass(Hostile)]}) == {"x": 400}


def test_an_interrupt_ends_the_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Search) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "goes_on", interrupted)
    with pytest.raises(KeyboardInterrupt):
        by_name({"x": tensor(100)})


def test_the_device_is_said() -> None:
    assert holdings({"x": tensor(100)}) == [Holding("x", 400, "cpu")]


def test_largest_first() -> None:
    assert [holding.name for holding in holdings({"small": tensor(1), "large": tensor(100)})] == ["large", "small"]


saves_show = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="this torch does not show what a graph has saved"
)


@saves_show
def test_the_graph_behind_a_loss_is_named() -> None:
    x = torch.ones(100, requires_grad=True)
    loss = x.exp().exp().sum()
    assert by_name({"x": x, "loss": loss}) == {"x": 400, "loss": FLOAT, "loss.grad_fn": 800}
    loss.backward()
    assert by_name({"x": x, "loss": loss}) == {"x": 400, "x.grad": 400, "loss": FLOAT}


def test_activation_checkpoints_are_not_computed_again_to_be_measured() -> None:
    calls = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.exp().exp()

    x = torch.ones(100, requires_grad=True)
    loss = checkpoint(layer, x, use_reentrant=False).sum()
    names = by_name({"x": x, "loss": loss})
    assert (names["x"], names["loss"], len(calls)) == (400, FLOAT, 1)


def test_a_lazy_object_is_not_loaded_to_be_measured() -> None:
    class Lazy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise AssertionError("loaded")

    assert by_name({"lazy": [Lazy()]}) == {}


def test_without_torch_nobody_holds_a_tensor() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        assert holdings({"x": tensor}) == []
