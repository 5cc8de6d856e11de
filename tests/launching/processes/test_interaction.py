"""What is looked at beside a run, and how a run is pressed to its end from elsewhere than the keyboard."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable

import pytest

from nbaccel.launching.ipc.spec import Devices, LaunchSpec, Start
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.processes.interaction import Interrupts, Pollable, uninterrupted
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.output.screens import ConsoleScreen


def wait_for_ever() -> None:
    threading.Event().wait()


def run(launcher: Launcher, function: Callable[[], None], *beside: Pollable) -> RankResults:
    spec = LaunchSpec(FunctionTask(function), Devices(2), Start("fork", "a test"))
    _, ended = launcher.run(spec, RunObservers(ConsoleScreen(), beside=beside))
    ended.close()
    return ended


class AtOnce(Pollable):
    """Does something as soon as the ranks work."""

    def __init__(self, act: Callable[[Callable[[], None]], None]) -> None:
        self.act = act
        self.ticks = 0

    def due_in(self, now: float) -> float | None:
        return 0.0 if not self.ticks else None

    def tick(self, now: float, interrupt: Callable[[], None]) -> None:
        self.ticks += 1
        if self.ticks == 1:
            self.act(interrupt)


def test_what_is_beside_a_run_can_stop_it(launcher: Launcher) -> None:
    ended = run(launcher, wait_for_ever, AtOnce(lambda interrupt: interrupt()))
    assert ended.is_interrupted
    assert [report and report.status for report in ended.reports] == ["stopped", "stopped"]


def test_another_thread_can_stop_a_run_and_a_press_after_its_end_does_nothing(launcher: Launcher) -> None:
    kept: list[Callable[[], None]] = []

    def press_from_a_thread(interrupt: Callable[[], None]) -> None:
        kept.append(interrupt)
        thread = threading.Thread(target=interrupt)
        thread.start()
        thread.join()

    assert run(launcher, wait_for_ever, AtOnce(press_from_a_thread)).is_interrupted
    kept[0]()
    assert not run(launcher, lambda: None, AtOnce(lambda interrupt: None)).is_interrupted


def test_two_presses_end_ranks_that_do_not_listen(launcher: Launcher) -> None:
    def be_deaf() -> None:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()

    def press_twice(interrupt: Callable[[], None]) -> None:
        interrupt()
        interrupt()

    ended = run(launcher, be_deaf, AtOnce(press_twice))
    assert ended.is_interrupted
    assert ended.killed_by_us == [True, True]


def test_what_a_handler_of_the_notebook_raises_ends_a_run_as_a_press_does() -> None:
    def fire(number: int, frame: object) -> None:
        raise TimeoutError("time is up")

    before = signal.signal(signal.SIGALRM, fire)
    interrupts = Interrupts()
    try:
        with interrupts.of_the_keyboard():
            signal.raise_signal(signal.SIGALRM)
            interrupts.read()
            assert interrupts.count == 1
            assert str(interrupts.raised) == "time is up"
            with pytest.raises(TimeoutError):  # the second one, at once
                signal.raise_signal(signal.SIGALRM)
        assert signal.getsignal(signal.SIGALRM) is fire
    finally:
        interrupts.close()
        signal.signal(signal.SIGALRM, before)


def test_a_signal_waits_until_an_uninterrupted_block_is_done() -> None:
    done: list[str] = []

    def fire(number: int, frame: object) -> None:
        raise TimeoutError("time is up")

    before = signal.signal(signal.SIGALRM, fire)
    try:
        with pytest.raises(TimeoutError), uninterrupted():
            signal.raise_signal(signal.SIGALRM)
            done.append("all of it")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done == ["all of it"]
