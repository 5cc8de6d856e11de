"""All 26 faults have a test of their number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.mark.full
def test_every_fault_has_a_test_named_after_it() -> None:
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    numbers = {int(number) for text in texts for number in re.findall(r"^def test_fault_(\d\d)_", text, re.MULTILINE)}
    assert numbers == set(range(1, 27))
