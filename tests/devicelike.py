"""A process group that behaves as NCCL's does once it is aborted, on the CPU. Used in ranks.

Each rank has a queue, as a device has streams: collectives run there one after the other, by gloo, and so does what the
program puts behind them. A collective whose peer has failed or gone waits for ever. After `abort` all that waits is
complete, without an error, and with garbage in its tensors; what is queued behind it runs on that.
"""

from __future__ import annotations

import ctypes
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbaccel.base import aborting

NAME = "devicelike"
GARBAGE = float("nan")
_LONG = timedelta(minutes=5)
_FROZEN_S = 3.0
"""How long a process is frozen at most, in a test that would fail."""


class _Work(dist._Work):  # type: ignore[name-defined,misc]
    """One thing in the queue of `group`. Whoever waits for it hears no interrupt, as in the CUDA runtime."""

    def __init__(self, group: DeviceLike, tensors: list[Tensor]) -> None:
        super().__init__()
        self._group = group
        self._tensors = tensors
        self._done = threading.Event()
        self._future: Any = torch.futures.Future()

    def finish(self) -> None:
        self._done.set()
        self._future.set_result(self._tensors)

    def is_completed(self) -> bool:
        """While the group is aborted, waits for a lock that the abort holds, with Python's in its hand."""
        self._group.freeze_while_aborting()
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta = _LONG) -> bool:
        with _deaf():
            self._done.wait()
        return True

    def get_future(self) -> Any:
        return self._future


class DeviceLike(dist.ProcessGroup):
    """gloo behind a queue."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size)
        self._gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout=_LONG)
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._kept: deque[_Work] = deque(maxlen=64)  # torch 2.6 keeps only its half of one that Python drops
        self._aborted = threading.Event()
        self.is_stuck = False  # whether an abort does not come back
        self.abort_takes_s = 0.0  # at least, before anything ends by it
        self.ends_with_peers = False  # whether a regular end waits for the peers', who do not come
        self._aborting_until = 0.0
        self._ends = threading.Lock()
        self.abort_waits_for: DeviceLike | None = None  # a group whose abort this one's needs
        self.issued = 0
        threading.Thread(target=self._run, name="devicelike", daemon=True).start()

    # -- what torch asks for

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._collective(tensors, lambda copies: self._gloo.allreduce(copies, options))

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._collective(tensors, lambda copies: self._gloo.broadcast(copies, options))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Any:
        def exchange(copies: list[Tensor]) -> Any:
            return self._gloo.allgather([copies], [tensor.clone() for tensor in inputs])

        return self._collective(outputs[0], exchange)

    def _allgather_base(self, output: Tensor, rows: Tensor, options: Any = None) -> Any:
        sent = rows.clone()
        return self._collective([output], lambda copies: self._gloo._allgather_base(copies[0], sent))

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def _reduce_scatter_base(self, output: Tensor, rows: Tensor, options: Any = None) -> Any:
        sent = rows.clone()
        return self._collective([output], lambda copies: self._gloo._reduce_scatter_base(copies[0], sent, options))

    reduce_scatter_single = _reduce_scatter_base  # its name from torch 2.13 on

    def barrier(self, opts: Any = None) -> Any:
        return self._collective([torch.ones(1)], lambda copies: self._gloo.allreduce(copies))

    def _get_sequence_number_for_group(self) -> int:
        return self.issued

    def getBackendName(self) -> str:  # noqa: N802  # torch's
        return NAME

    def name(self) -> str:
        return NAME

    def abort(self) -> None:
        with self._ends:
            self._aborting_until = time.monotonic() + self.abort_takes_s
            time.sleep(self.abort_takes_s)
            self._aborted.set()
        if self.is_stuck:
            threading.Event().wait()
        if self.abort_waits_for is not None:
            self.abort_waits_for.wait_for_abort()
        self.drain()

    def shutdown(self) -> None:
        """As torch's for NCCL: returns when all that is queued has ended, and lets no abort overtake it."""
        with self._ends:
            self.drain()
            if self.ends_with_peers:
                self.wait_for_abort()

    def freeze_while_aborting(self) -> None:
        left_s = self._aborting_until - time.monotonic()
        if left_s > 0:
            ctypes.PyDLL(None).usleep(int(1e6 * min(left_s, _FROZEN_S)))  # PyDLL keeps Python's lock

    # -- the queue

    def drain(self) -> None:
        """Return when all that is queued now has ended; deaf, as ``cudaDeviceSynchronize`` is."""
        self.later(lambda: None).wait()

    def later(self, action: Callable[[], None]) -> Any:
        """Do `action` after everything that is queued, as a kernel on a stream."""
        work = _Work(self, [])
        self._queue.put(lambda: (action(), work.finish()))  # type: ignore[arg-type,return-value]
        return work

    def wait_for_abort(self) -> None:
        """What a kernel does whose peer does not come."""
        self._aborted.wait()

    def _collective(self, tensors: list[Tensor], exchange: Callable[[list[Tensor]], Any]) -> Any:
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("Tensors must be contiguous")
        if self._aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")
        self.issued += 1
        work = _Work(self, tensors)
        self._kept.append(work)

        def run() -> None:
            copies = [tensor.detach().clone() for tensor in tensors]
            is_whole = not self._aborted.is_set() and self._is_complete(exchange(copies))
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy) if is_whole else _spoil(tensor)
            work.finish()

        self._queue.put(run)
        return work

    def _is_complete(self, gloos: Any) -> bool:
        """Wait for gloo's work, or the abort; what a peer's end does to gloo's is not told to anybody."""
        ended = threading.Event()
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                gloos.wait()
            except RuntimeError as error:
                failed.append(error)
                return
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        while not ended.wait(0.005):
            if self._aborted.is_set():
                return False
        return True

    def _run(self) -> None:
        while True:
            self._queue.get()()


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(GARBAGE) if tensor.is_floating_point() else tensor.random_(2, 100)


@contextmanager
def _deaf() -> Iterator[None]:
    """No signal is handled meanwhile, in the thread that handles them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def install(kind: type[DeviceLike] = DeviceLike) -> None:
    """Let this process form such groups, and take them for groups on a device."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, kind, devices=["cpu"])
    aborting.DEVICE_BACKENDS.add(NAME)

    def synchronizer() -> Callable[[], bool]:
        parts = aborting.device_parts()

        def synchronize() -> bool:
            for part in parts:
                part.drain()
            return True

        return synchronize

    aborting._synchronizer = synchronizer


def setup_rank(namespace: dict[str, Any]) -> None:
    """As ``nbaccel.train.setup:setup_rank``, with such a group."""
    from nbaccel import Accelerator, InitProcessGroupKwargs
    from nbaccel.features import feature

    install()
    aborting.on_renewal(feature("groups of ranks that stay"))
    namespace["accelerator"] = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=NAME)])


def setup_reading_rank(namespace: dict[str, Any]) -> None:
    """The same, where a rank's values are read behind all that is queued, as those on a device are."""
    setup_rank(namespace)
    from nbaccel.launching.rank import task_report
    from nbaccel.launching.tasks.cell_task import CellTask

    def after_all(read: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_read(*args: Any, **kwargs: Any) -> Any:
            if args[0]:
                world().drain()
            return read(*args, **kwargs)

        return wait_and_read

    CellTask.results = after_all(CellTask.results)  # type: ignore[method-assign]
    task_report.pack_what_can_travel = after_all(task_report.pack_what_can_travel)


def world() -> DeviceLike:
    """The default group."""
    group: Any = dist.group.WORLD
    return group  # type: ignore[no-any-return]
