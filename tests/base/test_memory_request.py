"""The numbers of a refused request for memory: as allocators state them, and as the frames of an error show them."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest
import torch

from nbaccel.base import memory_request as demand
from nbaccel.base.memory_limit import MemoryLimit
from nbaccel.base.memory_request import MemoryRequest
from nbaccel.launching.ipc.reports import ErrorLink, describe
from nbaccel.testing import MemLimit

GIB = 1 << 30
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 16.00 GiB of which 1.00 GiB is "
    "free. Process 7 has 3.00 GiB memory in use. Including non-PyTorch memory, this process has 12.00 GiB memory in "
    "use. {}Of the allocated memory 10.00 GiB is allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=…"
)
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "{} bytes."
)


def of(error: BaseException) -> MemoryRequest:
    found = MemoryRequest.of(error)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("allowed", "limit"), [("", 12.5), ("11.50 GiB allowed; ", 11.5), ("14.00 GiB allowed; ", 12.5)]
)
def test_cudas_text_tells_what_tensors_held_and_could_hold(allowed: str, limit: float) -> None:
    found = of(torch.OutOfMemoryError(CUDA.format(allowed)))
    assert (found.asked_bytes, found.used_bytes, found.limit_bytes) == (2 * GIB, 10 * GIB, int(limit * GIB))


def test_the_hosts_text_tells_the_request_and_the_system_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "host_limit", lambda: MemoryLimit(500, 600, 590))
    monkeypatch.setattr(demand, "unused_heap", lambda: 20)
    assert of(RuntimeError(HOST.format(64_000_000))) == MemoryRequest(64_000_000, 480, 600)


def test_a_memlimit_states_everything() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, MemLimit(1000):
        kept = torch.zeros(100)
        torch.zeros(200)
    assert len(kept) == 100
    found = of(caught.value)
    assert (found.asked_bytes, found.used_bytes, found.limit_bytes) == (800, 400, 1000)


def test_an_error_that_is_not_about_memory_has_none() -> None:
    assert MemoryRequest.of(ValueError("Tried to allocate 2.00 GiB")) is None


def test_models_and_optimizers_of_the_frames_are_weighed_once_also_as_attributes() -> None:
    model = torch.nn.Linear(9, 10, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 9)).sum().backward()
    optimizer.step()
    trainer = types.SimpleNamespace(network=model, number=3)

    def train(network: Any, holder: Any) -> None:
        raise RuntimeError(HOST.format(64))

    with pytest.raises(RuntimeError) as caught:
        train(model, trainer)
    found = of(caught.value)
    assert (found.parameters_bytes, found.gradients_bytes) == (360, 360)
    assert found.states_bytes == 2 * 360 + 4
    assert found.kept_bytes == 4 * 360 + 4


def test_a_lazy_object_in_a_frame_is_not_woken() -> None:
    class Lazy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise AssertionError("woken")

    lazy = Lazy()
    with pytest.raises(MemoryError) as caught:
        raise MemoryError(type(lazy).__name__)
    assert of(caught.value).parameters_bytes == 0


def test_a_report_goes_out_also_where_weighing_fails() -> None:
    class Odd(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            raise LookupError

    model = Odd()
    with pytest.raises(MemoryError) as caught:
        raise MemoryError(len(list(model.children())))
    assert [link["demand"] for link in describe(caught.value)] == [None]


def test_the_numbers_come_through_json() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught, MemLimit(1000):
        torch.zeros(300)
    (link,) = json.loads(json.dumps(describe(caught.value)))
    assert ErrorLink.from_json(link).demand == MemoryRequest(1200, 0, 1000)


def test_without_torch_nothing_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert of(MemoryError()).kept_bytes == 0


def test_noise_of_the_allocator_gives_nobody_up() -> None:
    larger, smaller = (MemoryRequest(100, used, 1000, parameters_bytes=50) for used in (921, 908))
    assert smaller.needed_for_one(512, larger, 1024) == 995
    assert not smaller.is_hopeless(512, larger, 1024)
    stuck = MemoryRequest(100, 920, 1000, parameters_bytes=50)
    assert stuck.is_hopeless(512, larger, 1024)
    assert not stuck.is_hopeless(513, larger, 1024), "so near, noise would draw the line"
