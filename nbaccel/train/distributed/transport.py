"""Send one tensor to or from all ranks of the default process group, and wait for them. Runs in ranks.

torch's own wait gives no sign and, for gloo, ignores interrupts. This one polls twice a second: Python handles its
signals, and a `Waiting` event lets receivers check whether the peers will ever come. An exception that ends it leaves
the exchange half-way, which is recorded (`leave_exchange`). It knows tensors only; `Collectives` knows what they mean,
and checks that all ranks agree. `host_transport` sends from host to host in a group of two backends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nbaccel.base.aborting import (
    DEVICE_BACKENDS,
    Settling,
    abort_device_groups,
    is_aborted,
    leave_exchange,
    refuse_if_aborted,
    settle,
    uses_device,
)
from nbaccel.base.events import Waiting, emit
from nbaccel.base.exchange_time import exchange_clock
from nbaccel.base.world import World

if TYPE_CHECKING:
    from nbaccel.train.distributed.shared_messages import SharedMessages

__all__ = [
    "CollectivesSince",
    "Transport",
    "collective_counter",
    "group_timeout",
    "host_transport",
]

_LOOK_UP = timedelta(seconds=0.5)
_DEVICE_POLL_S = 50e-6
_SETTLE_S = 0.2
"""Time that a rank that leaves a wait stays for peers who may be about to come."""

_INTERRUPTED_S = 2.0
"""The same for a rank that was interrupted: most likely its peers are well, and about to come."""

_ABORT_S = 0.2
"""Time for its abort after that, which may have to wait for the peers' own, and continues without it."""

# torch 2.13 gave it a new name; the old one warns there.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_SENDABLE = frozenset({
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
})  # fmt: skip
"""Dtypes that every backend can send and add unchanged."""

_ADDED_AS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Dtypes in which the others are reduced; any other dtype is a tiny float, reduced as float32, or torch refuses it."""


class _SharedSum(NamedTuple):
    """A sum through the memory that ranks share, in the place of torch's work."""

    tensor: Tensor


class Transport:
    """The ranks of torch's default process group, to which tensors are sent.

    Args:
        device: This rank's. Other tensors are copied to where the backend can send from, and results are copied back.

    Attributes:
        call, calls: The current collective in words, and the number of collectives including it; for `Waiting`.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        self.world_size = world_size
        self.device = torch.device("cpu") if dist.get_backend() == "gloo" else device
        self.call = ""
        self.calls = 0
        self._messages: SharedMessages | None = None
        self._has_asked = False  # whether the ranks share memory
        self._is_on_host = self.device.type == "cpu"
        is_polled = not self._is_on_host or dist.get_backend() in DEVICE_BACKENDS
        self._wait = self._wait_for_device if is_polled else self._wait_on_host
        self._finish = self._let_the_device_wait if is_polled else self._wait_on_host

    def all_gather(self, rows: Tensor) -> Tensor:
        """Gather `rows` of all ranks, joined along the first dimension; their shapes must be equal."""
        count, *others = rows.shape
        if not rows.numel():
            return rows.new_empty((self.world_size * count, *others))
        if not self._can_send(rows):
            return _like(self.all_gather(self._sendable(rows)), rows)
        joined = rows.new_empty((self.world_size * count, *others))
        self._finish(_all_gather(joined, rows, async_op=True))
        return joined

    def read_all(self, numbers: Tensor) -> Tensor:
        """Gather a small tensor of each rank, stacked, on the host, for the program to read."""
        sent = numbers.to(self.device)
        joined = sent.new_empty((self.world_size, *sent.shape))
        self._wait(_all_gather(joined, sent[None], async_op=True))
        return joined.cpu()

    def _formed(self) -> SharedMessages | None:
        """Return the memory of the ranks of one machine, apart from what is called in every step."""
        from nbaccel.train.distributed.shared_messages import SharedMessages  # one process does not need it

        return SharedMessages.form(self.read_all, group_timeout() or dist.default_pg_timeout)

    def read_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return equally many numbers of each rank, by rank: as `read_all` does, for what is sent in every step."""
        if not self._has_asked:
            self._messages = self._formed()
            self._has_asked = True
        if is_aborted():
            refuse_if_aborted(self._where())
        if self._messages is None:
            told: list[list[float]] = self.read_all(torch.tensor(numbers, dtype=torch.float64, device="cpu")).tolist()
            return told
        began_s = time.perf_counter()
        try:
            return self._messages.exchange(numbers, self._where, self._look_up_on_host)
        except BaseException as error:
            leave_exchange(self.call, error)
            raise
        finally:
            exchange_clock.seconds += time.perf_counter() - began_s

    def forget_messages(self) -> None:
        """Let the ranks ask again at the next `read_numbers`, and with new memory. Every rank calls it there or never.

        A task that has failed may have left some of them in the midst of a message.
        """
        self._messages, self._has_asked = None, False

    def all_reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        """Add or compare `tensor` of all ranks; return a new tensor, of its dtype and on its device."""
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not self._can_send(tensor):
            kind = tensor.dtype if tensor.dtype in _SENDABLE else _ADDED_AS.get(tensor.dtype, torch.float32)
            reduced = reduced.to(self.device, kind)
        self._finish(dist.all_reduce(reduced, operation, async_op=True))
        return reduced.to(tensor.device, tensor.dtype)

    def start_sum(self, tensor: Tensor, is_of_step: bool = False) -> Any:
        """Begin to sum `tensor` of all ranks, in place; return the work for `finish_sums`.

        Args:
            is_of_step: It is finished before the next `read_numbers`, or never.
        """
        if is_of_step and self._messages is not None and self._messages.start_sum(tensor):
            return _SharedSum(tensor)
        return dist.all_reduce(tensor, async_op=True)

    def finish_sums(self, sums: Sequence[Any]) -> None:
        """Wait until all of `sums` are over, in the order in which they were started."""
        works = []
        for work in sums:
            if isinstance(work, _SharedSum):
                self._finish_shared(work.tensor)
            else:
                works.append(work)
        for work in works[:-1]:
            self._finish(work)
        for work in works[-1:]:
            self._wait(work)

    def _finish_shared(self, tensor: Tensor) -> None:
        assert self._messages is not None, "it was started there"
        began_s = time.perf_counter()
        try:
            self._messages.finish_sum(tensor, self._where, self._look_up_on_host)
        except BaseException as error:
            leave_exchange(self.call, error)
            raise
        finally:
            exchange_clock.seconds += time.perf_counter() - began_s

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return `tensor` as rank `source` has it; a new tensor. Dtypes and shapes must be equal."""
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not copy.numel():
            return copy
        if copy.is_complex():  # which gloo cannot broadcast in torch 2.6 and 2.8
            return torch.view_as_complex(self.broadcast(torch.view_as_real(copy), source))
        sent = copy if self._can_send(copy) else self._sendable(copy if copy.ndim else copy[None])
        self._finish(dist.broadcast(sent, source, async_op=True))
        return _like(sent, tensor).reshape(tensor.shape)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        ids = [self.device.index] if self.device.type == "cuda" else None
        self._wait(dist.barrier(device_ids=ids, async_op=True))

    def _can_send(self, tensor: Tensor) -> bool:
        return tensor.is_cpu is self._is_on_host and tensor.dtype in _SENDABLE

    def _sendable(self, rows: Tensor) -> Tensor:
        return (rows if rows.dtype in _SENDABLE else rows.view(torch.uint8)).to(self.device)

    def _wait_on_host(self, work: Any) -> None:
        """Wait until gloo is done; poll now and then while it is not."""
        waited_s, began_s = 0.0, time.perf_counter()
        try:
            while not self._wait_on_host_briefly(work):
                waited_s += _LOOK_UP.total_seconds()
                self._look_up(waited_s)
        except BaseException as error:
            leave_exchange(self.call, error)
            raise
        finally:
            exchange_clock.seconds += time.perf_counter() - began_s
        self._end(work)

    def _wait_on_host_briefly(self, work: Any) -> bool:
        """Wait for half a second; return whether the work is over, with or without an error."""
        try:
            work.wait(_LOOK_UP)
        except RuntimeError as error:  # "Operation timed out!": only this wait; the work continues
            below = None if error.__traceback__ is None else error.__traceback__.tb_next
            if below is not None and below.tb_frame.f_code is not getattr(type(work).wait, "__code__", None):
                raise  # by a handler of a signal, and not by torch
            return bool(work.is_completed())
        return True

    def _wait_for_device(self, work: Any) -> None:
        """Wait for NCCL by polling, since it aborts its communicator when a wait with a time limit expires."""
        began = time.monotonic()
        due_s = _LOOK_UP.total_seconds()
        try:
            # Work of an aborted communicator is not polled: torch's answer waits for the lock that the abort holds, and
            # holds the GIL meanwhile, so that nothing of this process would run until the abort has returned.
            while not is_aborted() and not work.is_completed():
                time.sleep(_DEVICE_POLL_S)
                waited_s = time.monotonic() - began
                if waited_s > due_s:
                    due_s += _LOOK_UP.total_seconds()
                    self._look_up(waited_s)
        except BaseException as error:
            # The kernel would wait on, and the next work of this rank on its device would wait behind it.
            if not (self._settle_for_peers() if isinstance(error, KeyboardInterrupt) else settle(_SETTLE_S)):
                abort_device_groups(_ABORT_S)
            raise
        refuse_if_aborted(self._where())  # a barrier's own wait would be for the device
        self._let_the_device_wait(work)

    def _settle_for_peers(self) -> bool:
        """Return whether the collective that an interrupt has left is over soon after all.

        The wait ends by `_INTERRUPTED_S`, by an abort, by another interrupt, and by a receiver of `Waiting` that
        knows that a peer will never come.
        """
        if not uses_device():
            return True
        settling, began = Settling(), time.monotonic()
        try:
            while not settling.wait(_SETTLE_S):
                waited_s = time.monotonic() - began
                if is_aborted() or waited_s > _INTERRUPTED_S:
                    return False
                self._look_up(waited_s)
        except BaseException:  # the first interrupt is what is raised
            return False
        return True

    def _let_the_device_wait(self, work: Any) -> None:
        """Make the device's next work wait for the collective, while the program continues."""
        work.wait()
        refuse_if_aborted(self._where())  # it counts as complete then, with whatever is in its buffers

    def _end(self, work: Any) -> None:
        """Raise the error of a collective that is over, if there is one, with a note of which one it was."""
        try:
            work.wait()
        except RuntimeError as error:
            error.add_note(f"this rank was in {self._where()}; a peer that is lost has left it, or died")
            raise

    def _look_up(self, waited_s: float) -> None:
        emit(Waiting(self._where(), waited_s))

    def _look_up_on_host(self, waited_s: float) -> None:
        refuse_if_aborted(self._where())  # the peer's wait in its device has ended so, and it does not come
        self._look_up(waited_s)

    def _where(self) -> str:
        return f"{self.call} (call {self.calls} of this process group)"


def _like(sent: Tensor, original: Tensor) -> Tensor:
    received = sent if sent.dtype == original.dtype else sent.view(original.dtype)
    return received.to(original.device)


def host_transport(transport: Transport) -> Transport:
    """Return a transport from host to host for the ranks of `transport`; itself where the group has no other.

    The form ``"cpu:gloo,cuda:nccl"`` sends tensors of the host by gloo. That does not wait for the device, which is
    busy with its queued work, and a rank that waits can be interrupted.
    """
    if transport.device.type == "cpu" or _backends().get("cpu") != "gloo":
        return transport
    return Transport(transport.world_size, torch.device("cpu"))


def collective_counter() -> Callable[[], int] | None:
    """Return a function that counts this rank's collectives in the default group; None if its backend cannot count."""
    group: Any = dist.group.WORLD
    if group is None:
        return None
    counted = [group]
    if len(set(_backends().values())) > 1:  # the group itself counts those of one backend
        counted = [group._get_backend(device) for device in group._device_types]
    count = partial(_sum, [one._get_sequence_number_for_group for one in counted])
    try:
        count()
    except RuntimeError:
        return None
    return count


class CollectivesSince:
    """Tells whether the ranks met in a collective since this object was made.

    Args:
        counts_anyway: Also if they did not; the others may have met in batches that this rank does not have.

    Attributes:
        are_counted: False in one process, and where the backend does not count collectives.
    """

    __slots__ = ("_before", "_count", "are_counted", "were_held")

    def __init__(self, world: World, counts_anyway: bool) -> None:
        self._count = collective_counter() if world.is_distributed else None
        self.are_counted = self._count is not None
        self.were_held = counts_anyway or not self.are_counted
        self._before = -1 if self._count is None else self._count()

    def look(self) -> bool:
        """Return whether they have met by now."""
        if not self.were_held and self._count is not None:
            self.were_held = self._count() != self._before
        return self.were_held


def group_timeout() -> timedelta | None:
    """Return the time limit of the default group's collectives; None where its backend does not tell."""
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        found: timedelta = backend.options._timeout
    except (RuntimeError, AttributeError):
        return None
    return found


def _backends() -> dict[str, str]:
    """Return the default group's backend for each kind of device that it knows."""
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))


def _sum(counts: list[Callable[[], int]]) -> int:
    return sum(count() for count in counts)
