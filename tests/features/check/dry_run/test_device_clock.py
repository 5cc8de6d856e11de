"""Times of a device that works later than it is asked to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from features.check.dry_run.fakes_of_devices import FakeDevice
from nbaccel.features.check.dry_run import device_clock
from nbaccel.features.check.dry_run.device_clock import DeviceMark, DeviceSpans, device_seconds, wait_for_device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice(monkeypatch)


def test_the_clock_waits_for_the_device(device: FakeDevice) -> None:
    device.give(5)
    assert device_seconds(device) == 5
    assert device_seconds(device) == 5


def test_a_span_has_the_work_that_was_given_in_it(device: FakeDevice) -> None:
    spans = DeviceSpans()
    first = DeviceMark(device)
    device.give(5)
    second = DeviceMark(device)
    device.host(1)
    third = DeviceMark(device)
    device.host(7)
    fourth = DeviceMark(device)
    assert device.waits == 0
    spans.add("given", first, second)
    spans.add("hidden", second, third)
    spans.add("idle", third, fourth)
    assert spans.seconds() == {"given": 5, "hidden": 0, "idle": 3}, "they add up to the time that has passed"
    assert device.waits == 1


def test_spans_are_read_in_between_so_that_they_stay_few(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "_MOST_SPANS", 3)
    spans = DeviceSpans()
    for _ in range(7):
        since = DeviceMark(device)
        device.give(2)
        spans.add("given", since, DeviceMark(device))
    assert device.waits == 2
    assert spans.seconds() == {"given": 14}


def test_without_cuda_spans_are_those_of_the_host() -> None:
    times = iter([1.0, 4.0])
    spans = DeviceSpans()
    spans.add("program", DeviceMark(lambda: next(times)), DeviceMark(lambda: next(times)))
    assert spans.seconds() == {"program": 3}


def test_a_span_in_which_the_program_begins_with_cuda_is_one_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 4.0])
    since = DeviceMark(lambda: next(times))
    FakeDevice(monkeypatch)
    spans = DeviceSpans()
    spans.add("program", since, DeviceMark(lambda: next(times)))
    assert spans.seconds() == {"program": 3}


def test_the_error_of_a_device_is_left_to_the_program(device: FakeDevice) -> None:
    spans = DeviceSpans()
    since, until = DeviceMark(device), DeviceMark(device)
    device.has_failed = True
    device.host(4)
    assert device_seconds(device) == 4
    failed = DeviceMark(device)
    spans.add("before", since, until)
    spans.add("after", until, failed)
    assert spans.seconds() == {"before": 0, "after": 4}


def test_the_error_of_the_last_lines_is_raised_at_the_end_of_the_program(device: FakeDevice) -> None:
    device.give(5)
    wait_for_device()
    assert device.now == 5
    device.has_failed = True
    with pytest.raises(RuntimeError, match="device-side assert"):
        wait_for_device()


def test_a_graph_that_is_captured_is_not_waited_for(device: FakeDevice) -> None:
    device.is_capturing = True
    device.give(5)
    assert device_seconds(device) == 0
    assert DeviceMark(device).event is None
    assert device.waits == 0


def test_a_process_without_torch_or_cuda_is_not_made_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError

    for name in ("synchronize", "Event", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert device_seconds(lambda: 3.0) == 3.0
    assert DeviceMark(lambda: 3.0).event is None
