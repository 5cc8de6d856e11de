"""Termination: handles SIGTERM to the kernel while ranks work. Runs in the kernel, in its main thread."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["stopped_before_termination"]


@contextmanager
def stopped_before_termination(saves_itself: Callable[[], bool]) -> Iterator[None]:
    """Stop a run that saves itself, as by a press, before SIGTERM ends the kernel.

    saves_itself: called when the signal comes; returns whether the run saves itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGTERM)
    has_come = False

    def end(number: int, frame: Any) -> None:
        nonlocal has_come
        if saves_itself() and not has_come:
            has_come = True
            os.kill(os.getpid(), signal.SIGINT)
        else:
            pass_on()

    def pass_on() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
        if has_come:
            pass_on()
