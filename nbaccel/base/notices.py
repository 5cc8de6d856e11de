"""Notices: warnings that a notebook's filters do not hide, and errors that begin with the user's lines. Runs anywhere.

A frame is ours if its file lies below the package's folder. The module is small: what programs import beside
`Accelerator` uses it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

__all__ = ["PACKAGE_DIR", "are_ours", "briefly", "is_users", "show_as", "unignored", "without_our_frames"]

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""The folder of this package: frames of files below it are ours, all others are the user's or a library's."""

_ASYNCIO = os.path.join(os.path.dirname(contextlib.__file__), "asyncio")

_P = ParamSpec("_P")
_T = TypeVar("_T")


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


def without_our_frames(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make errors of `function` begin with the user's own lines, and show only these lines in a notebook."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _show_users_frames(error)
            _begin_with_users_frames(error)
            raise

    return called


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


def show_as(error: BaseException, lines: list[str], brief: list[str]) -> None:
    """Let IPython show `lines` for `error` instead of a traceback of the kernel's own frames.

    A class that says by itself how its errors are shown is asked, as for an error of the kernel (ipython#10516).

    Args:
        brief: Shown instead after ``%xmode Minimal``.
    """
    # IPython asks for this method before it formats a traceback itself.
    if not hasattr(type(error), "_render_traceback_"):
        error._render_traceback_ = functools.partial(_as_chosen, lines, brief)  # type: ignore[attr-defined]


def _as_chosen(lines: list[str], brief: list[str]) -> list[str]:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None:
        return lines
    if shell.call_pdb:
        _leave_out_the_debugger(shell)
        lines = [*lines, "%pdb: the error's frames were in its rank, which has ended; --pdb RANK asks there."]
    return brief if shell.InteractiveTB.mode == "Minimal" else lines


def _leave_out_the_debugger(shell: Any) -> None:
    """Keep ``%pdb on`` from opening at a frame of IPython, until the cell is over."""
    shell.call_pdb = False

    def again(*args: Any) -> None:
        shell.events.unregister("post_run_cell", again)
        shell.call_pdb = True

    shell.events.register("post_run_cell", again)


def _show_users_frames(error: BaseException) -> None:
    """Let IPython show `error`, which was raised in the kernel, with the user's frames only."""
    if not hasattr(error, "_render_traceback_"):
        # No closure: an error that leads to itself would keep its frames, and what they hold, from being freed.
        error._render_traceback_ = _current_error_without_our_frames  # type: ignore[attr-defined]


def _begin_with_users_frames(error: BaseException) -> None:
    """Remove the project's frames before the user's code in which `error` was raised; without such code all stay."""
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = are_ours([frame.f_code.co_filename for frame, _ in frames])
    trace = error.__traceback__
    for _ in range(ours.index(False) if False in ours else 0):
        assert trace is not None
        trace = trace.tb_next
    error.__traceback__ = trace


def _current_error_without_our_frames() -> list[str]:
    from IPython import get_ipython

    error = sys.exception() or sys.last_value  # that of the cell, or of `%tb`
    assert error is not None
    kept = None
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = are_ours([frame.f_code.co_filename for frame, _ in frames])
    for (frame, number), is_ours in zip(reversed(frames), reversed(ours), strict=True):
        if not is_ours:
            kept = TracebackType(kept, frame, frame.f_lasti, number)
    shell: Any = get_ipython()
    lines: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, kept)
    return lines
