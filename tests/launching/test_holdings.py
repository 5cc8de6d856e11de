"""What the notebook holds on a device, and where somebody hears of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel.launching import kernel_models
from nbaccel.launching.kernel_models import KernelHolding, held_here
from nbaccel.launching.oom_restart import _said_of


def test_ipythons_own_names_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(kernel_models, "sizes_on_devices", asked.append)
    held_here({"model": 1, "get_ipython": 2, "Out": 3, "_hidden": 4})
    assert asked == [{"model": 1}]


def test_a_little_of_a_device_is_not_worth_a_word() -> None:
    little, much = KernelHolding("cuda:0", 40_000_000, 85 * 10**9), KernelHolding("cuda:0", 10**9, 85 * 10**9)
    assert _said_of([little, much]) == ["the notebook itself holds 1.0 of 85.0 GB on cuda:0"]
