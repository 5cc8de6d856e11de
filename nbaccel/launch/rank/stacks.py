"""Answers the kernel's request for the main thread's stack, in a file of the run's private folder. Runs in ranks.

Two parts of a rank can answer. A thread is asked through a FIFO: whatever a program does to its signals, the thread
answers, unless C code keeps Python's lock. faulthandler is asked by a signal: it needs no lock, but programs replace
handlers and block signals. The kernel therefore asks the thread first (`hangs.py`).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from types import FrameType
from typing import TextIO

from nbaccel.launch.hangs import ASK, question_path, stack_path

__all__ = ["tell_on_signal"]

_MOST_PLACES = 100
"""Largest number of places of a stack, the same as in faulthandler."""


def tell_on_signal(store_path: str, rank: int) -> object:
    """Begin to answer requests of the kernel. Return the open file, which the caller keeps."""
    file = open(stack_path(store_path, rank), "w", buffering=1, encoding="utf-8")  # noqa: SIM115  # for life
    file.write(f"main {_name_of_main()}\n")
    if signal.getsignal(ASK) is signal.SIG_DFL:  # else the notebook uses it
        faulthandler.register(ASK, file=file, all_threads=True, chain=False)
    path = question_path(store_path, rank)
    try:
        os.mkfifo(path, 0o600)
        questions = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # also for writing: else it ends with the first request
    except OSError:  # a file system without FIFOs; the signal is left
        return file
    threading.Thread(target=_answer, args=(questions, file), name="nbaccel-stacks", daemon=True).start()
    return file


def _answer(questions: int, file: TextIO) -> None:
    """Write the main thread's stack at every request; ends with the process."""
    # A signal that the program blocks in its own threads must not be delivered to this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while os.read(questions, 4096):
        os.write(file.fileno(), _stack().encode(errors="replace"))  # in one call, so that no other text comes between


def _stack() -> str:
    """Return the main thread's stack, in the form of faulthandler."""
    lines = [f"Thread {_name_of_main()} (most recent call first):"]
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and len(lines) <= _MOST_PLACES:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join([*lines, "", ""])


def _name_of_main() -> str:
    return f"{threading.main_thread().ident:#018x}"
