"""Peaks of memory, and the batch with which each rose."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from features.check.dry_run.test_step_times import Pass
from nbaccel.features.check.dry_run.memory_peaks import MemoryPeaks, read_peaks, read_room

MIB = 1 << 20


def test_a_peak_is_that_of_the_batch_with_which_it_rose() -> None:
    now = {"host": 10, "device": 100}
    records: list[Mapping[str, Any]] = []
    peaks = MemoryPeaks(records.append, lambda: now)
    peaks.begin()
    this = Pass()
    peaks.begin_pass(this)
    peaks.batch(this, 52.0, "longest")
    now["device"] = 900
    peaks.batch(this, 48.0, "between")
    now["host"] = 30
    peaks.batch(this, 4.0, "last")
    peaks.end_pass(this)
    peaks.end()
    longest = {"place": "train:3", "kind": "longest", "size": 52.0}
    between = {"place": "train:3", "kind": "between", "size": 48.0}
    expected = {"host": {"bytes": 30, "batch": between}, "device": {"bytes": 900, "batch": longest}}
    assert [record["peaks"] for record in records] == [expected, expected]
    assert records[-1]["batch"] == {"place": "train:3", "kind": "last", "size": 4.0}
    assert records[-1]["batch"] == {"place": "train:3", "kind": "last", "size": 4.0}, "the newest, also when it is over"


def test_what_rises_before_the_first_batch_is_of_none() -> None:
    records: list[Mapping[str, Any]] = []
    peaks = MemoryPeaks(records.append, lambda: {"host": 10})
    peaks.begin()
    peaks.end()
    host = {"bytes": 10, "batch": None}
    assert records == [{"kind": "peak", "peaks": {"host": host}, "batch": None}]


def test_the_peak_of_the_host_is_what_the_process_held_since_the_begin() -> None:
    """Where the system lets a process reset its peak; memory that is freed again counts."""
    held = torch.ones(64 * MIB)
    del held
    records: list[Mapping[str, Any]] = []
    peaks = MemoryPeaks(records.append)
    peaks.begin()
    at_first = read_peaks()["host"]
    held = torch.ones(32 * MIB)
    del held
    peaks.end()
    risen = records[0]["peaks"]["host"]["bytes"] - at_first
    assert 100 * MIB < risen < 200 * MIB


class FakeAllocator:
    """Bytes of torch's allocator on two devices, of which this rank uses the second one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_failed = False
        self.asked: list[int] = []
        self.stats = [_stats(0, 0), _stats(600, 1000)]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: self.stats[device])
        for name, which in (("max_memory_reserved", "peak"), ("memory_reserved", "current")):
            monkeypatch.setattr(torch.cuda, name, functools.partial(self._reserved, which))
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._ask)

    def _reserved(self, which: str, device: int) -> int:
        return int(self.stats[device]["reserved_bytes"]["all"][which])

    def _ask(self, device: int) -> tuple[int, int]:
        self.asked.append(device)
        if self.has_failed:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return 7000, 16_000


def _stats(allocated: int, reserved: int) -> dict[str, Any]:
    return {
        "allocated_bytes": {"all": {"peak": allocated, "current": 0}},
        "reserved_bytes": {"all": {"peak": reserved, "current": reserved}},
    }


def test_the_peak_of_the_device_is_that_of_the_fullest_and_the_room_is_what_others_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allocator = FakeAllocator(monkeypatch)
    records: list[Mapping[str, Any]] = []
    peaks = MemoryPeaks(records.append)
    peaks.begin()
    peaks.end()
    assert {name: peak["bytes"] for name, peak in records[0]["peaks"].items() if name != "host"} == {
        "device": 600,
        "device_reserved": 1000,
    }
    assert records[0]["room"] == 8000
    assert allocator.asked == [1], "the other device gets no context of this rank"


def test_a_rank_that_has_nothing_on_a_device_asks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch)
    allocator.stats = [_stats(0, 0), _stats(0, 0)]
    assert read_room() is None
    assert not allocator.asked


def test_a_device_that_has_failed_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch)
    allocator.has_failed = True
    assert read_room() is None
