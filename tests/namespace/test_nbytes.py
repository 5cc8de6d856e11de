"""Weighing: it is about right for what people have, runs none of their code, and ends on every object."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from nbaccel.namespace.nbytes import size_of, sizes_of, sizes_on_devices

MEGABYTE = 10**6


class Asked(AssertionError):
    """The user's code ran."""


def ask(*args: Any, **kwargs: Any) -> Any:
    raise Asked


class Hostile:
    """An object whose every answer is code of the user's."""

    __getattribute__ = __getattr__ = __len__ = __iter__ = __eq__ = __bool__ = __repr__ = ask  # type: ignore[assignment]
    __hash__ = __sizeof__ = __reduce__ = __getstate__ = __instancecheck__ = ask  # type: ignore[assignment]
    __class__ = __dict__ = property(ask)  # type: ignore[assignment]


class HostileDict(dict[str, Any]):
    items = values = keys = __iter__ = __len__ = __getitem__ = __sizeof__ = ask  # type: ignore[assignment]


class HostileList(list[Any]):
    __iter__ = __len__ = __getitem__ = __sizeof__ = ask  # type: ignore[assignment]


class HostileArray(np.ndarray):
    flat = dtype = base = nbytes = size = __array_interface__ = property(ask)  # type: ignore[assignment]


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise Asked


class HostileMeta(type):
    def __getattr__(cls, name: str) -> Any:
        raise Asked

    __eq__ = __hash__ = __instancecheck__ = __subclasscheck__ = ask  # type: ignore[assignment]


class OfHostileClass(metaclass=HostileMeta):
    def __init__(self) -> None:
        self.text = b"x" * MEGABYTE


def hostile_list() -> HostileList:
    made = HostileList()
    made.extend([b"x" * MEGABYTE])
    return made


def hostile_dict() -> HostileDict:
    made = HostileDict()
    dict.__setitem__(made, "text", b"x" * MEGABYTE)
    return made


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    text: bytes


class Attributed(list[int]):
    def __init__(self) -> None:
        self.best = torch.zeros(MEGABYTE // 4)


@pytest.mark.parametrize(
    "make",
    [
        hostile_list,
        hostile_dict,
        OfHostileClass,
        Attributed,
        lambda: Slotted(b"x" * MEGABYTE),
        lambda: np.zeros(MEGABYTE, np.uint8).view(HostileArray),
        lambda: np.array([b"x" * MEGABYTE], dtype=object).view(HostileArray),
        lambda: torch.zeros(MEGABYTE // 4).as_subclass(HostileTensor),
        lambda: types.MappingProxyType({"text": b"x" * MEGABYTE}),
        lambda: collections.OrderedDict(text=b"x" * MEGABYTE),
        lambda: collections.deque([b"x" * MEGABYTE]),
        lambda: collections.UserDict(text=b"x" * MEGABYTE),
        lambda: torch.zeros(MEGABYTE // 4).untyped_storage(),
        lambda: lambda text=b"x" * MEGABYTE: text,
    ],
)
def test_what_an_object_holds_is_weighed_and_none_of_its_code_runs(make: Callable[[], Any]) -> None:
    assert size_of({"value": [make()]}) == pytest.approx(MEGABYTE, rel=0.01)


def test_an_object_whose_every_answer_is_code_is_not_asked() -> None:
    hostile = Hostile()
    assert size_of([hostile, hostile]) < 1000
    assert sizes_of({"x": hostile}).keys() == {"x"}
    assert sizes_on_devices({"x": hostile}) == {}


class Proxy:
    """Stands for another object, as werkzeug's and transformers' do; to ask for it takes for ever."""

    __class__ = property(lambda self: time.sleep(3600))  # type: ignore[assignment]


class Endless(dict[int, int]):
    def items(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        return zip(itertools.count(), itertools.count(), strict=True)

    def __len__(self) -> int:
        return 10**18


class AnyName:
    def __getattr__(self, name: str) -> Any:
        return AnyName()


def ring() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


def chain(length: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(length):
        made = [made]
    return made


ENDLESS: dict[str, Callable[[], Any]] = {
    "a numpy integer": lambda: np.int64(3),
    "a numpy boolean": lambda: np.bool_(True),
    "a numpy time": lambda: np.datetime64("2026-01-01"),
    "a record": lambda: np.zeros(1, [("a", int), ("b", object)])[0],
    "records": lambda: np.zeros(5, [("a", int), ("b", object)]),
    "a 0-d array of an object": lambda: np.array({"a": 1}, dtype=object),
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1, 2]),
    "a generator": lambda: (number for number in itertools.count()),
    "a mock": MagicMock,
    "an object of any attributes": AnyName,
    "a proxy": Proxy,
    "a weak proxy": lambda: weakref.proxy(AnyName),
    "a mapping that never ends": Endless,
    "a ring": ring,
    "a chain": lambda: chain(200_000),
    "a large range": lambda: range(10**12),
    "a lock": threading.Lock,
    "a lazy layer": lambda: torch.nn.LazyLinear(3),
    "lists of lists": lambda: [[[0.5 + number] * 100 for number in range(300)] for _ in range(300)],
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("what", ENDLESS)
def test_weighing_ends(what: str) -> None:
    value = ENDLESS[what]()
    began = time.monotonic()
    assert 0 <= size_of(value) < 300 * MEGABYTE  # an estimate, where time was short
    sizes_on_devices({"value": value})
    assert time.monotonic() - began < 8


@pytest.mark.full
@pytest.mark.slow
def test_a_value_of_too_many_objects_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbaccel.namespace.nbytes._MOST_SECONDS", 30)  # on a busy machine
    rows = [[[float(number)] * 300 for number in range(300)] for _ in range(300)]
    # 90,000 lists of 300 pointers; of their floats 300 are different, and a sampled list is taken for others like it.
    assert 216 * MEGABYTE <= size_of(rows) < 300 * MEGABYTE


def test_what_was_met_counts_where_the_rest_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbaccel.namespace.nbytes._MOST_OBJECTS", 1000)
    assert 8000 <= size_of(chain(5000)) < 100_000


@pytest.mark.slow
def test_names_share_the_time() -> None:
    large = {
        f"x{number}": [[[float(number)] * 100 for number in range(100)] for _ in range(100)] for number in range(9)
    }
    began = time.monotonic()
    assert sizes_of(large | {"y": torch.zeros(1000)})["y"] == 4000, "the last one is weighed, too"
    assert time.monotonic() - began < 12


def test_an_interrupt_ends_the_weighing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr("nbaccel.namespace.nbytes.time", types.SimpleNamespace(monotonic=interrupted))
    with pytest.raises(KeyboardInterrupt):
        size_of([1])


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_tensors_without_memory_weigh_what_travels_of_them() -> None:
    assert size_of(torch.zeros(MEGABYTE, device="meta")) == 0
    sparse = torch.sparse_coo_tensor([[1, 2]], [1.0, 2.0], (10**9,), check_invariants=True)
    assert size_of(sparse) == 2 * (8 + 4)
    csr = torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 1.0], check_invariants=True)
    assert size_of(csr) == 3 * 8 + 2 * 8 + 2 * 4


def test_containers_that_change_under_the_scale_do_no_harm() -> None:
    names = {str(number): number for number in range(1000)}
    is_over = False

    def change() -> None:
        while not is_over:
            names["more"] = 1
            names.pop("more", None)

    other = threading.Thread(target=change)
    other.start()
    try:
        for _ in range(50):
            size_of(names)
    finally:
        is_over = True
        other.join()
