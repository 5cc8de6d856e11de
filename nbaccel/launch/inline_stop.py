"""InlineStop: lets the user's interrupts stop a run in the kernel's own process. Runs there, in the main thread.

As for ranks (`ending.Stopping`): the first interrupt lets the program finish its step and stop before the next one; a
program outside of any step is interrupted after a second, and a step that takes too long is interrupted too. The second
interrupt acts at once.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbaccel.errors import RunStopped
from nbaccel.events import Event, StepEntered, StepsEnded
from nbaccel.launch.ending import FINISHING, NOTICE_AFTER_S, TICK_S, finishing_s

__all__ = ["InlineStop"]


class InlineStop:
    """A sink of step events that raises `RunStopped` when an interrupt stops the run, and the handler of SIGINT.

    notice: shows one line of the project to the user; called by another thread.
    has_acted: an interrupt was raised in the user's code.

    Interrupts act in the user's code alone, the block of `acts`. An interrupt that comes while the run is set up or
    cleaned up is kept until that is done. A program that catches its `KeyboardInterrupt` goes on, as it would without
    this class, and the next interrupt acts at once.

    Only the main thread can be interrupted. A handler that other code has installed, or an ignored SIGINT, is left as
    it is.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.has_acted = False
        self._notice = notice
        self._thread = threading.get_ident()
        self._count = 0
        self._is_open = False  # the user's code runs
        self._stop: RunStopped | None = None
        self._in_step = False
        self._entered_at = 0.0
        self._last_step_s = 0.0
        self._previous: Any = None
        self._is_over = False
        # Its `put` may be called by a handler that has interrupted another `put`; that of an Event may not.
        self._words: queue.SimpleQueue[bool] = queue.SimpleQueue()  # true for the first interrupt, false for the end

    # --- a sink for the steps of the run ---------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        if threading.get_ident() != self._thread:  # an event of a thread that the program has started
            return
        if isinstance(event, StepEntered):
            self._enter(event.step)
        elif isinstance(event, StepsEnded):
            self._in_step, self._entered_at = False, 0.0

    def _enter(self, step: int) -> None:
        if self._count and not self.has_acted:
            self.has_acted = True
            self._words.put(False)
            self._stop = RunStopped(f"stopped before step {step}")
            raise self._stop
        now = time.monotonic()
        self._last_step_s = now - self._entered_at if self._entered_at else 0.0
        self._in_step, self._entered_at = True, now

    # --- interrupts ------------------------------------------------------------------------------------------------

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Receive interrupts while the block runs.

        Raises:
            KeyboardInterrupt: an interrupt came that did not reach the user's code.
        """
        previous = signal.getsignal(signal.SIGINT)
        is_ours = isinstance(getattr(previous, "__self__", None), InlineStop)  # the handler of a run around this one
        if threading.current_thread() is not threading.main_thread() or not (
            is_ours or previous is signal.default_int_handler
        ):
            yield
            return
        watch = threading.Thread(target=self._see_to_it, name="nbaccel-interrupt", daemon=True)
        self._previous = previous
        signal.signal(signal.SIGINT, self._handle)
        try:
            watch.start()
            yield
        finally:
            self._words.put(False)
            if watch.ident is not None:
                watch.join()
            if signal.getsignal(signal.SIGINT) == self._handle:  # else the user's code has installed another for good
                signal.signal(signal.SIGINT, previous)
            self._is_over = True
        if self._count and not self.has_acted:
            raise KeyboardInterrupt("the run was interrupted")

    @contextmanager
    def acts(self) -> Iterator[None]:
        """Mark the block as the user's code.

        Raises:
            KeyboardInterrupt: an interrupt has stopped it, at a step or anywhere.
        """
        self._is_open = True
        try:
            if self._count:
                self._act()
            yield
        except RunStopped as stop:
            if stop is not self._stop:
                raise
            interrupt = KeyboardInterrupt(f"the run was interrupted, and {stop}")
            raise interrupt.with_traceback(stop.__traceback__) from None
        finally:
            self._is_open = False

    def _handle(self, number: int, frame: Any) -> None:
        if self._is_over:  # the user's code had saved this handler and restored it later
            signal.signal(number, self._previous)
            signal.raise_signal(number)
            return
        self._count += 1
        if not self._is_open:
            return
        if self._count > 1:
            self._act()
        self._words.put(True)

    def _act(self) -> None:
        self.has_acted = True
        self._words.put(False)
        raise KeyboardInterrupt("the run was interrupted")

    # --- in a thread of its own ------------------------------------------------------------------------------------

    def _see_to_it(self) -> None:
        """Wait for the first interrupt; repeat it for a program that does not reach a step in time."""
        if not self._words.get():
            return
        began, is_told = time.monotonic(), False
        while (now := time.monotonic()) < began + finishing_s(self._in_step, self._last_step_s):
            if self._in_step and not is_told and now > began + NOTICE_AFTER_S:
                is_told = True
                self._notice(FINISHING)
            try:
                self._words.get(timeout=TICK_S)
                return
            except queue.Empty:
                continue
        if signal.getsignal(signal.SIGINT) == self._handle:  # else the present handler has not received the first one
            signal.pthread_kill(self._thread, signal.SIGINT)
