"""Tools for tests of code that trains in several ranks: `run_ranks`. Runs in a test process; needs no launcher.

It forks, so that a test's closures and fixtures are available in every rank, and torch is imported once. It has
none of the launcher's features (no output routing, no interrupt, no zygote) and never touches a GPU.
"""

from __future__ import annotations

import gc
import os
import pickle
import selectors
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nbaccel.base.task_end import finish_task
from nbaccel.base.world import World
from nbaccel.errors import RankDied, RanksFailed
from nbaccel.launching.processes.start import MainThread
from nbaccel.launching.rank.inherited import put_aside

__all__ = ["run_ranks"]


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """Run a function in several forked gloo ranks on the CPU.

    Args:
        world_size: The number of ranks.
        function: Called as ``function(*args)`` in every rank.
        timeout_s: The most seconds that all ranks may take.
        *args: Its arguments.

    Returns:
        The values that the ranks returned, in the order of ranks.

    Raises:
        RanksFailed: A rank failed. The error carries the traceback of the first one; the others are killed.
        TimeoutError: Some ranks were not done after `timeout_s`. The message names them.

    Example:
        >>> def total():
        ...     from nbaccel.train import PartialState
        ...     import torch
        ...     return int(PartialState().collectives.reduce(torch.ones(())))
        >>> run_ranks(2, total)
        [2, 2]
    """
    import torch._dynamo  # noqa: F401  # imported by every rank's first DDP otherwise, 0.8 s each

    finish_task()  # as before any run: what this process has trained is whole when it is copied
    release = _Release()
    folder = tempfile.mkdtemp(prefix="nbaccel-ranks-")  # mkdtemp makes it 0700
    ranks: list[_Rank] = []

    def fork() -> None:
        for rank in range(world_size):
            ranks.append(_fork_rank(World(rank, world_size, rank, world_size), folder, release, function, args))

    try:
        # A fresh thread has no OpenMP pool, so its forks can run parallel regions.
        forker = threading.Thread(target=fork, name="nbaccel-run-ranks")
        forker.start()
        forker.join()
        values = _collect(ranks, time.monotonic() + timeout_s, timeout_s)
        release.give()
        for rank in ranks:
            rank.wait()
        return values
    finally:
        release.give()
        for rank in ranks:
            rank.reap()
        shutil.rmtree(folder, ignore_errors=True)


class _Release:
    """A pipe without data: ranks that are done wait until it is closed, since peers may still read from them."""

    def __init__(self) -> None:
        self._waiting, self._holding = os.pipe()
        self._is_given = False

    def give(self) -> None:
        if not self._is_given:
            self._is_given = True
            os.close(self._holding)
            os.close(self._waiting)

    def wait(self) -> None:
        """Wait until the test process calls `give`. Runs in a rank."""
        os.close(self._holding)
        os.read(self._waiting, 1)


@dataclass(slots=True)
class _Rank:
    """One forked rank: its process and the pipe that carries its value or its traceback."""

    number: int
    pid: int
    pipe: int
    received: bytearray = field(default_factory=bytearray)
    status: int | None = None

    def read(self) -> bool:
        """Read what has arrived; return False once the rank has closed its end."""
        chunk = os.read(self.pipe, 1 << 20)
        self.received += chunk
        return bool(chunk)

    def wait(self) -> int:
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.status

    def value(self, world_size: int) -> Any:
        if not self.received:
            exit_code = self.wait()
            raise RankDied(
                f"rank {self.number} of {world_size} ended without a value, exit code {exit_code}",
                self.number,
                world_size,
                exit_code,
            )
        succeeded, result = pickle.loads(self.received)  # written by our own fork, through a pipe only it holds
        if not succeeded:
            raise RanksFailed(f"rank {self.number} of {world_size} failed:\n{result}", self.number, world_size)
        return result

    def reap(self) -> None:
        os.close(self.pipe)
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


def _collect(ranks: list[_Rank], deadline: float, timeout_s: float) -> list[Any]:
    values: dict[int, Any] = {}
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [rank.number for rank in ranks if rank.number not in values]
                raise TimeoutError(f"ranks {missing} of {len(ranks)} were not done after {timeout_s:g} s; killed")
            for key, _ in ready:
                rank = key.data
                if not rank.read():
                    selector.unregister(rank.pipe)
                    values[rank.number] = rank.value(len(ranks))
    return [values[number] for number in range(len(ranks))]


def _fork_rank(
    world: World, folder: str, release: _Release, function: Callable[..., Any], args: tuple[Any, ...]
) -> _Rank:
    reading, writing = os.pipe()
    main_thread = MainThread.find()
    pid = os.fork()
    if pid == 0:
        try:
            if main_thread is not None:
                main_thread.become()
            gc.freeze()  # as in a launch: a collection would look at all that the tests hold, and copy its pages
            os.close(reading)
            _kept = put_aside(world.rank)  # as in a launch: the test's worker processes are not the rank's
            with open(writing, "wb") as pipe:
                pickle.dump(_run(world, folder, function, args), pipe)
            release.wait()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # the rank must run neither the parent's atexit handlers nor pytest's
    os.close(writing)
    return _Rank(world.rank, pid, reading)


def _run(world: World, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    """Run `function` in the rank; return (True, value) or (False, traceback)."""
    try:
        os.environ.update(world.environ(), GLOO_SOCKET_IFNAME="lo")
        import torch

        torch.set_num_threads(1)
        _meet_in(folder, world)
        value = function(*args)
        pickle.dumps(value)
        return True, value
    except BaseException:
        return False, traceback.format_exc()


def _meet_in(folder: str, world: World) -> None:
    """Let ``init_process_group("...")`` find its peers through a file in `folder`: no port, no address."""
    import torch.distributed as dist

    meetings = 0

    def rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        nonlocal meetings
        meetings += 1  # a group that is formed again must not read the first one's addresses
        yield dist.FileStore(os.path.join(folder, f"store{meetings}"), world.world_size), world.rank, world.world_size

    # torch.distributed.rendezvous the function hides the module of that name, and the public
    # register_rendezvous_handler refuses a scheme that is known already.
    sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"] = rendezvous
