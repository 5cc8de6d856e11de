"""Form and end torch's default process group, keep its store, and test its devices. Runs in ranks.

A group that the program made itself is used, and not ended here. A group whose connections were cut, because a rank ran
out of memory, is formed again among the same ranks. `warm_up` makes the first exchanges of a new group over its
devices, with known results.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from nbaccel.base.aborting import (
    Settling,
    abort_device_groups,
    device_parts,
    end_device_groups,
    forget_abort,
    forget_left_exchange,
    is_aborted,
    leave_device_errors_to_the_program,
    settle,
    uses_device,
)
from nbaccel.base.events import CollectiveEntered, GroupRenewed, Waiting, emit
from nbaccel.base.settings import RunSettings
from nbaccel.base.values import frozen
from nbaccel.base.world import World
from nbaccel.errors import PeerFailed
from nbaccel.train.distributed.collectives import GroupCollectives
from nbaccel.train.distributed.transport import group_timeout

if TYPE_CHECKING:
    from nbaccel.train.distributed.store_exchange import StoreExchange

__all__ = [
    "LIMIT_S",
    "GroupOptions",
    "process_group",
    "warm_up",
]

_LOOK_UP = timedelta(seconds=0.5)

_SETTLE_S = 1.0
"""Time that a rank which ends its group during an error waits for its device, and again for an abort."""

_END_S = 5.0
"""Time that a rank waits for its peers at the end of an idle group, and then for that end, or its abort."""

_END_POLL_S = 0.002


@frozen
class GroupOptions:
    """Choices of a program for its process group.

    Args:
        backend: "gloo", "nccl", ...; by default what fits the device. Ranks with GPUs in one machine have two of them,
            nccl for tensors of the device and gloo for those of the host, which then wait for nothing that the device
            computes.
        timeout: How long a collective may take; by default torch's.
        init_method: Where the ranks meet, as an address of torch's; by default the launcher's choice.
    """

    backend: str | None = None
    timeout: timedelta | None = None
    init_method: str | None = None


@frozen
class Rendezvous:
    """Keys in the store by which a group was formed, where its ranks can meet although the group is broken.

    Args:
        base, base_for_thread: Two connections to that store.
        prefix: The beginning of the keys.
    """

    base: Any
    base_for_thread: Any
    prefix: str

    @property
    def store(self) -> Any:
        """The store with the prefix of this place."""
        return dist.PrefixStore(self.prefix, self.base)

    @property
    def store_for_thread(self) -> Any:
        """The same for a thread, which need not wait while the main thread waits."""
        return dist.PrefixStore(self.prefix, self.base_for_thread)

    @property
    def port(self) -> int | None:
        """The port on which the store listens, if it does."""
        return getattr(_root(self.base), "port", None)

    def within(self, name: str) -> Rendezvous:
        """Return a separate place inside this one."""
        return Rendezvous(self.base, self.base_for_thread, f"{self.prefix}/{name}")


class ProcessGroup:
    """The default group of this process.

    torch has one default group per process, for all users. So this state belongs to the process and not to an
    instance: whether we made that group (then we end it), by which store, and how often; a group that is
    formed again must not read the addresses that the one before left in the store.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._talk: GroupCollectives | None = None
        self._device: torch.device | None = None
        self._options = GroupOptions()
        self._store: Any = None
        self._world: World | None = None
        self._formed = 0
        self._renewed = 0
        self._meetings = 0
        self._lost: _Lost | None = None
        self._base: Any = None
        self._renewed_group: Any = None
        self._exchange: StoreExchange | None = None
        self._exchange_of: Any = None
        self._exchanges = 0
        self._retired: Any = None
        self._unended: Any = None
        self.users: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
        """The lifecycles of this process's Accelerators in the order in which they were made; they release what they
        hold of a group that has ended.
        """
        self.recoveries: list[Any] = []
        """Calls in progress that would renew the group, outermost first; kept here for the inner ones."""

    def join(self, world: World, device: torch.device, options: GroupOptions) -> GroupCollectives:
        """Return the collectives of this `world`'s group, which all ranks form now together if there is none."""
        if not dist.is_initialized():
            self._form(world, device, options)
        if dist.group.WORLD is self._unended:
            raise PeerFailed(
                f"rank {world.rank}: the process group of the training before did not end, since {device} did not let "
                "go of what it was given. A new Accelerator would wait in it for ever: start the cell again, in new "
                "processes."
            )
        self._group = dist.group.WORLD
        self._device = device
        self._talk = GroupCollectives(world, device, debug=bool(RunSettings.from_env().debug))
        return self._talk

    @property
    def talk(self) -> GroupCollectives | None:
        """The collectives of the group as it was joined; None if it was not, or is another one now."""
        return self._talk if self._group is dist.group.WORLD else None

    @property
    def device(self) -> torch.device | None:
        """The device that this rank joined with; None without a group."""
        return None if self.talk is None else self._device

    def leave(self) -> None:
        """End the group, if we formed it. If its device does not release it, it stays; `join` refuses it then."""
        try:
            if self._world is not None and dist.is_initialized() and self._group is dist.group.WORLD:
                # The last reference must not be dropped yet, by us or by a DDP module that dies a moment later: gloo's
                # destructor joins its threads while it holds the GIL, for which one of them may still be waiting to
                # drop the last collective's tensors (a hang, now and then). At the next end they are idle.
                self._retired = self._unended = self._group  # the latter also after an interrupt
                if not uses_device() or _end_on_device(self._do_peers_leave):
                    self._unended = None
                    dist.destroy_process_group()
        finally:
            self._group = self._talk = None

    def _do_peers_leave(self) -> bool:
        """Return whether all ranks of this machine come to the end of this group, within `_END_S` from now.

        All get the same answer, from the first one that knows it: a rank that comes later does not wait for those that
        have given it up.
        """
        assert self._world is not None, "not a group of ours"
        first = self._world.rank - self._world.local_rank
        ranks = range(first, min(first + self._world.local_world_size, self._world.world_size))
        store = dist.PrefixStore(f"nbaccel/end{self._formed}.{self._renewed}", self._store)
        store.set(f"here/{self._world.rank}", "1")
        everyone, answer = [f"here/{rank}" for rank in ranks], f"all come from {first} on"
        deadline = time.monotonic() + _END_S
        while not store.check([answer]):
            do_come = store.check(everyone)
            if do_come or time.monotonic() > deadline:
                store.compare_set(answer, "", "yes" if do_come else "no")
            else:
                time.sleep(_END_POLL_S)
        return bool(store.get(answer) == b"yes")

    def meeting_place(self, name: str = "") -> Rendezvous:
        """Return an empty place beside the group's own.

        Args:
            name: A name that was not used before. Without one the n-th call of one rank finds the n-th of its peers.
        """
        if not name:
            self._meetings += 1
            name = f"meeting{self._meetings}"
        base = c10d._get_default_store() if self._store is None else self._store
        return Rendezvous(another(base), another(base), f"nbaccel/{name}")

    @property
    def exchange(self) -> StoreExchange:
        """The exchange through the store of the present group, which exists. Every rank asks for it equally often."""
        if self._exchange is None or self._exchange_of is not dist.group.WORLD:
            from nbaccel.train.distributed.store_exchange import StoreExchange  # few programs need it

            self._exchanges += 1  # a later group may have the same store
            place = self.meeting_place(f"exchange{self._formed}.{self._renewed}.{self._exchanges}")
            timeout = self._options.timeout if self._world is not None else group_timeout()
            self._exchange = StoreExchange(place.store, dist.get_rank(), dist.get_world_size(), timeout)
            self._exchange_of = dist.group.WORLD
        return self._exchange

    def drop(self) -> None:
        """Leave the default group, whether we formed it or not; its connections are cut already. `renew` follows."""
        backend = dist.get_backend()
        timeout = self._options.timeout if self._world is not None else group_timeout()
        self._lost = _Lost(None if backend == "undefined" else backend, timeout, dist.get_rank(), dist.get_world_size())
        if self._store is None and dist.group.WORLD is not self._renewed_group:
            # The program's own group. Dropped with it, the store's file would be removed, or its server would end.
            self._base = c10d._get_default_store()
        self._retired = dist.group.WORLD  # see leave
        dist.destroy_process_group()
        forget_abort()
        forget_left_exchange()

    def renew(self, store: Any) -> None:
        """Form the default group again as it was before `drop`, meeting in `store`. Collective."""
        lost, self._lost = self._lost, None
        assert lost is not None, "renew() without drop()"
        timeout = lost.timeout or dist.default_pg_timeout
        self._renewed += 1
        emit(GroupRenewed(self._renewed))
        _meet(store, World(lost.rank, lost.world_size, lost.rank, lost.world_size), timeout)
        _init(lost.backend, store, lost.rank, lost.world_size, lost.timeout, self._device)
        self._renewed_group = dist.group.WORLD
        if self._talk is not None:
            self._group = dist.group.WORLD
            self._talk = self._talk.anew()

    def warn_of_others(self, options: GroupOptions) -> None:
        """Warn of `options` that an existing group does not have."""
        backend: str = dist.get_backend()
        if options.backend in _kinds(backend):  # as one of two
            backend = options.backend
        asked = [("backend", options.backend, backend), ("timeout", options.timeout, self._options.timeout)]
        unmet = [f"{name}={wanted!s}" for name, wanted, has in asked if wanted is not None and wanted != has]
        if unmet:
            warnings.warn(
                f"the process group exists already, without {' and '.join(unmet)}. Ask where it is formed, or call "
                "destroy_process_group() on every rank first.",
                stacklevel=4,
            )

    def _form(self, world: World, device: torch.device, options: GroupOptions) -> None:
        timeout = options.timeout or dist.default_pg_timeout
        if self._store is None or self._world != world:
            place = (options.init_method, world.rank, world.world_size) if options.init_method else ("env://",)
            self._store = next(iter(dist.rendezvous(*place, timeout=timeout)))[0]
            self._world = world
        forget_left_exchange()
        self._formed += 1
        self._options = options
        store = dist.PrefixStore(f"nbaccel/{self._formed}", self._store)
        _meet(store, world, timeout)
        backend = options.backend or _fitting(device, world)
        if "nccl" in _kinds(backend):
            leave_device_errors_to_the_program()
        if not _is_one_machine(world) and backend != "gloo":
            # When ranks abort because one ran out of memory, a peer on another machine may see a connection close
            # before it has begun to abort. Torch's watchdog ends the process for that, a minute later; with 0 it is an
            # error in the waiting call. A collective that hangs still ends the process, by the monitor of the watchdog.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        _init(backend, store, world.rank, world.world_size, options.timeout, device)


@frozen
class _Lost:
    """Properties of a group that will be formed again; backend None: torch's choice for each kind of device."""

    backend: str | None
    timeout: timedelta | None
    rank: int
    world_size: int


def _end_on_device(do_peers_leave: Callable[[], bool]) -> bool:
    """End the groups on this rank's device, as far as they have to be waited for; return whether that succeeded.

    NCCL's own end waits for all queued work and ignores interrupts. During an error that may be for ever, and this rank
    has not reported its error yet. Otherwise it waits for peers who are late: that wait polls, and a receiver of
    `Waiting` that knows that they will not come ends it.
    """
    if sys.exception() is not None:
        return end_device_groups(_END_S, do_peers_leave) if settle(_SETTLE_S) else abort_device_groups(_SETTLE_S)
    settling, waited_s = Settling(), 0.0
    try:
        while not settling.wait(_LOOK_UP.total_seconds()):
            if is_aborted():
                return abort_device_groups(_END_S)
            waited_s += _LOOK_UP.total_seconds()
            emit(Waiting("the end of the process group", waited_s))
        return end_device_groups(_END_S, do_peers_leave)
    except BaseException:
        abort_device_groups(_END_S)
        raise


def another(store: Any) -> Any:
    """Return `store` with a separate connection, which does not wait while another thread waits in the first one."""
    root = _root(store)
    if isinstance(root, dist.FileStore):
        return dist.FileStore(root.path)  # type: ignore[attr-defined]  # a clone counts as one more worker, and the last but one removes the file
    # An older torch cannot clone: both share one connection then, and our waits in it are half a second at most.
    return store.clone() if hasattr(store, "clone") else store


def _root(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _init(
    backend: str | None, store: Any, rank: int, world_size: int, timeout: timedelta | None, device: torch.device | None
) -> None:
    """Form the group.

    Args:
        timeout: None for torch's own, which is 10 minutes for NCCL and 30 for the others.
    """
    # Without a device: with one, nccl would connect here, without a limit or interrupts. It connects in the warm-up.
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    if timeout is None and backend is not None and ":" in backend:
        for part in device_parts():  # torch gives both parts of "cpu:gloo,cuda:nccl" the longer one
            if hasattr(part, "_set_default_timeout") and c10d.default_pg_nccl_timeout is not None:
                part._set_default_timeout(c10d.default_pg_nccl_timeout)
    if backend == "gloo":
        # gloo returns on each rank when that rank's connections exist. One that is done quickly could leave while
        # a peer still connects, and the peer would fail.
        dist.barrier()
    elif backend is not None and "gloo" in _kinds(backend):
        dist.all_reduce(torch.zeros(1, device="cpu"))  # the same; torch's barrier would be the device's
    if device is not None and uses_device():
        warm_up(rank, world_size, device)
        if backend is not None and device.type == "cuda" and "nccl" in _kinds(backend):
            # As if it had been given at the start: torch's barrier uses this device, and groups of some ranks
            # split off the existing connection.
            dist.group.WORLD.bound_device_id = device  # type: ignore[union-attr]


def _fitting(device: torch.device, world: World) -> str:
    """Return the backend for ranks with such a `device`, by torch's name."""
    if device.type != "cuda":
        return "gloo"
    # Between machines gloo needs names or an interface by which they find each other, and nccl may not need them.
    return "cpu:gloo,cuda:nccl" if _is_one_machine(world) else "nccl"


def _is_one_machine(world: World) -> bool:
    """Return whether the launcher has said so. Wrappers of srun and mpirun may set LOCAL_RANK alone, on several."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(world.world_size)


def _kinds(backend: str) -> list[str]:
    """Return the backends in ``"cpu:gloo,cuda:nccl"``; of a single name, that one."""
    return [pair.rpartition(":")[2] for pair in backend.split(",")]


def _meet(store: Any, world: World, timeout: timedelta) -> None:
    """Wait until all ranks are about to form the group.

    torch would wait for them too, but without a sign and for half an hour, even for a rank that has finished already.
    """
    emit(CollectiveEntered("forming the process group"))
    store.set(f"here/{world.rank}", "1")
    everyone = [f"here/{rank}" for rank in range(world.world_size)]
    began = said = time.monotonic()
    while not store.check(everyone):  # whose `wait`, in a store over the network, prints warnings of its own
        time.sleep(_MEET_POLL_S)
        now = time.monotonic()
        if now > began + timeout.total_seconds():
            missing = [rank for rank, key in enumerate(everyone) if not store.check([key])]
            raise TimeoutError(
                f"{world.place} waited {timeout.total_seconds():g} s for ranks {missing} to form the process group"
            )
        if now > said + _LOOK_UP_S:
            said = now
            emit(Waiting("forming the process group", now - began))


process_group = ProcessGroup()


LIMIT_S = 60.0
"""NCCL connects eight devices in about a second; a bad connection does not improve."""

_LOOK_UP_S = 0.5
_MEET_POLL_S = 0.01
_ABORT_S = 5.0
_LARGE = 1 << 20
"""Numbers, in 4 MB: more than NCCL sends by its protocols for short messages."""

_CURE = (
    "The devices are not connected in the way in which {backend} takes them to be. Set one of these before the ranks "
    "start (%env in a notebook) and try again: NCCL_P2P_DISABLE=1, if direct access between the GPUs does not work "
    "(behind an IOMMU, in some virtual machines); NCCL_SHM_DISABLE=1, or a container with --shm-size=1g, if shared "
    "memory is short. NCCL_DEBUG=INFO says what NCCL does."
)


def warm_up(rank: int, world_size: int, device: torch.device) -> None:
    """Exchange over `device` values that all ranks know in advance. Collective.

    NCCL connects the devices at the first collective of each kind, and allocates its buffers then, outside of torch's
    allocator. So the warm-up runs before any measurement of memory. Where direct access between devices does not work,
    behind an IOMMU or in some containers, the first exchange hangs, or its sums are wrong: the warm-up detects and
    names that, before an epoch is lost. The program's thread waits with a limit and polls; the exchange runs in another
    thread, since it may hang where NCCL connects, before there is anything to poll.

    Raises:
        TimeoutError: The exchange was not over after `LIMIT_S`; the groups are aborted.
        RuntimeError: Wrong values arrived; or the backend's own error, with a note.
    """
    exchange = _Exchange(rank, world_size, device)
    waited_s = 0.0
    try:
        while not exchange.is_over(_LOOK_UP_S):
            waited_s += _LOOK_UP_S
            if waited_s >= LIMIT_S:
                raise TimeoutError(
                    f"rank {rank} of {world_size}: the first exchange of the process group over {device} "
                    f"({exchange.step}) was not over after {LIMIT_S:g} s. {_cure()}"
                )
            emit(Waiting(f"the first exchange of the process group ({exchange.step})", waited_s))
    except BaseException:
        abort_device_groups(_ABORT_S)
        raise
    if exchange.error is not None:
        raise exchange.error


class _Exchange:
    """The exchange, in its own thread.

    Attributes:
        step: The current one, in words.
        error: The error, once it is over.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.step = _sum_of(1)
        self.error: Exception | None = None
        self._rank, self._world_size, self._device = rank, world_size, device
        self._thread = threading.Thread(target=self._run, name="nbaccel-warm-up", daemon=True)
        self._thread.start()

    def is_over(self, limit_s: float) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # of this thread
            wrong = [self._difference(received, expected) for received, expected in self._steps()]
            if any(wrong):  # only now: the peers need this rank in each of the exchanges
                raise RuntimeError(next(filter(None, wrong)))
        except Exception as error:
            error.add_note(_cure())
            self.error = error

    def _steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield received and expected tensors, one exchange after the other. Whole numbers, so that sums are exact."""
        numbers = torch.arange(_LARGE, dtype=torch.float32, device=self._device) % 1000
        ranks = self._world_size * (self._world_size - 1) / 2
        for count in (1, _LARGE):
            self.step = _sum_of(count)
            total = numbers[:count] + self._rank
            dist.all_reduce(total)
            yield total, numbers[:count] * self._world_size + ranks
        self.step = "gathering"
        rows = [torch.empty_like(numbers) for _ in range(self._world_size)]
        dist.all_gather(rows, numbers + self._rank)
        yield torch.stack(rows), torch.stack([numbers + rank for rank in range(self._world_size)])
        self.step = "a broadcast"
        copy = numbers + self._rank
        dist.broadcast(copy, 0)
        yield copy, numbers

    def _difference(self, received: Tensor, expected: Tensor) -> str:
        """Return what is wrong in this exchange; empty if nothing is."""
        wrong = (received != expected).flatten().nonzero().flatten()
        if not len(wrong):
            return ""
        first = int(wrong[0])
        return (
            f"rank {self._rank} of {self._world_size}: {self.step} over {self._device} came out wrong in {len(wrong)} "
            f"of {received.numel()} numbers, {received.flatten()[first].item():g} instead of "
            f"{expected.flatten()[first].item():g} in number {first}. Nothing was trained."
        )


def _sum_of(count: int) -> str:
    return f"a sum of {count} number{'' if count == 1 else 's'}"


def _cure() -> str:
    return _CURE.format(backend=dist.get_backend().upper())
