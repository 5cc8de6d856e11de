"""Watcher: a thread that wakes its own rank when another one has given up the attempt. Runs in ranks.

The main thread may wait in a collective that will never be complete, in C++, where only the end of its connections
(gloo) or of its communicator (NCCL) can end the wait. The watcher does not decide what the main thread does then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbaccel.aborting import abort_device_groups, await_aborts, uses_device
from nbaccel.train.executable.board import Board
from nbaccel.train.executable.wires import Wires

__all__ = ["Watcher", "backends"]

_POLL_S = 0.05
_PEERS_ANSWER_S = 2.0
_ABORT_S = 2.0
_LATE_ABORT_S = 10.0
_ANSWER_POLL_S = 0.005


class Watcher:
    """Polls the flag 20 times a second until it is set, then cuts the connections; once.

    board: with its own connection to the store.  store_port: connections to this port are not cut.
    """

    def __init__(self, board: Board, store_port: int | None) -> None:
        self._board = board
        self._store_port = store_port
        self._look = threading.Event()
        self._is_over = False
        self._has_cut = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nbaccel-watcher", daemon=True)
        self._thread.start()

    def wake_everybody(self) -> None:
        """Wait, when the flag is set, until this rank's connections are cut, which wakes the peers."""
        self._look.set()
        self._has_cut.wait(2 * _PEERS_ANSWER_S + _ABORT_S)

    def stop(self) -> None:
        """End the watch: the attempt is over without a flag."""
        self._is_over = True
        self._look.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with contextlib.suppress(RuntimeError, OSError):  # the store is lost: its server ended with a peer
                self._watch()
        finally:
            self._has_cut.set()

    def _watch(self) -> None:
        while not self._is_over:
            if self._board.is_flagged:
                has_device = uses_device()
                self._cut()
                self._has_cut.set()
                if has_device and await_aborts(_LATE_ABORT_S):
                    self._board.post("free", True)  # from now on this rank works on the host
                return
            self._look.wait(_POLL_S)
            if not self._is_over and self._look.is_set():
                self._look.clear()

    def _cut(self) -> None:
        if uses_device():
            # All at about the same time: a peer on another machine that sees a connection of NCCL's close before it
            # has begun to abort takes that for an error, and torch's watchdog ends its process for it.
            self._board.post("abort", True)
            self._await_peers("abort")
            abort_device_groups(_ABORT_S)
        if "gloo" in backends():
            with Wires(self._store_port) as wires:
                self._board.post("wires", wires.ends)
                answered = self._await_peers("wires")
                wires.cut(tuple(ends) for ends in self._ends(answered))

    def _await_peers(self, kind: str) -> list[int]:
        """Return the ranks that have posted `kind`: all of them, or those in time. One that died cannot answer."""
        deadline = time.monotonic() + _PEERS_ANSWER_S
        while len(answered := self._board.posted(kind)) < self._board.world_size and time.monotonic() < deadline:
            time.sleep(_ANSWER_POLL_S)
        return answered

    def _ends(self, ranks: list[int]) -> list[Any]:
        return [ends for rank in ranks if rank != self._board.rank for ends in self._board.read("wires", rank)]


def backends() -> set[str]:
    """Return the kinds of backend that this process's groups use."""
    if not dist.is_initialized():
        return set()
    names = ",".join(c10d._world.pg_backend_config.values())  # "cpu:gloo,cuda:nccl"
    return {name.rpartition(":")[2] for name in names.split(",")}
