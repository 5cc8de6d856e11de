"""SharedMessages: numbers and small sums of all ranks of one machine, in memory that they share. Runs in ranks.

A collective of gloo takes some hundred microseconds of processor time and four changes of threads, also for a line of
numbers. Here a rank writes into its own place, then the number of its message, and wakes the ranks that wait for that
number: a system call, and another one where it has to wait itself. So go the numbers and the small sums of each step of
an unmodified loop (`Transport.read_numbers`); all else, and these where ranks share no memory, by the group's backend.

Reasons: docs/design/step.md
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import secrets
import select
import stat
import struct
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbaccel.errors import CollectiveMismatch, PeerFailed

__all__ = ["SharedMessages"]

_PART_BYTES = 4096
"""Bytes of numbers that are sent at once; more are sent in parts."""

_SUMS_BYTES = 2 << 20
"""Bytes of the sums of all ranks together. With larger ones the backend is as fast, for each rank reads all of them."""

_SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_VIEWS = 256

_LOOK_UP_S = 0.5
_LINE = 64  # each rank's words have a line of the processor's cache for themselves
_WORDS = _LINE // 4
_TOLD, _SUMMED_AT, _SUM_BYTES = range(3)
"""Words of a rank: the number of its latest message, that before its latest sum, and the sum's bytes."""

_NUMBERS = 1 << 32
_FUTEX, _WAIT, _WAKE = 202, 0, 1  # of x86-64
_EVERYBODY = 1 << 30
_NONCE = struct.Struct("@q")


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMessages:
    """The messages of one process group: the n-th of one rank meets the n-th of its peers, and one sum may follow each.

    A rank has two places for messages, which it uses in turn. It writes the message n + 2 once it has read those of
    number n + 1 of all peers, who had read its message n before they wrote them. Sums have one place: a message of all
    ranks is between two of them.

    Args:
        memory: The same in all ranks.
        rank: The rank of this process.
        pids: The process ids of all ranks.
        limit_s: How long a peer may stay away.
    """

    def __init__(self, memory: mmap.mmap, rank: int, pids: Sequence[int], limit_s: float) -> None:
        self._memory = memory
        self._rank = rank
        self._pids = pids
        self._limit_s = limit_s
        self._layout = _Layout(len(pids))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._words = memoryview(memory).cast("I")
        self._count = 0
        self._has_summed = False
        self._peers = [peer for peer in range(len(pids)) if peer != rank]
        self._views: dict[tuple[int, torch.dtype, int], Tensor] = {}

    @classmethod
    def form(cls, read_all: Callable[[Tensor], Tensor], timeout: timedelta) -> SharedMessages | None:
        """Return the messages of the default group; None if its ranks cannot share memory. Collective.

        Rank 0 makes the memory, and the others find it by its process and descriptor. They share it only if what rank 0
        has written there is what it has said: a rank on another machine, or in another container, finds something else.

        Args:
            read_all: Gathers a small tensor of each rank.
            timeout: The timeout of the group's collectives.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        size, nonce = _Layout(world_size).size, secrets.randbits(62)
        fd = _create(size, nonce) if rank == 0 and _is_supported() else -1
        try:
            said = read_all(torch.tensor([os.getpid(), fd, nonce], dtype=torch.int64, device="cpu")).tolist()
            owner, number, expected = said[0]
            memory = _open(owner, number, size, expected) if number >= 0 and _is_supported() else None
            are_all_there = read_all(torch.tensor([memory is not None], dtype=torch.int64, device="cpu")).all()
        finally:
            if fd >= 0:
                os.close(fd)
        if memory is None or not are_all_there:
            return None
        return cls(memory, rank, [pid for pid, _, _ in said], timeout.total_seconds())

    def exchange(
        self, numbers: Sequence[float], where: Callable[[], str], look_up: Callable[[float], None]
    ) -> list[list[float]]:
        """Return the numbers of all ranks, by rank. Every rank calls it, with equally many numbers.

        The wait ends with the numbers of all peers; by an interrupt; by `look_up`, which hears of peers that have left,
        are done, or are elsewhere; with a peer's process; and by the time limit of the group's collectives.

        Args:
            where: Returns the collective in words.
            look_up: Called twice a second while the rank waits; it may raise.

        Raises:
            PeerFailed: A peer has ended, or did not come in time.
        """
        most = _PART_BYTES // 8
        if len(numbers) > most:
            parts = [self.exchange(numbers[at : at + most], where, look_up) for at in range(0, len(numbers), most)]
            return [[each for part in parts for each in part[rank]] for rank in range(len(self._pids))]
        self._has_summed = False
        self._count = (self._count + 1) % _NUMBERS
        message = _doubles(len(numbers))
        at = self._layout.message(self._rank, self._count)
        self._memory[at : at + message.size] = message.pack(len(numbers), *numbers)
        self._announce(_TOLD)
        told = [list(numbers)] * len(self._pids)
        for rank in self._peers:
            self._await(rank, _TOLD, where, look_up)
            count, *theirs = message.unpack_from(self._memory, self._layout.message(rank, self._count))
            self._compare(rank, int(count) * 8, len(numbers) * 8, where)
            told[rank] = theirs
        return told

    def start_sum(self, tensor: Tensor) -> bool:
        """Send `tensor` to be summed; return False, and do nothing, where it has to be sent in another way.

        Every rank calls it, with the same shape. One sum, the first, follows each call of `exchange`: before a second
        one a peer may still read the first.
        """
        if self._has_summed or tensor.nbytes > self._layout.sum_bytes or tensor.dtype not in _SUMMED:
            return False
        if not tensor.is_cpu or not tensor.is_contiguous():
            return False
        self._has_summed = True
        self._sent_by(self._rank, tensor).copy_(tensor)
        self._words[self._rank * _WORDS + _SUM_BYTES] = tensor.nbytes
        self._announce(_SUMMED_AT)
        return True

    def finish_sum(self, tensor: Tensor, where: Callable[[], str], look_up: Callable[[float], None]) -> None:
        """Write into `tensor` the sum of what all ranks have sent, added in the order of ranks. As for `exchange`."""
        for rank in self._peers:
            self._await(rank, _SUMMED_AT, where, look_up)
            self._compare(rank, self._words[rank * _WORDS + _SUM_BYTES], tensor.nbytes, where)
            if len(self._peers) == 1:  # of two the order does not matter
                tensor.add_(self._sent_by(rank, tensor))
                return
        for rank in range(len(self._pids)):
            theirs = self._sent_by(rank, tensor)
            tensor.add_(theirs) if rank else tensor.copy_(theirs)

    def _announce(self, word: int) -> None:
        """Show that this rank has written what `word` is about, and wake those who wait for it."""
        self._words[self._rank * _WORDS + word] = self._count  # x86-64 keeps the order of stores
        _futex(self._address + self._rank * _LINE + word * 4, _WAKE, _EVERYBODY)

    def _await(self, peer: int, word: int, where: Callable[[], str], look_up: Callable[[float], None]) -> None:
        """Wait until `word` of `peer` is the number of this rank's latest message, or the next one."""
        words, at, wanted = self._words, peer * _WORDS + word, self._count
        if (words[at] - wanted) % _NUMBERS < 2:
            return
        began = time.monotonic()
        due_s = _LOOK_UP_S
        while ((seen := words[at]) - wanted) % _NUMBERS >= 2:
            _futex(self._address + at * 4, _WAIT, seen, _look_up_time())
            waited_s = time.monotonic() - began
            if waited_s < due_s:
                continue
            due_s += _LOOK_UP_S
            has_ended = _has_ended(self._pids[peer])
            if words[at] != seen:  # before it ended
                continue
            look_up(waited_s)
            here = f"rank {self._rank} of {len(self._pids)} waited"
            if has_ended:
                raise PeerFailed(f"{here} in {where()} for rank {peer}, whose process has ended")
            if waited_s > self._limit_s:
                raise PeerFailed(f"{here} {self._limit_s:g} s for rank {peer} in {where()}: every rank must come there")

    def _compare(self, rank: int, theirs: int, mine: int, where: Callable[[], str]) -> None:
        if theirs != mine:
            raise CollectiveMismatch(
                f"rank {self._rank} of {len(self._pids)} has sent {mine} bytes in {where()}, and rank {rank} has sent "
                f"{theirs}: the ranks are out of step. Every rank must make the same calls."
            )

    def _sent_by(self, rank: int, like: Tensor) -> Tensor:
        """Return the place of a rank's sum as a tensor with as many elements as `like`."""
        key = rank, like.dtype, like.numel()
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            at = self._layout.sum(rank)
            view = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=at)
            self._views[key] = view
        return view


class _Layout:
    """Places in the memory.

    Attributes:
        sum_bytes: The most that a sum may have.
        size: The size of all of it, with the nonce at its end.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._message_bytes = 8 + _PART_BYTES
        self._messages_at = world_size * _LINE
        self._sums_at = _aligned(self._messages_at + 2 * world_size * self._message_bytes)
        self.sum_bytes = _SUMS_BYTES // world_size // _LINE * _LINE
        self.size = self._sums_at + world_size * self.sum_bytes + _NONCE.size

    def message(self, rank: int, count: int) -> int:
        """Return where the message of `rank` begins.

        Args:
            count: Its number.
        """
        return self._messages_at + (count % 2 * self._world_size + rank) * self._message_bytes

    def sum(self, rank: int) -> int:
        return self._sums_at + rank * self.sum_bytes


def _aligned(at: int) -> int:
    return -(-at // mmap.PAGESIZE) * mmap.PAGESIZE


@functools.lru_cache(_MOST_VIEWS)
def _doubles(count: int) -> struct.Struct:
    return struct.Struct(f"@{count + 1}d")


@functools.cache
def _look_up_time() -> Any:
    return ctypes.byref(_Time(0, int(_LOOK_UP_S * 1e9)))


@functools.cache
def _syscall() -> Any:
    function = ctypes.CDLL(None).syscall
    address, word = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = (ctypes.c_long, address, ctypes.c_int, word, address)
    function.restype = ctypes.c_long
    return function


def _futex(address: int, operation: int, value: int, limit: Any = None) -> None:
    """Wait while the number at `address` is `value`, or wake those who do. Errors are looks that come early."""
    _syscall()(_FUTEX, address, operation, value, limit)


def _is_supported() -> bool:
    """Return whether this machine keeps the order of stores, and has these system calls by these numbers.

    Also whether the numbers of processes in ``/proc`` are those of this process's own namespace.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or sys.maxsize < _NUMBERS:
        return False
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self") == str(os.getpid())
    return False


def _create(size: int, nonce: int) -> int:
    """Return the descriptor of new memory; -1 if there is none."""
    with contextlib.suppress(OSError):
        fd = os.memfd_create("nbaccel-messages", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            os.pwrite(fd, _NONCE.pack(nonce), size - _NONCE.size)
        except OSError:
            os.close(fd)
            raise
        return fd
    return -1


def _open(pid: int, fd: int, size: int, nonce: int) -> mmap.mmap | None:
    """Return the memory that process `pid` has as `fd`; None if it is not found, or another one."""
    path = f"/proc/{pid}/fd/{fd}"
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return None
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(own, size)
        finally:
            os.close(own)
        if _NONCE.unpack_from(memory, size - _NONCE.size) == (nonce,):
            return memory
    return None


def _has_ended(pid: int) -> bool:
    """Return whether the process has ended, whether or not its parent has noticed."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # no descriptor is left: as long as that is so, it is not known
        return False
    try:
        end = select.poll()
        end.register(fd, select.POLLIN)
        return bool(end.poll(0))
    finally:
        os.close(fd)
