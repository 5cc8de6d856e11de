"""End an attempt on all ranks when one has failed, outside of their process group. Runs in ranks.

The main thread of a peer may wait in a collective that will never be complete, in C++, where only the end of its
connections (gloo) or of its communicator (NCCL) can end the wait. So ranks exchange messages through a store
(`AttemptStore`), and a thread of each (`Watcher`) waits for the flag of an attempt that failed, and cuts the
connections to peers (`PeerConnections`). The watcher does not decide what the main thread does then.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Self

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nbaccel.base.aborting import abort_device_groups, await_aborts, is_aborted, uses_device
from nbaccel.base.events import Waiting, emit
from nbaccel.base.values import frozen
from nbaccel.errors import NbaccelError, PeerFailed

__all__ = [
    "SETTLE_S",
    "AttemptStore",
    "PeerConnections",
    "PeerError",
    "Watcher",
    "backends",
    "collectives_entered",
    "handled",
    "may_result_from_waking",
]

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_DESCRIPTORS = "/dev/fd"  # of this process, on Linux and macOS


class PeerConnections:
    """The present connections of this process; held until `close`, so that no descriptor number is used again.

    A peer that waits in one of gloo's collectives wakes only when one of its connections breaks: abort, shutdown and
    destroy do nothing while a DDP module, or a variable of the program, still holds the group. So the connections are
    cut. Both ends decide which ones: a connection of this process is cut if a peer lists its other end as its own. No
    peer lists listeners, the store, a tracker's uploads or the notebook's channel.

    Args:
        not_port: The store's port: connections to this port are not cut.
    """

    def __init__(self, not_port: int | None = None) -> None:
        self._sockets: dict[tuple[str, str], socket.socket] = {}
        for number in map(int, os.listdir(_DESCRIPTORS)):
            with contextlib.suppress(OSError):  # closed meanwhile, or not connected
                self._add(os.dup(number), not_port)

    @property
    def ends(self) -> list[tuple[str, str]]:
        """Both ends of each connection, its own first, ``("127.0.0.1 41785", "127.0.0.1 43298")``."""
        return list(self._sockets)

    def cut(self, by_peers: Iterable[tuple[str, str]]) -> int:
        """Shut the connections that peers list too; return how many those were."""
        count = 0
        for own_end, other_end in by_peers:
            wire = self._sockets.get((other_end, own_end))
            if wire is not None:
                count += 1
                with contextlib.suppress(OSError):  # the peer was faster
                    wire.shutdown(socket.SHUT_RDWR)
        return count

    def close(self) -> None:
        for wire in self._sockets.values():
            wire.close()
        self._sockets.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _add(self, copy: int, not_port: int | None) -> None:
        try:
            if not stat.S_ISSOCK(os.fstat(copy).st_mode):
                return
            wire = socket.socket(fileno=copy)
            copy = -1
        finally:
            if copy >= 0:
                os.close(copy)
        try:
            if wire.family in _INTERNET and wire.type == socket.SOCK_STREAM:
                near, far = wire.getsockname(), wire.getpeername()
                ends = (_named(near), _named(far))
                if not_port not in (near[1], far[1]) and ends not in self._sockets:
                    self._sockets[ends] = wire
                    return
        except OSError:  # a listener has no other end
            pass
        wire.close()


def _named(address: tuple[str, int]) -> str:
    return f"{address[0]} {address[1]}"


_POLL_S = 0.05
_PEERS_ANSWER_S = 2.0
_ABORT_S = 2.0
_LATE_ABORT_S = 10.0

SETTLE_S = 10.0
"""Time that a device may still work on steps that are complete; a peer may be late for a sum that it has begun."""

_ANSWER_POLL_S = 0.005


class Watcher:
    """Polls the flag 20 times a second until it is set, then cuts the connections; once.

    Args:
        messages: With its own connection to the store.
        store_port: Connections to this port are not cut.
        settle: Called in the thread before this rank's device is aborted, and by all ranks before the first of them is:
            it returns once the device is done with what has to be whole afterwards, and False if that took `SETTLE_S`.

    Attributes:
        is_whole: What it returned.
    """

    def __init__(
        self, messages: AttemptStore, store_port: int | None, settle: Callable[[], bool] | None = None
    ) -> None:
        self.is_whole = True
        self._messages = messages
        self._store_port = store_port
        self._settle = settle
        self._look = threading.Event()
        self._is_over = False
        self._has_cut = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nbaccel-watcher", daemon=True)
        self._thread.start()

    def wake_everybody(self) -> None:
        """Wait, when the flag is set, until this rank's connections are cut, which wakes the peers."""
        self._look.set()
        self._has_cut.wait(2 * _PEERS_ANSWER_S + _ABORT_S + 2 * self._settle_s)

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
            if not self._messages.is_flagged and self._messages.waits_for_one_that_left:
                self._messages.raise_flag()
            if self._messages.is_flagged:
                has_device = uses_device()
                self._cut()
                self._has_cut.set()
                if has_device and await_aborts(_LATE_ABORT_S):
                    self._messages.post("free", True)  # from now on this rank works on the host
                return
            self._look.wait(_POLL_S)
            if not self._is_over and self._look.is_set():
                self._look.clear()

    def _cut(self) -> None:
        if uses_device():
            # All at about the same time: a peer on another machine that sees a connection of NCCL's close before it
            # has begun to abort takes that for an error, and torch's watchdog ends its process for it.
            if self._settle is not None:
                self.is_whole = self._settle()
            self._messages.post("abort", True)
            self._await_peers("abort", _PEERS_ANSWER_S + self._settle_s)
            abort_device_groups(_ABORT_S)
        if "gloo" in backends():
            with PeerConnections(self._store_port) as wires:
                self._messages.post("wires", wires.ends)
                answered = self._await_peers("wires", _PEERS_ANSWER_S)
                wires.cut(tuple(ends) for ends in self._ends(answered))

    @property
    def _settle_s(self) -> float:
        return SETTLE_S if self._settle is not None and uses_device() else 0.0

    def _await_peers(self, kind: str, limit_s: float) -> list[int]:
        """Return the ranks that have posted `kind`: all of them, or those in time. One that died cannot answer."""
        deadline = time.monotonic() + limit_s
        while len(answered := self._messages.posted(kind)) < self._messages.world_size and time.monotonic() < deadline:
            time.sleep(_ANSWER_POLL_S)
        return answered

    def _ends(self, ranks: list[int]) -> list[Any]:
        return [ends for rank in ranks if rank != self._messages.rank for ends in self._messages.read("wires", rank)]


def backends() -> set[str]:
    """Return the kinds of backend that this process's groups use."""
    if not dist.is_initialized():
        return set()
    names = ",".join(c10d._world.pg_backend_config.values())  # "cpu:gloo,cuda:nccl"
    return {name.rpartition(":")[2] for name in names.split(",")}


def collectives_entered() -> dict[str, int] | None:
    """Return how many collectives this rank has entered in each of its groups; None if a backend cannot count.

    Every rank of a group enters the same ones, in the backwards of DDP too.
    """
    entered: dict[str, int] = {}
    groups: list[tuple[Any, str]] = list(c10d._world.pg_names.items())
    for group, name in groups:
        kinds = {id(backend): backend for backend in map(group._get_backend, group._device_types)}
        try:
            entered[name] = sum(backend._get_sequence_number_for_group() for backend in kinds.values())
        except RuntimeError:
            return None
    return entered


_GLANCE_S = 0.01
_LOOK_UP_S = 0.5


@frozen
class PeerError:
    """An error of the program that ends the call on all ranks.

    Args:
        rank: Where it was raised first.
        text: Its class and message.
    """

    rank: int
    text: str


class AttemptStore:
    """Messages of one attempt in the store.

    Everything here works while a peer computes, is stuck in a collective, or has left its group. An attempt that failed
    first sets the *flag*, which watchers poll. If there is also an *error*, the attempt is not repeated.

    Args:
        store: Empty, and used for this attempt alone.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size

    def raise_flag(self) -> None:
        """Set the flag: the attempt is over. Return when the store has it: peers are woken next, and must find it."""
        self.store.compare_set("flag", "", "up")  # `set` returns before a TCPStore's server has the value

    @property
    def is_flagged(self) -> bool:
        return bool(self.store.check(["flag"]))

    def fail(self, text: str) -> None:
        """End the call: store this rank's error, if it is the first one, and set the flag."""
        self.record(text)
        self.raise_flag()

    def record(self, text: str) -> None:
        """Store this rank's error, if it is the first one, and wake nobody: the peers may be about to fail alike."""
        self.store.compare_set("error", "", json.dumps(asdict(PeerError(self.rank, text))))

    def leave(self) -> None:
        """Tell the peers that this rank's attempt is over, and how many collectives it has entered."""
        self.post("left", collectives_entered())

    @property
    def waits_for_one_that_left(self) -> bool:
        """True if this rank has entered a collective that a rank which has left never will.

        A rank that has entered no more of them computes, and comes to its own end.
        """
        if not self.store.check(["error"]):
            return False
        left = [self.read("left", rank) for rank in self.posted("left") if rank != self.rank]
        own = collectives_entered() if left else None
        return own is not None and any(own[name] > theirs.get(name, own[name]) for theirs in left for name in own)

    @property
    def failed(self) -> PeerError | None:
        """The error that ends the call, if there is one."""
        return PeerError(**json.loads(self.store.get("error"))) if self.store.check(["error"]) else None

    def post(self, kind: str, value: Any) -> None:
        """Store this rank's `value` (JSON) of that `kind` for all ranks."""
        self.store.set(f"{kind}/{self.rank}", json.dumps(value))

    def posted(self, kind: str) -> list[int]:
        """Return the ranks that have posted."""
        return [rank for rank in range(self.world_size) if self.store.check([f"{kind}/{rank}"])]

    def read(self, kind: str, rank: int) -> Any:
        """Return what `rank` posted; it must have posted."""
        return json.loads(self.store.get(f"{kind}/{rank}"))

    def stuck(self, kind: str) -> list[int]:
        """Return the ranks that have posted neither `kind` nor the end of their abort; none without a device."""
        if not uses_device():
            return []
        return sorted({*range(self.world_size)} - {*self.posted(kind), *self.posted("free")})

    def wait(self, kind: str, call: str, is_enough: Callable[[float], bool]) -> bool:
        """Wait for all ranks. Return True once every rank has posted, False once `is_enough`, given the seconds so far.

        Args:
            call: What the rank is doing, for messages. Ended by the posts, by `is_enough` (called 100 times a second),
                by an interrupt, and by a receiver of `Waiting` that knows that a peer will never come.
        """
        everyone = [f"{kind}/{rank}" for rank in range(self.world_size)]
        began = time.monotonic()
        due_s = _LOOK_UP_S
        while not self.store.check(everyone):
            waited_s = time.monotonic() - began
            if is_enough(waited_s):
                return False
            if waited_s > due_s:
                due_s += _LOOK_UP_S
                emit(Waiting(call, waited_s))
            time.sleep(_GLANCE_S)  # the store's own wait logs to stderr whenever its time limit is over
        return True


def handled(error: BaseException) -> list[BaseException]:
    """Return `error` and the errors that were being handled when it was raised."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def may_result_from_waking(error: BaseException) -> bool:
    """Return whether `error`, which was raised after the flag, may only result from waking this rank.

    An error of the program's own that happens to come after the flag is most likely raised again when the attempt is
    repeated; one that torch cannot have raised is not deferred. On a device any error may result from what an abort has
    left: a loss that is not finite, an index that is out of range.
    """
    if is_aborted() and isinstance(error, Exception):
        return True
    return any(isinstance(link, RuntimeError | OSError | PeerFailed) for link in handled(error)) and not (
        isinstance(error, NbaccelError) and not isinstance(error, PeerFailed)
    )
