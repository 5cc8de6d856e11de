"""Several runs in one thread: a place never stays empty while runs wait, and the end of one is no end of another."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from nbaccel.features.sweep.queued_runs import side_by_side
from nbaccel.launching.processes.interaction import Interrupts, Pollable
from nbaccel.launching.processes.run_coroutine import RunCoroutine, Wait


class Pretended:
    """A run of some turns without processes; `log` gets what happens to all of them."""

    saves_itself = False

    def __init__(self, name: str, turns: int, log: list[str], fails: bool = False) -> None:
        self.name = name
        self._turns = turns
        self._log = log
        self._fails = fails
        self._presses = 0

    def interrupt(self) -> None:
        self._presses += 1
        self._log.append(f"press {self.name}")

    def begin(self, place: int) -> RunCoroutine[None]:
        self._log.append(f"begin {self.name} at {place}")
        with closing(Interrupts()) as events, selectors.DefaultSelector() as selector:
            selector.register(events, selectors.EVENT_READ)
            events.interrupt()  # there is always something to do
            try:
                for _ in range(self._turns):
                    if self._presses:
                        break
                    yield Wait(selector, 0.0)
                if self._fails:
                    raise ValueError(self.name)
            except GeneratorExit:
                self._log.append(f"killed {self.name}")
                raise
        self._log.append(f"end {self.name}")


def test_a_place_never_stays_empty_while_runs_wait() -> None:
    log: list[str] = []
    runs = [Pretended(name, turns, log) for name, turns in zip("abcdef", (99, 2, 1, 3, 0, 2), strict=True)]
    assert side_by_side(runs, 2) == 0
    beside = [f"{what} {name}{' at 1' * (what == 'begin')}" for name in "bcdef" for what in ("begin", "end")]
    assert log == ["begin a at 0", *beside, "end a"]


def test_an_error_of_one_run_ends_the_processes_of_all() -> None:
    log: list[str] = []
    runs = [Pretended("a", 10**9, log), Pretended("b", 1, log, fails=True), Pretended("c", 1, log)]
    with pytest.raises(ValueError, match="b"):
        side_by_side(runs, 2)
    assert "killed a" in log
    assert "begin c at 1" not in log


def test_a_press_reaches_all_that_run_and_no_other_begins() -> None:
    log: list[str] = []

    class Presses(Pollable):
        def tick(self, now: float, interrupt: Callable[[], None]) -> None:
            if "begin b at 1" in log and "pressed" not in log:
                log.append("pressed")
                interrupt()

    runs = [Pretended(name, 10**9, log) for name in "abc"]
    assert side_by_side(runs, 2, [Presses()]) == 1
    assert [said for said in log if said.startswith("press ")] == ["press a", "press b"]
    assert "end a" in log
    assert "end b" in log
    assert not any(said.startswith("begin c") for said in log)


def test_the_keyboards_interrupt_is_a_press_and_its_handler_is_put_back() -> None:
    log: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    def one_after_an_interrupt() -> Iterator[Pretended]:
        yield Pretended("a", 10**9, log)
        os.kill(os.getpid(), signal.SIGINT)
        yield Pretended("b", 10**9, log)

    assert side_by_side(one_after_an_interrupt(), 2) == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert "press a" in log
