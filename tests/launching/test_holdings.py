"""What the notebook holds on a device, and where somebody hears of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nbaccel.errors import FeatureMissing
from nbaccel.launching import kernel_holdings
from nbaccel.launching.kernel_holdings import KernelHolding, held_here, movable
from nbaccel.launching.oom_restart import _said_of


def test_ipythons_own_names_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(kernel_holdings, "sizes_on_devices", asked.append)
    held_here({"model": 1, "get_ipython": 2, "Out": 3, "_hidden": 4})
    assert asked == [{"model": 1}]


def test_a_little_of_a_device_is_not_worth_a_word() -> None:
    little, much = KernelHolding("cuda:0", 40_000_000, 85 * 10**9), KernelHolding("cuda:0", 10**9, 85 * 10**9)
    assert _said_of([little, much]) == ["the notebook itself holds 1.0 of 85.0 GB on cuda:0"]


def test_without_what_moves_models_nothing_is_offered_and_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(name: str) -> None:
        raise FeatureMissing(f"{name} belongs to a folder that is not there")

    monkeypatch.setattr(kernel_holdings, "feature", lacks)
    aside = movable({}, {0}, is_asked_for=False)
    assert (aside.names, aside.bytes_on("cuda:0")) == ({}, 0)
    with aside.freed(print):
        pass
    with pytest.raises(FeatureMissing, match=r"^free_kernel belongs to"):
        movable({}, {0}, is_asked_for=True)
