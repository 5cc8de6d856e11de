"""Party: the processes in which one contender runs its turns. Runs in the benchmark, and forks its ranks.

Each contender has processes of its own, for Accelerate and Lightning keep global state, and they find each other by the
variables that torchrun sets. They work only when told to: a turn of one is never a turn of another. It does not know
what a turn is, nor what is made of the times.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch._dynamo  # every rank's first optimizer imports it otherwise, a second each
from torch import Tensor

__all__ = ["Bout", "ContenderFailed", "Party", "Sample", "environment", "free_port"]

_PATIENCE_S = 300.0
"""A rank that says nothing for so long is given up: no turn takes more than some seconds, also on a busy machine."""


class ContenderFailed(Exception):
    """A contender raised, or did not answer; the message holds its traceback."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one turn took, in seconds: on the clock, and of processors by this process. In a party, of its ranks."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Bout:
    """What one rank of a contender does.

    turn: one turn; it may return a `Sample` of the part that counts, else all of it does.
    result: what the turns so far led to; after the first, that of every contender must equal raw's.
    close: what is to be cleared away in the end.
    """

    turn: Callable[[], Sample | None]
    result: Callable[[], Tensor]
    close: Callable[[], object] = lambda: None


class Party:
    """The ranks of one contender, forked, waiting for their turns; close it."""

    def __init__(self, name: str, make: Callable[[], Bout], world_size: int, inherited: Sequence[Connection]) -> None:
        """inherited: the ends that earlier parties are spoken to by, which these ranks must not keep open."""
        self.name = name
        self.connections: list[Connection] = []
        self._processes: list[Any] = []
        fork = multiprocessing.get_context("fork")
        port = free_port()
        try:
            for rank in range(world_size):
                mine, theirs = fork.Pipe()
                self.connections.append(mine)
                with theirs:
                    arguments = (make, theirs, environment(rank, world_size, port), [*inherited, *self.connections])
                    process = fork.Process(target=_serve, args=arguments, name=f"{name} {rank}")
                    process.start()
                    self._processes.append(process)
            self._answers()  # all are ready
        except BaseException:
            self.close()
            raise

    def turn(self) -> Sample:
        """Run one turn: the wall time of the slowest rank, the mean processor time of all."""
        samples: list[Sample] = self._ask("turn")
        return Sample(max(one.wall_s for one in samples), sum(one.cpu_s for one in samples) / len(samples))

    def result(self) -> np.ndarray[Any, Any]:
        """What the turns led to, of all ranks in their order."""
        return np.concatenate(self._ask("result"))

    def close(self) -> None:
        """End the ranks: those that wait leave by themselves, others are killed."""
        for connection in self.connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes.clear()

    def _ask(self, what: str) -> list[Any]:
        for connection in self.connections:
            connection.send(what)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers, deadline_s = [], time.monotonic() + _PATIENCE_S
        for rank, connection in enumerate(self.connections):
            if not connection.poll(max(0.0, deadline_s - time.monotonic())):
                raise ContenderFailed(f"{self.name}: rank {rank} did not answer for {_PATIENCE_S:.0f} s")
            try:
                is_well, answer = connection.recv()
            except EOFError:
                raise ContenderFailed(f"{self.name}: rank {rank} died") from None
            if not is_well:
                raise ContenderFailed(f"{self.name}, rank {rank}: {answer}")
            answers.append(answer)
        return answers


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank; nothing where there is only one, as for a plain script."""
    if world_size == 1:
        return {}
    own, all_of_them = str(rank), str(world_size)
    return {
        "RANK": own,
        "LOCAL_RANK": own,
        "GROUP_RANK": "0",
        "WORLD_SIZE": all_of_them,
        "LOCAL_WORLD_SIZE": all_of_them,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "benchmark",  # by which Lightning knows that it is launched already
    }


def _serve(
    make: Callable[[], Bout], connection: Connection, environment: dict[str, str], inherited: Sequence[Connection]
) -> None:
    """A rank: do as told until nobody is there to tell."""
    for end in inherited:
        end.close()  # else this rank would keep the others alive after the benchmark has gone
    os.environ.update(environment, OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
    vars(sys).pop("ps1", None)  # a benchmark is a script, also where its parent has an IPython shell: Fabric looks here
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the peers' own, and what they log
    logging.disable(logging.WARNING)
    try:
        bout = make()
        gc.collect()
        gc.freeze()
        connection.send((True, None))
        orders: dict[str, Callable[[], Any]] = {
            "turn": lambda: _timed(bout.turn),
            "result": lambda: bout.result().detach().double().flatten().numpy(),
        }
        try:
            while True:
                connection.send((True, orders[connection.recv()]()))
        finally:
            bout.close()
            _leave_group()
    except (EOFError, ConnectionError):
        return
    except BaseException:
        connection.send((False, traceback.format_exc()))


def _timed(turn: Callable[[], Sample | None]) -> Sample:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    own = turn()
    return own or Sample(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
