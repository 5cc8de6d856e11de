"""Termination: what SIGTERM to the kernel means while ranks work. Runs in the kernel, in its main thread."""

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
    """SIGTERM ends the kernel as ever; a run that saves itself is stopped first, as by a press.

    saves_itself: asked when the signal comes.
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
