"""G8: adapters beside weights of four bits, which bitsandbytes packs on the card: the base stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gpu.test_g8_device_maps import CASES

GROUP = "G8"

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.mark.takes(2)
def test_adapters_are_trained_saved_and_resumed_beside_four_bits(program: Callable[..., Any]) -> None:
    found = program("device_maps.py", "trained", among=CASES)  # in the process that has loaded torch
    if not found["is_real"]:
        pytest.skip("needs bitsandbytes: python -m pip install bitsandbytes")
    assert found["losses"][-1] < found["losses"][0]
    assert max(found["off"]) < 1e-6, found
    assert found["base"]
    assert len(found["names"]) == found["wanted"]
    assert all("lora" in name for name in found["names"])
