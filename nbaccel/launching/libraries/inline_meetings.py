"""Meets other libraries for the length of a run in this process: their trainers report. Runs in the kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from nbaccel.features import named
from nbaccel.launching.ipc.import_hooks_meanwhile import when_found_meanwhile
from nbaccel.launching.libraries import actions_of

__all__ = ["foreign_trainers_report"]


_INLINE = "inline runs with "


@contextmanager
def foreign_trainers_report(has_stopped: Callable[[], bool]) -> Iterator[None]:
    """Make the trainers that the block uses report, as they do in ranks.

    Args:
        has_stopped: Returns whether an interrupt of the user's has acted in the block.
    """
    with ExitStack() as undo:
        asks = [(name, partial(actions_of, f"{_INLINE}{name}", undo, has_stopped, name)) for name in named(_INLINE)]
        undo.enter_context(when_found_meanwhile(asks))
        yield
