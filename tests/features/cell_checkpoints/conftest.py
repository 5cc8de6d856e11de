"""Cells of these tests look for functions among objects of the test alone."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def objects_of_the_test(few_objects: None) -> None:
    """See `few_objects`."""
