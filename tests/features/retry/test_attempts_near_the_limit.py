"""An attempt that failed while memory was nearly full is one that did not fit."""

from __future__ import annotations

import pytest

from nbaccel.base import memory_limit
from nbaccel.base.memory_limit import MemoryLimit
from nbaccel.features.retry.attempt import Attempt

ONE_DNN = ["could not create a primitive", "could not execute a primitive", "could not create a memory object"]


def fits(text: str) -> bool:
    """Return whether an attempt that raises this was about anything but memory, and so raises it."""

    def fails(batch_size: int) -> None:
        raise RuntimeError(text)

    made = Attempt(fails, 8, (), {})
    return made.shortage is None and made.error is not None and text in str(made.error)


@pytest.mark.parametrize("text", ONE_DNN)
def test_an_attempt_is_made_again_where_memory_was_nearly_full_and_nowhere_else(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "host_limit", lambda: MemoryLimit(99, 100))
    assert not fits(text)
    monkeypatch.setattr(memory_limit, "host_limit", lambda: MemoryLimit(50, 100))
    assert fits(text)
