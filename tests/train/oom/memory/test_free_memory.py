"""`free_memory`: what is released, what is returned, and what the report says."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import pytest
import torch

import nbaccel
from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.oom.memory.free_memory import Freed, bytes_in_use, free, free_memory, release_memory
from nbaccel.train.oom.memory.holdings import Holding
from nbaccel.train.oom.memory.release import empty_caches


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A program of its own, whose variables are reported."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["nbaccel.free_memory", "release_memory", "free_memory", "clear"])
def test_criterion_29_one_none_per_object(name: str) -> None:
    accelerator = Accelerator()
    functions = {
        "nbaccel.free_memory": nbaccel.free_memory,
        "release_memory": release_memory,
        "free_memory": accelerator.free_memory,
        "clear": accelerator.clear,
    }
    a, b = functions[name](torch.ones(1), torch.ones(1))
    assert (a, b) == (None, None)
    assert functions[name]() == []
    assert functions[name](3) == [None]


def test_names_are_reported_with_their_bytes_and_those_handed_in_are_not(main: types.ModuleType) -> None:
    main.model, main.other = torch.nn.Linear(10, 10, bias=False), torch.zeros(50)
    accelerator = Accelerator()
    assert accelerator.last_free is None
    accelerator.free_memory(main.model)
    assert accelerator.last_free is not None
    assert accelerator.last_free.still_alive == [("other", 200)]
    main.alias = [main.model.weight]
    accelerator.free_memory(main.model)
    assert accelerator.last_free.still_alive == [("alias", 400), ("other", 200)], "that name will still hold it"


def test_what_was_prepared_is_not_held_by_the_accelerator(main: types.ModuleType) -> None:
    main.accelerator = accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(10, 10))
    made = weakref.ref(model)
    del model
    accelerator.free_memory()
    assert made() is None
    assert accelerator.last_free is not None
    assert accelerator.last_free.still_alive == []


def test_release_memory_lets_go_of_what_is_handed_in_and_the_rest_stays_prepared() -> None:
    accelerator = Accelerator()
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(3, 3)
    prepared, other, optimizer = accelerator.prepare(model, other, torch.optim.SGD(model.parameters()))
    made = weakref.ref(model)
    prepared, optimizer = release_memory(prepared, optimizer.optimizer)
    del model
    gc.collect()
    assert made() is None
    assert accelerator._lifecycle.everything_prepared == [other]


def test_bytes_of_the_host_come_back() -> None:
    """Small pieces with a live one above them: what malloc keeps until it is told to trim."""
    pieces = [torch.ones(8_000) for _ in range(4_000)]  # 128 MB, each below malloc's threshold for mmap
    pieces = pieces[-1:]
    freed = free().freed["cpu"]
    before = bytes_in_use()["cpu"]
    pieces = [torch.ones(8_000) for _ in range(4_000)]
    during = bytes_in_use()["cpu"]
    del pieces[:-1]
    empty_caches()
    after = bytes_in_use()["cpu"]
    assert during - before > 100e6
    assert after - before < 20e6, f"{freed} freed before"


def test_garbage_in_cycles_goes() -> None:
    class Node:
        pass

    node = Node()
    node.me, node.tensor = node, torch.ones(1)  # type: ignore[attr-defined]
    made = weakref.ref(node)
    gc.disable()
    try:
        del node
        assert made() is not None
        free_memory()
        assert made() is None
    finally:
        gc.enable()


REPORT = Freed(
    {"cpu": 2_000_000_000, "cuda:0": 900_000_000},
    {"cpu": 2_100_000_000, "cuda:0": 420_000_000, "cuda:1": 5},
    (Holding("model", 412_000_000, "cuda:0"), Holding("x", 96_000_000), Holding("model", 1_000_000)),
)


def test_a_report_adds_up_by_name_and_by_device() -> None:
    assert REPORT.freed == {"cpu": -100_000_000, "cuda:0": 480_000_000}
    assert REPORT.still_alive == [("model", 413_000_000), ("x", 96_000_000)]


def test_a_report_is_one_line() -> None:
    assert str(REPORT) == (
        "cuda:0: 480 MB freed, 420 MB in use, 8 MB of it under no name; cpu: 0 bytes freed, 2.1 GB in use; "
        "held by model 413 MB, x 96 MB"
    )
    assert str(Freed({}, {})) == "no name holds a tensor"
    many = Freed({}, {}, tuple(Holding(f"x{size}", size * 1000) for size in range(9, 0, -1)))
    assert str(many) == "held by x9 9 kB, x8 8 kB, x7 7 kB, x6 6 kB, x5 5 kB, x4 4 kB, 3 more names 6 kB"


def test_memory_is_freed_on_every_rank_and_holds_no_collective() -> None:
    def train() -> list[None]:
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        if accelerator.is_main_process:
            return accelerator.free_memory(model)
        return []

    assert run_ranks(2, train) == [[None], []]


class FakeDevices:
    """A torch with two GPUs, of which the second has been used; records the calls.

    on_first: how many bytes are reserved on the first.

    is_old: whether only the private name for emptying the cache of pinned memory is there, as before torch 2.13.
    """

    def __init__(self, is_old: bool) -> None:
        self.calls: list[str] = []
        self.on_first = 0
        self.cuda = self
        self.xpu = None
        self._C = types.SimpleNamespace(_cuda_clearCublasWorkspaces=lambda: self.calls.append("workspaces"))
        self.accelerator = types.SimpleNamespace()
        if is_old:
            self._C._host_emptyCache = lambda: self.calls.append("pinned")
        else:
            self.accelerator.empty_host_cache = lambda: self.calls.append("pinned")
        self.backends = types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: False))

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def memory_reserved(self, index: int) -> int:
        return [self.on_first, 100][index]

    def memory_allocated(self, index: int) -> int:
        return [0, 60][index]

    def device(self, index: int) -> FakeDevices:
        self.calls.append(f"enter {index}")
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None:
        self.calls.append("leave")

    def synchronize(self, index: int) -> None:
        self.calls.append(f"wait {index}")

    def empty_cache(self) -> None:
        self.calls.append("empty")


@pytest.mark.parametrize("is_old", [False, True])
def test_each_device_is_emptied_while_it_is_current_and_unused_ones_are_not_touched(
    is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDevices(is_old)
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    empty_caches()
    assert fake.calls == ["workspaces", "enter 1", "empty", "leave", "pinned"]
    assert {device: count for device, count in bytes_in_use().items() if device != "cpu"} == {"cuda:1": 60}


def test_no_device_is_emptied_before_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch empties the caches of all of them at once, and waits for the current one."""
    fake = FakeDevices(is_old=False)
    fake.on_first = 100
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    empty_caches()
    assert fake.calls == ["workspaces", "wait 1", "enter 0", "empty", "leave", "pinned"]
