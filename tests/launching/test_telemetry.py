"""What ranks report reaches the listeners in the kernel: all of it, from every rank, whatever becomes of the rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest

from nbaccel.base.events import (
    Event,
    Gauge,
    Listener,
    Loss,
    Memory,
    Metric,
    OutOfMemory,
    Phase,
    Progress,
    RecordsLost,
    StepEntered,
    emit,
    reports,
)
from nbaccel.base.hardware import Survey
from nbaccel.launching.api import launch
from nbaccel.launching.inline import run_inline
from nbaccel.launching.ipc.ring import RingWriter
from nbaccel.launching.ipc.spec import Devices, LaunchSpec, Start
from nbaccel.launching.ipc.telemetry import Rings, Telemetry, write_event, write_loss
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.preflight import threads_per_rank
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.run import Run
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.output.screens import ConsoleScreen


class _Heard(Listener):
    """Keeps what it is fed."""

    def __init__(self) -> None:
        self.all: list[tuple[int, float, Event]] = []
        self.ticks = 0

    def feed(self, rank: int, at: float, event: Event) -> None:
        self.all.append((rank, at, event))

    def tick(self, now: float) -> None:
        self.ticks += 1

    def of(self, kind: type[Event], rank: int = 0) -> list[Any]:
        return [event for who, _, event in self.all if who == rank and isinstance(event, kind)]


class _Broken(_Heard):
    """Fails at the first event."""

    def feed(self, rank: int, at: float, event: Event) -> None:
        super().feed(rank, at, event)
        raise ZeroDivisionError("the axis has no length")


def run(
    launcher: Launcher, function: Any, *listeners: Listener, world_size: int = 2, start_method: str = "fork"
) -> Run:
    spec = LaunchSpec(
        FunctionTask(function), Devices(world_size), Start(start_method, ""), threads=threads_per_rank(2, world_size)
    )
    record, ended = launcher.run(spec, RunObservers(ConsoleScreen(), listeners=listeners))
    ended.close()
    return record


def test_every_rank_is_heard_in_its_order_with_the_time(launcher: Launcher, start_method: str) -> None:
    def train() -> None:
        from nbaccel.base.world import World

        rank = World.from_env().rank
        for step in range(1000):
            emit(Loss(rank + step / 2, step))
        emit(Metric({"accuracy": 0.5, "note": "ü", "nothing": None}, step=7))
        emit(OutOfMemory(step=3, message="x" * 500))
        emit(Phase("fold 2"))

    heard, before = _Heard(), time.monotonic()
    run(launcher, train, heard, start_method=start_method)
    for rank in range(2):
        assert heard.of(Loss, rank) == [Loss(rank + step / 2, step) for step in range(1000)]
        assert heard.of(Metric, rank) == [Metric({"accuracy": 0.5, "note": "ü", "nothing": None}, 7)]
        assert heard.of(OutOfMemory, rank) == [OutOfMemory(step=3, message="x" * 500)]
        assert heard.of(Phase, rank) == [Phase("fold 2")]
    assert all(before < at < time.monotonic() for _, at, _ in heard.all)
    assert heard.ticks >= 1
    assert heard.of(RecordsLost) == []


def test_tensors_are_numbers_on_arrival(launcher: Launcher) -> None:
    def train() -> None:
        import torch

        emit(Loss(torch.tensor(0.5, requires_grad=True).detach(), 0))
        emit(Loss(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), 1))
        emit(Loss(float("nan"), 2))
        emit(Metric({"first": torch.tensor(2)}, 0))
        emit(Metric({"second": 1}, 0))
        emit(Metric({"third": torch.ones(2)}, 0))

    heard = _Heard()
    run(launcher, train, heard, world_size=1)
    assert sorted((loss.step, str(loss.value)) for loss in heard.of(Loss)) == [(0, "0.5"), (1, "3.0"), (2, "nan")]
    assert [metric.values for metric in heard.of(Metric)] == [
        {"first": 2.0},
        {"second": 1},
        {"third": "tensor([1., 1.])"},
    ]


def test_the_memory_of_every_rank_is_known_also_after_a_short_run(launcher: Launcher) -> None:
    def hold() -> int:
        block = bytearray(b"x" * (64 << 20))
        return len(block)

    heard = _Heard()
    run(launcher, hold, heard)
    limit_bytes = Survey.take().ram.total_bytes
    for rank in range(2):
        last = heard.of(Memory, rank)[-1]
        first = heard.of(Memory, rank)[0]
        assert last.host_peak_bytes >= last.host_bytes > 0
        assert last.host_peak_bytes >= first.host_bytes
        assert last.host_peak_bytes > 64 << 20
        assert last.host_limit_bytes == limit_bytes
        assert last.device_bytes is None


def test_a_gauge_is_looked_at_until_it_has_nothing_to_show(launcher: Launcher) -> None:
    def count() -> int:
        looks = iter(range(1, 3))
        is_through = False

        def look() -> Progress | None:
            nonlocal is_through
            batch = next(looks, None)
            is_through = batch is None
            return None if is_through else Progress(batch=batch or 0)

        def fails() -> Progress | None:
            raise RuntimeError("changed while it was looked at")

        emit(Gauge(fails))
        emit(Gauge(look))
        while not is_through:
            time.sleep(0.01)  # ended by the reporter's thread, which looks four times per second
        return 0

    heard = _Heard()
    run(launcher, count, heard, world_size=1)
    assert [progress.batch for progress in heard.of(Progress)] == [1, 2]


def test_the_last_records_of_a_rank_that_was_killed_are_read(launcher: Launcher, start_method: str) -> None:
    def die() -> None:
        for step in range(100):
            emit(Loss(1.0, step))
        emit(Metric({"accuracy": 0.5}, 99))
        os.kill(os.getpid(), signal.SIGKILL)

    heard = _Heard()
    record = run(launcher, die, heard, world_size=1, start_method=start_method)
    assert record.error is not None
    assert [loss.step for loss in heard.of(Loss)] == list(range(100))
    assert heard.of(Metric) == [Metric({"accuracy": 0.5}, 99)]


def test_a_child_that_the_function_forked_reports_nothing(launcher: Launcher) -> None:
    def train() -> None:
        emit(Phase("rank"))
        child = os.fork()
        emit(Phase("child" if child == 0 else "parent"))
        reports.enter_step(os.getpid(), 0)
        reports.record_loss(float(child), 0)
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)

    heard = _Heard()
    run(launcher, train, heard, world_size=1)
    assert heard.of(Phase) == [Phase("rank"), Phase("parent")]
    assert [loss.value > 0 for loss in heard.of(Loss)] == [True]


def test_a_listener_that_fails_is_left_out_and_the_run_goes_on(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    def train() -> int:
        for step in range(10):
            emit(Loss(1.0, step))
        return 7

    broken, heard = _Broken(), _Heard()
    record = run(launcher, train, broken, heard)
    assert record.error is None
    assert len(broken.all) == 1
    assert len(heard.of(Loss, 0)) == len(heard.of(Loss, 1)) == 10
    assert capfd.readouterr().err == (
        "_Broken failed and is off for the rest of this run, which goes on "
        "(ZeroDivisionError: the axis has no length)\n"
    )


def test_a_run_in_the_kernels_own_process_is_heard_too() -> None:
    def train() -> None:
        step = 0
        while heard.ticks < 2:  # the second is half a second after the first
            emit(StepEntered(step))
            emit(Loss(1.0, step))
            step += 1
        emit(Metric({"accuracy": 0.5}, step))

    heard, threads = _Heard(), threading.active_count()
    run_inline(LaunchSpec(FunctionTask(train), Devices(1), Start("inline", "")), [heard])
    (metric,) = heard.of(Metric)
    assert metric.values == {"accuracy": 0.5}
    assert heard.of(Memory)
    lost = heard.of(RecordsLost)[-1].count if heard.of(RecordsLost) else 0
    assert metric.step - lost <= len(heard.of(Loss)) <= metric.step
    assert threading.active_count() == threads


def test_a_run_in_the_kernels_own_process_has_a_history_and_leaves_nothing_of_ours_behind() -> None:
    def train() -> None:
        emit(Metric({"loss": 0.5}, 3))

    assert list(launch(train, 1, start_method="inline").history.rows) == [{"step": 3, "loss": 0.5}]
    heard = _Heard()
    with pytest.raises(ZeroDivisionError):
        run_inline(LaunchSpec(FunctionTask(lambda: (train(), 1 // 0)), Devices(1), Start("inline", "")), [heard])
    assert heard.of(Metric) == [Metric({"loss": 0.5}, 3)]
    train()
    assert len(heard.of(Metric)) == 1


def test_what_was_lost_is_said_with_its_number() -> None:
    heard = _Heard()
    rings = Rings()
    telemetry = Telemetry(rings, [heard], print)
    fd = rings.add()
    writer = RingWriter(fd)
    os.close(fd)
    for step in range(20_000):
        write_loss(writer, step, 1.0)
    telemetry.read(now=5.0)
    kept = len(heard.of(Loss))
    assert heard.all[-1] == (0, 5.0, RecordsLost(20_000 - kept))
    write_event(writer, Phase("after"))
    telemetry.read(now=6.0)
    assert heard.all[-1][2] == Phase("after")  # said once
    writer.close()
    rings.close()


def test_reading_waits_half_a_second_between_rounds() -> None:
    heard = _Heard()
    telemetry = Telemetry(Rings(), [heard], print)
    for now in (10.0, 10.2, 10.4, 10.5, 10.6):
        telemetry.tick(now)
    assert heard.ticks == 2
    assert telemetry.due_in(10.6) == pytest.approx(0.4)


STOPPED_KERNEL = """
import os, sys
from nbaccel.base.events import Loss, Metric, RecordsLost, emit
from nbaccel.launching.launcher import default_launcher
from nbaccel.launching.ipc.spec import Start
from nbaccel.output.screens import ConsoleScreen
from nbaccel.launching.ipc.spec import Devices, LaunchSpec
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.run import Run

go, done = map(int, sys.argv[1:])

def train():
    import torch
    os.write(done, b"r")             # ready: stop the kernel
    os.read(go, 1)                   # it stands still
    for step in range(20_000):       # several times around the ring
        emit(Loss(torch.tensor(1.0), step))
        emit(Metric({"a": 1.0}, step))
    os.write(done, b"d")             # only now may it go on

class Count:
    arrived, lost = 0, {}
    def feed(self, rank, at, event):
        self.arrived += type(event) in (Loss, Metric)
        if type(event) is RecordsLost:
            self.lost[rank] = event.count
    def tick(self, now):
        pass

count = Count()
spec = LaunchSpec(FunctionTask(train), Devices(2), Start("fork", ""))
default_launcher().run(spec, RunObservers(ConsoleScreen(), listeners=[count]))[1].close()
print(count.arrived, sum(count.lost.values()))
"""


@pytest.mark.slow
def test_ranks_go_on_while_the_kernel_is_stopped() -> None:
    """No clock decides here: the kernel stays stopped until both ranks are through."""
    import subprocess

    go_read, go_write = os.pipe()
    done_read, done_write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED_KERNEL, str(go_read), str(done_write)],
        pass_fds=[go_read, done_write],
        stdout=subprocess.PIPE,
        text=True,
    ) as kernel:
        os.close(done_write)
        ready = b"".join(os.read(done_read, 1) for _ in range(2))
        kernel.send_signal(signal.SIGSTOP)
        os.write(go_write, b"gg")
        done = b"".join(os.read(done_read, 1) for _ in range(2))
        kernel.send_signal(signal.SIGCONT)
        arrived, lost = map(int, kernel.communicate(timeout=30)[0].split())
    for fd in (go_read, go_write, done_read):
        os.close(fd)
    assert (ready, done) == (b"rr", b"dd")
    assert arrived > 0
    assert lost > 40_000
    assert arrived + lost >= 80_000  # every record came or is counted; the samples of memory are lost or come too


def test_eight_ranks_may_write_four_thousand_records_between_two_readings_and_lose_none() -> None:
    """A thousand per second each, and a kernel that comes eight times too late."""
    heard = _Heard()
    rings = Rings()
    telemetry = Telemetry(rings, [heard], print)
    fds = [rings.add() for _ in range(8)]
    writers = [RingWriter(fd) for fd in fds]
    for reading in range(3):
        for writer in writers:
            for step in range(4000):
                write_loss(writer, 4000 * reading + step, 1.0)
        telemetry.read(float(reading))
    for rank, (writer, fd) in enumerate(zip(writers, fds, strict=True)):
        assert [loss.step for loss in heard.of(Loss, rank)] == list(range(12_000))
        writer.close()
        os.close(fd)
    assert heard.of(RecordsLost) == []
    rings.close()
