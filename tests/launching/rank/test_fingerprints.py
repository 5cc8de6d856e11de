"""Fingerprints of large tensors, whose bits are summed by words of 64 where they lie in a row."""

from __future__ import annotations

import pytest
import torch

from nbaccel.namespace.parameters import fingerprint

LARGE = 70_001  # more than what is also squared, and no whole number of words


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("size", [LARGE, LARGE + 7])
def test_equal_values_have_equal_fingerprints_and_a_changed_one_another(
    dtype: torch.dtype, offset: int, size: int
) -> None:
    values = torch.randn(size + offset).to(dtype)[offset:]
    before = fingerprint([values])
    whole = torch.empty(size + offset, dtype=dtype)
    whole[offset:] = values
    assert fingerprint([whole[offset:]]) == before
    whole[-1] += 1
    assert fingerprint([whole[offset:]]) != before


def test_tensors_that_do_not_lie_in_a_row_have_one_too() -> None:
    values = torch.randn(300, 300)
    before = fingerprint([values.t()])
    assert before == fingerprint([values.clone().t()])
    values[1, 2] += 1
    assert fingerprint([values.t()]) != before
