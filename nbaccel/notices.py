"""Warnings that a notebook's filters do not hide, and the folder by which our frames are known. Runs anywhere."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["PACKAGE_DIR", "unignored"]

PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""The folder of this package: frames of files below it are ours, all others are the user's or a library's."""


@contextmanager
def unignored() -> Iterator[None]:
    """Show warnings of the block in spite of ``filterwarnings("ignore")``, which half of all notebooks have.

    Filters that name a message, a module or a category stay, and those that turn warnings into errors.
    """
    with warnings.catch_warnings():
        warnings.filters = [("always", *each[1:]) if _is_blanket(each) else each for each in warnings.filters]
        yield


def _is_blanket(each: Any) -> bool:
    action, message, category, module, line = each
    return action == "ignore" and category in (Warning, UserWarning) and not (message or module or line)
