"""Notices: warnings that a notebook's filters do not hide, and errors that begin with the user's lines. Runs anywhere.

A frame is ours if its file lies below the package's folder. The module is small: what programs import beside
`Accelerator` uses it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["PACKAGE_DIR", "are_ours", "briefly", "is_users", "unignored"]

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of this package: frames of files below it are ours, all others are the user's or a library's."""

_ASYNCIO = os.path.join(os.path.dirname(contextlib.__file__), "asyncio")


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


def briefly(error: BaseException) -> BaseException:
    """Make a notebook show `error` as one sentence: the project's own frames explain nothing to its reader."""
    if not hasattr(error, "_render_traceback_"):
        text = f"{type(error).__name__}: {error}"
        error._render_traceback_ = lambda: text.splitlines()  # type: ignore[attr-defined]
    return error


def is_users(filename: str) -> bool:
    """Return whether code of that file belongs neither to the project nor to a library, wherever that is installed."""
    return not filename.startswith(_not_theirs()) and not any(folder in filename for folder in _INSTALLED)


_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Packages lie outside of this Python's own folders too: by `pip install --user`, Debian's, a base environment's."""


@functools.cache
def _not_theirs() -> tuple[str, ...]:
    import sysconfig  # takes a millisecond, which an import of nbaccel need not

    libraries = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return PACKAGE_DIR, *libraries, "<frozen"


def are_ours(filenames: list[str]) -> list[bool]:
    """Return which frames of a traceback are the project's, or Python's own next to these that only pass a call on."""
    ours = [os.path.abspath(filename).startswith(PACKAGE_DIR) for filename in filenames]
    for at in [*range(len(ours)), *reversed(range(len(ours)))]:
        if _only_carries_on(filenames[at]):
            ours[at] = ours[at] or any(ours[max(0, at - 1) : at + 2])
    return ours


def _only_carries_on(filename: str) -> bool:
    """Return whether the file is a cell's `await` loop, a generator as a context, or a dataclass's ``__init__``."""
    return filename in ("<string>", contextlib.__file__) or os.path.dirname(filename) == _ASYNCIO
