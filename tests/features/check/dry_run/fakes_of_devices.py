"""A device that does its work later than it was given, in the place of CUDA: host and device have a clock each."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class FakeDevice:
    """now: the host's time, which only `host` and waiting move.  until: when the device has done all its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.until = 0.0
        self.waits = 0
        self.is_capturing = self.has_failed = False
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))

    def __call__(self) -> float:
        return self.now

    def host(self, seconds: float) -> None:
        """Let the program take so long."""
        self.now += seconds

    def give(self, seconds: float) -> None:
        """Give the device work that takes so long; giving it takes no time."""
        self.until = max(self.until, self.now) + seconds

    def wait(self) -> None:
        self.waits += 1
        if self.has_failed:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self.now = max(self.now, self.until)


class FakeEvent:
    """An event of `device`, which the device comes to once the work before it is done."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def record(self) -> None:
        if self._device.has_failed:
            raise RuntimeError("CUDA error: device-side assert triggered")
        self._at = max(self._device.now, self._device.until)

    def synchronize(self) -> None:
        self._device.wait()

    def elapsed_time(self, later: Any) -> float:
        return 1000 * float(later._at - self._at)
