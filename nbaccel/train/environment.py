"""Environment: variables for the length of a block, or none of them. Runs anywhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["clear_environment", "patch_environment"]


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Variables of the environment, upper-cased, for the length of the block.

    >>> with patch_environment(my_variable=3):
    ...     os.environ["MY_VARIABLE"]
    '3'
    """
    before = os.environ.copy()
    names = {name.upper(): str(value) for name, value in variables.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if name in names})


@contextmanager
def clear_environment() -> Iterator[None]:
    """No variable of the environment for the length of the block; what the block sets is gone afterwards.

    >>> with clear_environment():
    ...     len(os.environ)
    0
    """
    before = os.environ.copy()
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
