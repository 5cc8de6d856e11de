"""Errors as a notebook shows them: with the user's frames only, or with the lines of a rank's traceback. In the kernel.

Names that a plain cell does not load: functions that programs call (`launch`, `map`) and errors of ranks use them.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from nbaccel.base.notices import are_ours

__all__ = ["show_as", "without_our_frames"]


_P = ParamSpec("_P")


_T = TypeVar("_T")


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
