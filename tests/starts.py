"""Start methods for tests of the core, which run where a folder of features is not there, too."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from nbaccel.features import modules_of

__all__ = ["ZYGOTE", "needs_clean_start"]


def _is_there() -> bool:
    try:
        return all(find_spec(module) for module in modules_of("ranks from a clean process").values())
    except ModuleNotFoundError:  # its folder
        return False


needs_clean_start = pytest.mark.skipif(not _is_there(), reason="nbaccel/features/clean_start is not there")

ZYGOTE = pytest.param("zygote", marks=needs_clean_start)
"""The start method "zygote", as a parameter."""
