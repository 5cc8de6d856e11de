"""Ranks are ended by what they could do, not by what else the machine does; what one has trained is kept if it can."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from nbaccel.launching.ipc.control import ControlPage, RankPosition
from nbaccel.launching.ipc.reports import RankReport
from nbaccel.launching.processes.handle import WorkerHandle, WorkerProcess
from nbaccel.launching.processes.shutdown import Abort, StopAtStep


@dataclass
class WaitingProcess:
    """A process that waits for a processor for `waited_s`."""

    pid: int = 0
    waited_s: float = 0.0
    signals: list[int] = field(default_factory=list)

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def queued_s(self) -> float:
        return self.waited_s


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create(2)
    yield page
    page.close()


def test_a_rank_that_waits_for_a_processor_is_not_interrupted_for_it(page: ControlPage) -> None:
    processes = [WaitingProcess(waited_s=7.0), WaitingProcess()]
    members = [WorkerHandle(rank, process, None) for rank, process in enumerate(processes)]  # type: ignore[arg-type]
    abort = Abort(members, 10.0, page, wants_results=False)
    processes[0].waited_s += 0.35
    abort.advance(10.4)
    assert [process.signals for process in processes] == [[], [signal.SIGINT, signal.SIGKILL]]
    abort.advance(10.5)
    assert processes[0].signals == [signal.SIGINT]


def test_the_wait_of_a_process_is_what_the_system_counts() -> None:
    """The number only grows; a process that is gone has none."""
    this = WorkerProcess(os.getpid(), -1, lambda: 0)
    before = this.queued_s()
    time.sleep(0.001)
    assert 0 <= before <= this.queued_s() < time.clock_gettime(time.CLOCK_BOOTTIME)
    assert WorkerProcess(2**22 + 1, -1, lambda: 0).queued_s() == 0


class Recorder:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


def test_before_a_rank_is_terminated_those_that_it_may_wait_for_are_let_go(page: ControlPage) -> None:
    """Their connections close, so that it reports what it has trained; this holds however they came to their end."""
    channels, processes = [Recorder(), Recorder()], [WaitingProcess(), WaitingProcess()]
    members = [
        WorkerHandle(rank, process, channel)  # type: ignore[arg-type]
        for rank, (process, channel) in enumerate(zip(processes, channels, strict=True))
    ]
    members[1].report = RankReport("stopped", -1)
    page.write(0, RankPosition(5 << 24, 4 << 24, 9.0, 0.1, parked=False, in_step=True))
    stop = StopAtStep(members, 10.0, page)
    stop.advance(14.0)
    assert channels[1].sent == []  # the step may still end
    stop.advance(15.1)
    assert channels[1].sent == [{"op": "exit"}]
    assert processes[0].signals == []
    stop.advance(17.0)
    assert processes[0].signals == []  # it has time to report
    stop.advance(18.2)
    assert processes[0].signals == [signal.SIGTERM]
