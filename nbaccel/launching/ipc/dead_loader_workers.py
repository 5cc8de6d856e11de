"""Find out how a worker process of a DataLoader ended. Runs in ranks; `launch.diagnosis` puts it into words.

torch reports of a dead worker at most its exit code or its signal, and often only that it is gone. The traceback of the
error holds the loader's iterator, which knows the processes.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
import sys
import traceback
import types
from multiprocessing import connection
from typing import Any, NamedTuple

__all__ = [
    "WorkerEnd",
    "dead_worker",
]

_TOLD = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is killed by signal: ([\w ]+)|exited unexpectedly)")
_TOLD_CODE = re.compile(r"with exit code (\d+)")
_END_S = 5.0
"""Seconds that a worker may take to end after it has closed its connection."""

_LOST = (ConnectionError, EOFError, FileNotFoundError)
"""Errors in a rank that fetches a batch of a worker that is gone, and whose socket may be gone too."""

_HAND_OVER = os.path.join("torch", "multiprocessing", "reductions.py")
_AFRESH = ("spawn", "forkserver")
_MOST_OBJECTS = 100_000
"""Number of objects of a loader that are searched for definitions of the notebook: some 20 ms."""


class WorkerEnd(NamedTuple):
    """The end of the first worker that died.

    Args:
        pid: Its process.
        exit_code: Negative for a signal; None if it is unknown.
        start_method: "fork", "spawn" or "forkserver"; empty if unknown.
        unknown_name: A class or function of the notebook that a worker with a new interpreter cannot import; empty if
            there is none.
    """

    pid: int | None = None
    exit_code: int | None = None
    start_method: str = ""
    unknown_name: str = ""


def dead_worker(error: BaseException, text: str) -> WorkerEnd | None:
    """Return the end of the DataLoader worker that `error` is about; None if it is about something else.

    Args:
        text: That of the error. It is called in the rank, where the processes are known. It waits up to 5 s for a
            worker that is about to end.
    """
    told = _TOLD.search(text)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if told is not None:
        end = _end_as_told(told, text)
    elif isinstance(error, _LOST) and any(map(_hands_over, frames)):
        end = WorkerEnd()
    else:
        return None
    iterator = next(filter(_is_iterator, (frame.f_locals.get("self") for frame in reversed(frames))), None)
    try:
        return end if iterator is None else _end_as_known(end, iterator)
    except Exception:  # the iterator is private to torch, and an error shall not hide the one that is described
        return end


def _end_as_told(told: re.Match[str], text: str) -> WorkerEnd:
    """Read the end from torch's own text."""
    pid = int(told[1].partition(",")[0])
    if told[2] is not None:
        number = next((sig for sig in signal.valid_signals() if signal.strsignal(sig) == told[2].strip()), None)
        return WorkerEnd(pid, None if number is None else -int(number))
    code = _TOLD_CODE.search(text)
    return WorkerEnd(pid, None if code is None else int(code[1]))


def _end_as_known(end: WorkerEnd, iterator: Any) -> WorkerEnd:
    """Complete `end` from the worker processes of `iterator`."""
    workers = [worker for worker in iterator._workers if end.pid in (None, worker.pid)]
    if all(worker.exitcode is None for worker in workers):
        ending = connection.wait([worker.sentinel for worker in workers], _END_S)
        for worker in workers:
            if worker.sentinel in ending:
                worker.join(_END_S)  # its files are closed a moment before its exit code is known
    worker = next((worker for worker in workers if worker.exitcode is not None), None)
    if worker is None:
        return end
    method = str(getattr(worker._popen, "method", ""))
    unknown = _name_of_the_notebook(iterator) if method in _AFRESH else ""
    exit_code = worker.exitcode if end.exit_code is None else end.exit_code
    return WorkerEnd(worker.pid, exit_code, method, unknown)


def _hands_over(frame: types.FrameType) -> bool:
    """Return whether `frame` receives a worker's batch; elsewhere a lost connection is a rank's or the user's."""
    return frame.f_code.co_filename.endswith(_HAND_OVER)


def _is_iterator(value: Any) -> bool:
    return type(value).__name__ == "_MultiProcessingDataLoaderIter"


def _name_of_the_notebook(iterator: Any) -> str:
    """Return the first class or function of the notebook that the iterator's workers have to import."""
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) or getattr(main, "__spec__", None):
        return ""  # a program: workers import it
    search = _NotebookNames(io.BytesIO())
    try:
        for part in (iterator._dataset, iterator._collate_fn, iterator._worker_init_fn):
            search.dump(part)
    except _Found as found:
        return str(found)
    except Exception:  # an object that cannot be pickled has caused another error
        return ""
    return ""


class _Found(Exception):
    """Ends the search; its text is the name, empty if there is none."""


class _NotebookNames(pickle.Pickler):
    """Pickles to nowhere to see every object, and stops at the first whose class or function is the notebook's."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._met = 0

    def persistent_id(self, value: Any) -> Any:
        self._met += 1
        if self._met > _MOST_OBJECTS:
            raise _Found
        thing = value if isinstance(value, (type, types.FunctionType)) else type(value)
        if thing.__module__ == "__main__":
            raise _Found(thing.__qualname__)
        is_leaf = hasattr(type(value), "__array__") or isinstance(value, (bytes, bytearray))
        return "leaf" if is_leaf else None
