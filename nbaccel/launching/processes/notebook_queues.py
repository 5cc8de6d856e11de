"""Read the notebook's queues while ranks end, so that what they have put there arrives whole. Runs in the kernel.

A process that has put items into an `mp.Queue` ends when a thread of it has written them into a pipe, and a pipe takes
64 kB: the rest waits for a reader, https://docs.python.org/3/library/multiprocessing.html#programming-guidelines. Here
the reader is a later cell of the notebook, which waits for the ranks. A rank that was ended meanwhile left half of an
item, on which each later `get` would wait for ever. So the items of ranks that do not end are taken out, and put back
in their order, by a thread of the notebook, when no rank is left.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from nbaccel.launching.processes.handle import WorkerHandle

__all__ = ["NotebookQueues"]

_SLOW_S = 0.3
"""Seconds after its release from which on a rank may be waiting for a reader; most end in less."""

_POLL_S = 0.05
_LAST_S = 5.0


class NotebookQueues:
    """The queues of this process, during the end of one run.  Nothing is read unless ranks take long to end."""

    def __init__(self) -> None:
        self._taken: list[tuple[Any, bytes]] = []
        self._is_over = threading.Event()
        self._reader: threading.Thread | None = None

    def tick(self, now: float, members: Sequence[WorkerHandle]) -> None:
        """Begin to read, in a thread, if a rank that was released does not end."""
        if self._reader is not None:
            return
        released = [each.released_at for each in members if each.released_at is not None and not each.has_ended]
        if released and now > min(released) + _SLOW_S and (queues := _queues()):
            # A rank that is killed in the middle of an item would keep the reader: it is no thread that must end.
            self._reader = threading.Thread(target=self._read, args=(queues,), name="nbaccel-queues", daemon=True)
            self._reader.start()

    def close(self) -> None:
        """Put the items back; called when no rank is left."""
        if self._reader is None:
            return
        self._is_over.set()
        self._reader.join(_LAST_S)
        self._reader = None
        taken, self._taken = self._taken, []
        for queue, item in taken:
            _put_back(queue, item)

    def _read(self, queues: Sequence[Any]) -> None:
        while True:
            is_last = self._is_over.is_set()
            for queue in queues:
                with suppress(OSError, EOFError):  # the notebook has closed it
                    while queue._poll(0):
                        with queue._rlock:
                            if queue._poll(0):
                                self._taken.append((queue, queue._recv_bytes()))
            if is_last:
                return
            self._is_over.wait(_POLL_S)


def _queues() -> list[Any]:
    """Return the queues that were made in this process, as multiprocessing itself keeps them for its forks."""
    module = sys.modules.get("multiprocessing.queues")
    util = sys.modules.get("multiprocessing.util")
    if module is None or util is None:
        return []
    return [each for each in list(util._afterfork_registry.values()) if isinstance(each, module.Queue)]


def _put_back(queue: Any, item: bytes) -> None:
    """Do what `put` does, without counting the item again."""
    from multiprocessing.reduction import ForkingPickler

    value = ForkingPickler.loads(item)
    with queue._notempty:
        if queue._thread is None:
            queue._start_thread()
        queue._buffer.append(value)
        queue._notempty.notify()
