"""Writer: one save at a time in the background, of a checkpoint that does not change any more. Runs in ranks."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable

from nbaccel.base.task_end import before_results_leave

__all__ = ["Writer"]


class Writer:
    """Runs one piece of work at a time in the background; a new one waits until the one before has ended.

    A task's results wait for it, so that the record of a run has its last checkpoint, and so does a process that ends
    regularly; both warn of its error. A task that fails waits for work that needs no other rank. A pickled copy is
    idle.

    Attributes:
        is_awaited: The results of this task wait for it.
        is_lone: What was started last needs no other rank.
    """

    def __init__(self) -> None:
        self.is_awaited = False  # at the end of this task
        self.is_lone = True
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._pid = 0  # of the process that waits at its end

    def start(self, work: Callable[[], object], is_lone: bool = True) -> None:
        """Start `work` in the background, after waiting for the work before.

        Args:
            is_lone: The work needs no other rank.

        Raises:
            The error of the work before; `work` is not started then.
        """
        self.join()
        self.is_lone = is_lone

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._error = error

        self._wait_at_the_end()
        self._thread = threading.Thread(target=run, name="nbaccel-checkpoint")
        self._thread.start()

    def _wait_at_the_end(self) -> None:
        """Make the process wait before it shuts down the thread pools with which a checkpoint is written.

        Python joins threads that are no daemons only after that, and ``atexit`` comes later still.
        """
        if not self.is_awaited:
            self.is_awaited = True
            this = weakref.ref(self)
            before_results_leave(lambda: _finish(this), lambda: _forget_task(this))
        if self._pid != os.getpid():
            self._pid = os.getpid()
            threading._register_atexit(_finish, weakref.ref(self))  # type: ignore[attr-defined]

    def join(self) -> None:
        """Wait until nothing is being written.

        Raises:
            The error of the work, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __reduce__(self) -> tuple[type[Writer], tuple[()]]:
        return Writer, ()


def _finish(reference: weakref.ref[Writer]) -> None:
    writer = reference()
    if writer is None:
        return
    writer.is_awaited = False
    try:
        writer.join()
    except Exception as error:
        warnings.warn(f"the last checkpoint of this process was not written: {error}", stacklevel=1)


def _forget_task(reference: weakref.ref[Writer]) -> None:
    if (writer := reference()) is None:
        return
    if writer.is_lone:
        _finish(reference)
    writer.is_awaited = False  # the ranks of a task that failed end without waiting for each other
