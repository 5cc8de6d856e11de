"""Outlet of a rank's events, and the measure of its memory. Runs in ranks; waits for nothing, makes no CUDA context.

`Reporter` decides where an event goes. Steps go to the gate and waits to the watch, at once. Events for the kernel go
into the rank's ring: at once if they hold only plain numbers, and by a thread, a few times per second, if tensors or
gauges have to be read and the memory sampled (`MemoryMeter`).
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
import resource
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from nbaccel.base.events import (
    CallEntered,
    CallsEnded,
    CollectiveEntered,
    Event,
    ExchangeLeft,
    Gauge,
    GroupRenewed,
    Loss,
    Memory,
    Metric,
    Reports,
    SaveAsked,
    SaveDue,
    SavesItself,
    SavingAtStop,
    Sink,
    StepEntered,
    StepsEnded,
    TimeLimit,
    Waiting,
    Writing,
    reports,
)
from nbaccel.base.exchange_time import exchange_clock
from nbaccel.base.hardware import usable_memory
from nbaccel.launching.ipc.ring import RingWriter
from nbaccel.launching.ipc.telemetry import LOSS, write_event, write_loss

__all__ = [
    "MemoryMeter",
    "Reporter",
]

_EVERY_S = 0.25
_MOST_WAITING = 10_000
_LOSSES_PER_READ = 500
_PATIENCE_S = 1.0  # at the end of a run, with a device that may never answer
_PLAIN = (int, float, str, type(None))
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Reporter:
    """The rank's outlet.

    A tensor is kept until the thread reads it, so that the training step does not wait for a device. The thread reads
    in the device's default stream; for tensors of another stream it waits for an event. While 10,000 wait, because the
    device does not finish, new ones are dropped; they count as lost.
    """

    def __init__(self, ring: RingWriter, gate: Sink, watch: Sink, grace: Sink) -> None:
        self._ring = ring
        self._losses: deque[tuple[float, Loss, Sequence[Any]]] = deque()  # the time, and what to wait for
        self._metrics: deque[tuple[float, Metric, Sequence[Any]]] = deque()
        self._gauges: list[Gauge] = []
        self._is_being_read = threading.Lock()  # held by the thread that reads
        self._is_wanted = threading.Event()
        self._is_written = threading.Event()
        self._is_over = threading.Event()
        self._is_at_work = threading.Event()
        self._is_at_work.set()
        self._memory = MemoryMeter()
        self._record: Sink = self._write
        self._routes: dict[type[Event], Sink] = {
            StepEntered: gate,
            StepsEnded: gate,
            CallEntered: gate,
            CallsEnded: gate,
            SaveDue: gate,
            SaveAsked: gate,
            SavingAtStop: gate,
            Writing: gate,
            TimeLimit: gate,
            SavesItself: grace,
            CollectiveEntered: watch,
            ExchangeLeft: watch,
            GroupRenewed: watch,
            Waiting: watch,
            Loss: self._loss,
            Metric: self._metric,
            Gauge: self._gauges.append,  # type: ignore[dict-item]  # routed here are gauges
        }
        self._own_routes = dict(self._routes)
        self.enter_step = Reports(gate).enter_step  # the gate's own method: it runs in every step, and saves a call
        self._writes_losses = True  # this process reports for the rank, and no sink gets its losses first
        self._is_closed = False

    def begin(self) -> None:
        """Take events from now on. Called in the process whose events these are."""
        _silence_in_children(self)
        exchange_clock.begin()

    def read(self) -> None:
        """Read what waits, and the memory, in a thread from now on. A rank that lasts less than `_EVERY_S` needs none.

        A second call changes nothing.
        """
        if self._is_being_read.acquire(blocking=False):
            try:
                _thread.start_new_thread(self._run, ())  # a `Thread` copies some 30 pages of the kernel's
            except RuntimeError:  # no thread is left: the report tries it again
                self._is_being_read.release()

    def start(self) -> None:
        """Call `begin` and `read`."""
        self.begin()
        self.read()

    def __call__(self, event: Event) -> None:
        self._routes.get(type(event), self._record)(event)

    def record_loss(self, value: Any, step: int) -> None:
        """Report a `Loss`, which is in every step, without an event object if the value goes straight into the ring."""
        if type(value) is float and self._writes_losses and not self._losses:
            self._ring.write_number(LOSS, step, value)
        else:
            self(Loss(value, step))

    def flush(self) -> None:
        """Write all reports so far, and the present state of gauges and memory. It waits a second at most.

        The thread does it where there is something of a device to read: that would wait for ever if the device waits
        for a rank that is gone.
        """
        if not (self._losses or self._metrics or self._gauges or _uses_cuda()):
            self._write(self._memory.read())
            self._write(exchange_clock.read())
            return
        self._is_written.clear()
        self._is_wanted.set()
        self.read()
        self._is_written.wait(_PATIENCE_S)

    def route(self, kind: type[Event], sink: Sink | None) -> None:
        """Pass events of `kind` to `sink` first, where it may raise; None for no sink."""
        report = self._own_routes.get(kind, self._record)

        def both(event: Event) -> None:
            if sink is not None:
                sink(event)
            report(event)

        self._routes[kind] = report if sink is None else both
        if kind is Loss:
            self._writes_losses = sink is None

    def rest(self) -> None:
        """Read nothing until `wake`: the rank has nothing to do."""
        self._is_at_work.clear()

    def wake(self) -> None:
        exchange_clock.begin()
        self._is_at_work.set()

    def close(self) -> None:
        """Call `flush`, and stop reading. A rank need not call it: its process ends anyway."""
        self.flush()
        self._is_closed = True
        self._is_wanted.set()
        self._is_over.wait(_PATIENCE_S)
        self._fall_silent()

    def _run(self) -> None:
        is_apart = False
        while not self._is_closed:
            self._is_at_work.wait()
            is_wanted = self._is_wanted.wait(_EVERY_S)
            self._is_wanted.clear()
            if not is_apart and _uses_cuda():
                _let_others_capture()
                is_apart = True
            self._write_losses()
            self._write_metrics()
            self._look_at_gauges()
            with suppress(Exception):  # of a device that does not answer any more
                self._write(self._memory.read())
            if is_wanted:
                self._write(exchange_clock.read())
                self._is_written.set()
        self._is_over.set()

    def _fall_silent(self) -> None:
        self._record = self.enter_step = _nothing
        self._writes_losses = False
        if reports.sink is self:
            reports.lead_to(self)
        self._routes = dict.fromkeys(self._routes, _nothing)

    # --- in the step -------------------------------------------------------------------------------------------

    def _write(self, event: Event) -> None:
        write_event(self._ring, event)

    def _loss(self, event: Event) -> None:
        assert isinstance(event, Loss)
        value, losses = event.value, self._losses
        if not losses and type(value) is float:
            write_loss(self._ring, event.step, value)
        elif len(losses) < _MOST_WAITING:  # behind those that wait already: losses keep their order
            arrivals = _arrivals(value) if getattr(value, "is_cuda", False) else ()
            if arrivals is not None:
                losses.append((time.monotonic(), event, arrivals))
        else:
            self._ring.leave_out()

    def _metric(self, event: Event) -> None:
        assert isinstance(event, Metric)
        metrics = self._metrics
        if not metrics and all(isinstance(value, _PLAIN) for value in event.values.values()):
            write_event(self._ring, event)
        elif len(metrics) < _MOST_WAITING:
            arrivals = _arrivals(event.values)
            if arrivals is not None:
                metrics.append((time.monotonic(), event, arrivals))
        else:
            self._ring.leave_out()

    # --- away from it ------------------------------------------------------------------------------------------

    def _write_losses(self) -> None:
        while self._losses:
            losses = list(islice(self._losses, _LOSSES_PER_READ))  # still in the queue: no later loss may overtake them
            with suppress(Exception):  # of a device that failed; the step will say so where the user can see it
                for _, _, arrivals in losses:
                    for arrival in arrivals:
                        arrival.synchronize()
                numbers = _numbers([loss.value for _, loss, _ in losses])
                for (at, loss, _), number in zip(losses, numbers, strict=True):
                    write_loss(self._ring, loss.step, number, at)
            for _ in losses:
                self._losses.popleft()

    def _write_metrics(self) -> None:
        while self._metrics:
            at, metric, arrivals = self._metrics[0]
            with suppress(Exception):  # as above
                for arrival in arrivals:
                    arrival.synchronize()
                write_event(self._ring, metric, at)
            self._metrics.popleft()

    def _look_at_gauges(self) -> None:
        for gauge in list(self._gauges):
            try:
                event = gauge.read()
            except Exception:  # its values change meanwhile; it is read again next time
                continue
            if event is None:
                self._gauges.remove(gauge)
            else:
                self._write(event)


def _nothing(*event: Any) -> None:
    pass


def _silence_in_children(reporter: Reporter) -> None:
    """Make children that the user's code forks report nothing: only the rank itself reports."""
    reference = weakref.ref(reporter)

    def silence() -> None:
        in_child = reference()
        if in_child is not None:
            in_child._fall_silent()

    os.register_at_fork(after_in_child=silence)


def _uses_cuda() -> bool:
    """Return whether this process has begun to use CUDA; called while another thread may be importing torch."""
    is_initialized = getattr(getattr(sys.modules.get("torch"), "cuda", None), "is_initialized", None)
    return is_initialized is not None and is_initialized()


def _let_others_capture() -> None:
    """Make CUDA ignore what other threads are capturing when it checks the calls of this thread.

    By default a thread that waits for a device or takes memory on it invalidates a graph that the program captures
    meanwhile (`torch.cuda.graph`). torch's own watchdog of NCCL does the same as this function, see
    ``cuThreadExchangeStreamCaptureMode`` in the reference of CUDA's driver.
    """
    with suppress(OSError, AttributeError):  # not NVIDIA's
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


def _arrivals(value: Any) -> Sequence[Any] | None:
    """Return events to wait for before another thread reads tensors in `value`; None if there is nothing to read.

    Tensors that the device's default stream computes need none: the thread reads in it, too. While the program captures
    a graph nothing is computed yet.
    """
    if isinstance(value, Mapping):
        found = [_arrivals(child) for child in value.values()]
        return None if None in found else [arrival for arrivals in found for arrival in arrivals or ()]
    if isinstance(value, _PLAIN) or not getattr(value, "is_cuda", False):
        return ()
    cuda = sys.modules["torch"].cuda
    stream = cuda.current_stream(value.device)
    if stream == cuda.default_stream(value.device):
        return ()
    return None if cuda.is_current_stream_capturing() else [stream.record_event()]


def _numbers(values: Sequence[Any]) -> list[float]:
    """Return losses as numbers, the sum if one has several elements. Those on one device are waited for once."""
    scalars = [value.sum() if getattr(value, "ndim", 0) else value for value in values]
    kinds = {(getattr(scalar, "device", None), getattr(scalar, "dtype", None)) for scalar in scalars}
    device, _ = next(iter(kinds))
    if len(kinds) > 1 or device is None or device.type == "cpu":
        return [float(scalar) for scalar in scalars]
    numbers: list[float] = sys.modules["torch"].stack(scalars).tolist()
    return numbers


_STATM = "/proc/self/statm"


@functools.cache
def _limit_bytes() -> int | None:
    """Return the memory of this machine or container, from a dozen files; a forked rank has it from its kernel."""
    return usable_memory().total_bytes or None


class MemoryMeter:
    """Reads this process's memory; some 20 us without a device, as much again for each.

    Host bytes come from the kernel's own counts, device bytes from torch's caching allocator. Not covered: devices
    other than CUDA's (and those that ROCm presents as CUDA's), and memory that libraries take outside of the allocator.

    Example:
        >>> MemoryMeter().read().host_bytes > 0
        True
    """

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._limit_bytes = _limit_bytes()

    def read(self) -> Memory:
        with open(_STATM, "rb", buffering=0) as statm:
            resident_pages = int(statm.read().split()[1])
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        host_bytes = resident_pages * self._page_bytes
        return Memory(host_bytes, max(host_bytes, peak_bytes), self._limit_bytes, *self._device_bytes())

    def _device_bytes(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Return allocated, reserved, most ever reserved and total bytes of the devices with this process's tensors."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None, None, None, None
        rows = [_of_device(torch, index) for index in range(torch.cuda.device_count())]
        used = [row for row in rows if row[2]]  # the rank's own device, or all devices that a model is spread over
        allocated, reserved, peak, total = (sum(column) for column in zip(*used, strict=True)) if used else (0, 0, 0, 0)
        return allocated, reserved, peak, total or None


def _of_device(torch: Any, index: int) -> tuple[int, int, int, int]:
    stats = torch.cuda.memory_stats_as_nested_dict(index)  # nested: flattening and sorting it takes most of the time
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return (
        allocated["current"],
        reserved["current"],
        reserved["peak"],
        torch.cuda.get_device_properties(index).total_memory,
    )
