"""The reporter's thread and a GPU: what it waits for, and what it must not disturb. The GPU is a stand-in."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nbaccel.base.events import Loss, Memory, Metric
from nbaccel.launching.ipc.ring import RingReader, RingWriter, make_ring
from nbaccel.launching.ipc.telemetry import read_event
from nbaccel.launching.rank import reporter as under_test
from nbaccel.launching.rank.reporter import MemoryMeter, Reporter


class Rank:
    """A reporter and the kernel's end of its ring."""

    def __init__(self) -> None:
        fd = make_ring()
        self._writer, self._reader = RingWriter(fd), RingReader(fd)
        os.close(fd)
        self.reporter = Reporter(self._writer, print, print, print)
        self.reporter.start()

    def heard(self, *kinds: type) -> list[Any]:
        """What was reported since the last time, of `kinds`."""
        self.reporter.flush()
        return [event for record in self._reader.read() if isinstance(event := read_event(record), kinds)]

    def close(self) -> None:
        self.reporter.close()
        self._writer.close()
        self._reader.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


class Driver:
    """Stands in for a library that ctypes opens: which one, and which thread asked for which mode."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.asked: list[tuple[bool, int]] = []

    def open(self, name: str) -> Driver:
        self.opened.append(name)
        return self

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        self.asked.append((threading.get_ident() == threading.main_thread().ident, mode._obj.value))
        return 0


def test_the_thread_leaves_graphs_alone_that_the_program_captures_once_there_is_cuda(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(ctypes, "CDLL", driver.open)
    rank.heard(Loss)
    assert driver.asked == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    rank.heard(Loss)
    rank.heard(Loss)
    assert driver.opened.count("libcuda.so.1") == 1  # NVML is opened as well, where torch is built for CUDA
    assert driver.asked == [(False, 1)]


def test_a_cuda_that_is_not_nvidias_is_as_it_was(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    rank.reporter(Loss(0.5, 3))
    assert rank.heard(Loss) == [Loss(0.5, 3)]


def test_a_rank_without_values_of_a_device_reports_its_memory_without_the_thread(rank: Rank) -> None:
    rank.reporter.rest()  # the thread does nothing, and who waited for it would do so for a second
    began = time.process_time(), time.monotonic()
    assert len(rank.heard(Memory)) == 1
    assert time.monotonic() - began[1] < 0.5 + time.process_time() - began[0]


class Stream:
    """One that computes its tensor only when somebody waits for it."""

    def __init__(self, tensor: torch.Tensor | None = None) -> None:
        self._tensor = tensor

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        assert self._tensor is not None
        self._tensor.fill_(2.0)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """A tensor that looks as if a stream of the program's own had still to compute it."""
    tensor = torch.zeros(())
    default, own = Stream(), Stream(tensor)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return tensor


@pytest.mark.parametrize("has_event", [False, True])
def test_a_loss_that_is_a_number_comes_after_those_that_wait_for_a_device(rank: Rank, has_event: bool) -> None:
    rank.reporter.rest()
    rank.reporter(Loss(torch.ones(()), 0))
    if has_event:
        rank.reporter(Loss(0.5, 1))
    else:
        rank.reporter.record_loss(0.5, 1)
    rank.reporter.wake()
    assert rank.heard(Loss) == [Loss(1.0, 0), Loss(0.5, 1)]


@pytest.mark.parametrize("kind", ["loss", "metric", "metric in a metric"])
def test_what_a_stream_of_the_programs_own_computes_is_read_when_it_is_there(
    rank: Rank, on_gpu: torch.Tensor, kind: str
) -> None:
    if kind == "loss":
        rank.reporter.record_loss(on_gpu, 3)
        assert rank.heard(Loss) == [Loss(2.0, 3)]
    else:
        inner = {"loss": on_gpu, "note": "text"}
        rank.reporter(Metric({"all": inner, "n": 1} if kind == "metric in a metric" else inner, 3))
        (metric,) = rank.heard(Metric)
        assert metric.values.get("all", metric.values)["loss"] == 2.0


def test_what_the_default_stream_computes_needs_no_event(
    rank: Rank, on_gpu: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = torch.cuda.default_stream(on_gpu.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: default)
    monkeypatch.setattr(Stream, "record_event", lambda stream: pytest.fail("an event in the step"))
    rank.reporter.record_loss(on_gpu, 3)
    assert rank.heard(Loss) == [Loss(0.0, 3)]


def test_a_graph_that_is_captured_has_no_loss_yet(
    rank: Rank, on_gpu: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    rank.reporter.record_loss(on_gpu, 3)
    rank.reporter(Metric({"loss": on_gpu}, 3))
    rank.reporter(Metric({"loss": 1.0}, 4))
    assert rank.heard(Loss, Metric) == [Metric({"loss": 1.0}, 4)]


def test_the_memory_of_devices_that_hold_something_is_added_up_without_flattening_all_counters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reserved = [0, 300, 500]

    def counters(index: int) -> dict[str, Any]:
        held = reserved[index]
        return {
            "allocated_bytes": {"all": {"current": held // 2, "peak": held}},
            "reserved_bytes": {"all": {"current": held, "peak": held + bool(held)}},
        }

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(reserved))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda index: pytest.fail("0.1 ms for each device"))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", counters)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Properties)
    memory = MemoryMeter().read()
    assert (memory.device_bytes, memory.device_reserved_bytes) == (400, 800)
    assert (memory.device_peak_bytes, memory.device_limit_bytes) == (802, 2 * 1000)


def test_the_most_memory_that_a_rank_has_held_is_told_after_it_is_free_again() -> None:
    meter = MemoryMeter()
    before = meter.read()
    held = mmap.mmap(-1, 64 << 20)  # not from the heap, where as much may be free already
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    assert meter.read().host_bytes > before.host_bytes + (48 << 20)
    held.close()
    after = meter.read()
    assert after.host_peak_bytes > before.host_bytes + (48 << 20) > after.host_bytes


class _Properties:
    total_memory = 1000


def test_the_reporter_waits_a_second_at_most_for_what_never_comes(
    rank: Rank, on_gpu: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(under_test, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(Stream, "synchronize", lambda stream: never.wait())
    rank.reporter.record_loss(on_gpu, 3)
    assert rank.heard(Loss) == []
    never.set()
    monkeypatch.setattr(under_test, "_PATIENCE_S", 1.0)
