"""Peaks of memory, and the batch with which each rose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dry_run.test_step_times import Pass
from nbaccel.dry_run.memory_peaks import MemoryPeaks, read_peaks

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
    assert [record["place"] for record in records] == ["train:3", ""]
    assert records[-1]["batch"] == {"place": "train:3", "kind": "last", "size": 4.0}
    assert records[-1]["batch"] == {"place": "train:3", "kind": "last", "size": 4.0}, "the newest, also when it is over"


def test_what_rises_before_the_first_batch_is_of_none() -> None:
    records: list[Mapping[str, Any]] = []
    peaks = MemoryPeaks(records.append, lambda: {"host": 10})
    peaks.begin()
    peaks.end()
    host = {"bytes": 10, "batch": None}
    assert records == [{"kind": "peak", "place": "", "number": 0, "peaks": {"host": host}, "batch": None}]


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
