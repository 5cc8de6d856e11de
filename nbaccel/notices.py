"""Notices: warnings about what a program would get wrong. Filters that a notebook has do not hide them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["unignored"]


@contextmanager
def unignored() -> Iterator[None]:
    """Within it ``filterwarnings("ignore")`` hides nothing: half of all notebooks have it, and mean libraries.

    Filters that name a message, a module or a category of their own stay, and those that make errors of warnings.
    """
    with warnings.catch_warnings():
        warnings.filters = [("always", *each[1:]) if _is_blanket(each) else each for each in warnings.filters]
        yield


def _is_blanket(each: Any) -> bool:
    action, message, category, module, line = each
    return action == "ignore" and category in (Warning, UserWarning) and not (message or module or line)
