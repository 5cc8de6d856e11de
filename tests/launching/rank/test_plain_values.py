"""Numbers and short texts that a rank leaves travel in its report, and arrive as they were."""

from __future__ import annotations

from typing import Any

import pytest

from nbaccel import launch
from nbaccel.base.world import World

_PAIRS = [
    (0.1 + 0.2, -0.0),
    (float("nan"), float("-inf")),
    (2**63 - 1, -(2**63)),
    (10**5000, True),
    ("\u00e4\ud800\n\x00", "x" * 2000),
    (None, 5e-324),
]


@pytest.mark.parametrize("pair", _PAIRS, ids=lambda pair: f"{type(pair[0]).__name__}-{type(pair[1]).__name__}")
def test_a_value_arrives_as_it_was(pair: tuple[Any, Any]) -> None:
    found = launch(lambda: pair[World.from_env().rank], 2, cpu=True).values
    assert [type(value) for value in found] == [type(value) for value in pair]
    for value, expected in zip(found, pair, strict=True):
        assert value.hex() == expected.hex() if isinstance(expected, float) else value == expected
