"""Notices: warnings about what a program would get wrong. Filters that a notebook has do not hide them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["unignored"]


@contextmanager
def unignored() -> Iterator[None]:
    """Within it a warning is not ignored: half of all notebooks say ``filterwarnings("ignore")``, and mean libraries'.

    Filters that make errors of warnings stay.
    """
    with warnings.catch_warnings():
        warnings.filters = [each for each in warnings.filters if each[0] != "ignore"]
        yield
