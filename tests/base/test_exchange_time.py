"""The sums of a rank's time in exchanges, with clocks that the tests move."""

from __future__ import annotations

import pytest

from nbaccel.base import exchange_time as under_test
from nbaccel.base.exchange_time import EVERY, MEASURED, ExchangeClock


class Clocks:
    """Stands in for the module `time`."""

    wall_s = busy_s = 100.0

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.busy_s

    def move(self, wall_s: float, busy_s: float) -> None:
        self.wall_s += wall_s
        self.busy_s += busy_s


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(under_test, "time", clocks)
    return clocks


def train(clock: ExchangeClock, clocks: Clocks, exchange_s: float, slower: float, steps: int = 40) -> None:
    """Steps of 2 ms of computation, half of it in the backward, with an exchange in it, on a machine of other jobs."""
    for _ in range(steps):
        clocks.move(0.001 * slower, 0.001)
        clock.backwards += 1
        is_measured = clock.backwards % EVERY == MEASURED
        began = clocks.perf_counter(), clocks.thread_time()
        clocks.move(0.001 * slower + exchange_s, 0.001)
        if is_measured:
            clock.measured.append((*began, clocks.perf_counter(), clocks.thread_time(), clock.backwards))


@pytest.mark.parametrize("slower", [1.0, 4.0])
@pytest.mark.parametrize("exchange_s", [0.0, 0.006])
def test_what_a_backward_does_not_compute_is_exchange_on_a_busy_machine_too(
    clocks: Clocks, exchange_s: float, slower: float
) -> None:
    clock = ExchangeClock()
    train(clock, clocks, exchange_s, slower)
    assert clock.read().seconds == pytest.approx(40 * exchange_s, rel=0.02, abs=1e-6)
    assert clock.read().of_s == pytest.approx(40 * (0.002 * slower + exchange_s))


def test_exchanges_of_ours_are_added_to_those_of_torch(clocks: Clocks) -> None:
    clock = ExchangeClock()
    clock.seconds += 0.5
    clocks.move(0.5, 0.0)
    train(clock, clocks, 0.006, 1.0)
    assert clock.read().seconds == pytest.approx(0.5 + 40 * 0.006, rel=0.02)


def test_another_task_begins_with_nothing(clocks: Clocks) -> None:
    clock = ExchangeClock()
    clock.seconds += 1.0
    train(clock, clocks, 0.006, 1.0)
    clock.begin()
    clocks.move(1.0, 0.0)
    assert (clock.read().seconds, clock.read().of_s) == (0.0, 1.0)


def test_what_was_measured_is_summed_up_once_and_not_kept(clocks: Clocks) -> None:
    clock = ExchangeClock()
    train(clock, clocks, 0.006, 1.0)
    assert len(clock.measured) == 5
    once = clock.read().seconds
    assert not clock.measured
    assert clock.read().seconds == once
