"""What the kernel does with the user's objects before a run ends when the user or the limit wants it."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from nbaccel.launching.processes.alarm import endable
from nbaccel.launching.processes.interaction import Pollable
from nbaccel.namespace.payload import pack


class Impatient(Pollable):
    """Presses as soon as it can."""

    def begins(self, interrupt: Callable[[], None]) -> None:
        self.interrupt = interrupt
        interrupt()


def in_thread(act: Callable[[], Any]) -> BaseException | None:
    """What `act` raises in a thread of its own."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def for_ever() -> None:
    while True:
        time.sleep(0.01)


def stubborn() -> None:
    """Code of a user who catches everything, a few times."""
    for _ in range(3):
        with contextlib.suppress(BaseException):
            for_ever()
    for_ever()


@pytest.mark.parametrize("work", [lambda: time.sleep(3600), for_ever, stubborn])
def test_the_limit_ends_what_takes_longer(work: Callable[[], None]) -> None:
    before = signal.getsignal(signal.SIGINT)
    began = time.monotonic()
    with (
        pytest.raises(TimeoutError, match=r"the time limit of 0.1 s was over before a rank had its work$"),
        endable(0.1),
    ):
        work()
    assert time.monotonic() - began < 15
    assert signal.getsignal(signal.SIGINT) is before


def test_the_limit_says_where_it_was() -> None:
    def work() -> None:
        try:
            time.sleep(3600)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted while x was packed") from None

    with pytest.raises(TimeoutError, match="had its work: interrupted while x was packed"), endable(0.05):
        work()


def test_the_limit_ends_work_in_another_thread() -> None:
    def work() -> None:
        with endable(0.1):
            for_ever()

    assert isinstance(in_thread(work), TimeoutError)


def test_a_press_from_beside_is_an_interrupt() -> None:
    def work() -> None:
        with endable(None, [Impatient()]):
            for_ever()

    assert type(in_thread(work)) is KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        work()


class Endless:
    def __reduce__(self) -> Any:
        return list, (), None, itertools.count()


def test_packing_what_never_ends_is_ended_in_any_thread() -> None:
    def work() -> None:
        with endable(0.2):
            pack({"endless": Endless()})

    with pytest.raises(TimeoutError, match="interrupted while endless was packed for another process"):
        work()
    assert "endless was packed" in str(in_thread(work))


def test_an_interrupt_while_the_block_is_left_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    join = threading.Thread.join

    def interrupted_join(thread: threading.Thread, timeout: float | None = None) -> None:
        signal.raise_signal(signal.SIGINT)
        join(thread, timeout)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), endable(60):
        patch.setattr(threading.Thread, "join", interrupted_join)
    assert signal.getsignal(signal.SIGINT) is before


def test_nothing_happens_once_the_work_is_done() -> None:
    class Later(Pollable):
        def begins(self, interrupt: Callable[[], None]) -> None:
            self.interrupt = interrupt

    for _ in range(30):
        later = Later()
        with contextlib.suppress(TimeoutError), endable(0.005, [later]):
            time.sleep(0.004)
        later.interrupt()
        time.sleep(0.001)


def test_an_interrupt_of_the_user_is_theirs() -> None:
    with pytest.raises(KeyboardInterrupt), endable(60):
        signal.raise_signal(signal.SIGINT)
        for_ever()


def test_an_error_of_the_work_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError), endable(60):
        1 / 0  # noqa: B018


def test_a_profiled_program_gets_on_after_an_interrupt_of_another_thread() -> None:
    """In a program of its own: the defect that this is about cannot be ended from inside."""
    program = """
import sys, threading, time
from nbaccel.launching.processes.alarm import endable

def work():
    try:
        with endable(0.1):
            while True:
                time.sleep(0.01)
    except TimeoutError:
        pass

thread = threading.Thread(target=work)
thread.start()
thread.join()
sys.setprofile(lambda *event: None)
print(sum(number for number in range(100)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout == "4950\n", done.stderr
