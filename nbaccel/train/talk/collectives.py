"""Collectives over nested containers: gather, reduce, broadcast, pad, barrier. Run in ranks, by every rank.

`Collectives` itself is for one process: values come back as they went in. `GroupCollectives` uses torch's default
process group; its first calls are compared between the ranks (`Fingerprints`). It decides what is sent; the `Transport`
decides how, and how long to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nbaccel.train.talk.fingerprints import CHECKED_CALLS, Fingerprints, Shape
from nbaccel.train.talk.hosts import host_transport
from nbaccel.train.talk.nested import leaves, map_children
from nbaccel.train.talk.objects import join, pack, unpack
from nbaccel.train.talk.transport import Transport
from nbaccel.world import World

__all__ = ["CHECKED_CALLS", "Collectives", "GroupCollectives", "holds_only_tensors", "holds_tensors"]

_REDUCTIONS = ("sum", "mean", "max", "min", "none")


class Collectives:
    """Collectives of a single process."""

    def gather(self, value: Any) -> Any:
        """Gather every tensor in `value`, those of all ranks joined along the first dimension, on every rank.

        A value without any tensor is gathered as by `gather_objects`; None stays None.
        """
        return value

    def gather_uneven(self, value: Any) -> Any:
        """Gather as `gather` does, for first dimensions that may differ between ranks; one more small exchange."""
        return value

    def gather_objects(self, value: Any) -> Any:
        """Gather any picklable values: lists of all ranks joined, mappings joined by key, others listed by rank."""
        return value

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum, average or compare every tensor in `value` over the ranks; `value` itself is not changed.

        Sums and means of booleans count them.
        """
        _refuse_unknown(reduction)
        return value if scale == 1.0 else _map_tensors("reduce", lambda tensor: tensor * scale, value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return every tensor in `value` as rank `source` has it."""
        return value

    def broadcast_objects(self, values: list[Any], source: int = 0) -> list[Any]:
        """Return the picklable entries of the list `values` as rank `source` has them; the list is changed in place."""
        return values

    def pad(self, value: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad every tensor in `value` along `dim` to the longest of all ranks."""
        return value

    def any(self, flag: bool, call: str = "any") -> bool:
        """Return whether `flag` is true on any rank.  call: what the ranks are doing, for messages."""
        return flag

    def announce(self, call: str, text: str = "") -> list[str]:
        """Return every rank's text, by rank, cut to half a kilobyte.  call: what the ranks are doing, for messages."""
        return [text]

    def agree(self, call: str) -> None:
        """Wait until every rank is about to make the same `call`; for calls in which torch itself would wait for ever.

        Raises:
            CollectiveMismatch: the ranks are about to do different things.
        """

    def barrier(self) -> None:
        """Wait until every rank has called this."""

    def tell(self, call: str, numbers: Tensor) -> Tensor:
        """Return a small tensor of every rank, stacked, on the host.  call: what the ranks are doing, for messages."""
        return numbers.cpu()[None]

    @property
    def device(self) -> torch.device:
        """The device on which `start_sum` takes tensors."""
        return torch.device("cpu")

    def start_sum(self, tensor: Tensor) -> Any:
        """Begin to sum `tensor` of all ranks in place, if the backend can add it; for `finish_sums`."""

    def finish_sums(self, call: str, sums: Sequence[Any]) -> None:
        """Wait until all of `sums`, at least one, are over.  call: what the ranks are doing, for messages."""


class GroupCollectives(Collectives):
    """Collectives of the ranks of torch's default process group.

    Data that only the host has, or needs, are sent from host to host where the group can do that: no rank then
    waits for a device's pending work. Tensors of the program are sent by the device's backend
    wherever they are, since one rank's may be on the CPU and another one's not.

    device: this rank's.  debug: compare every call, not only the first ones.
    """

    def __init__(self, world: World, device: torch.device, debug: bool = False) -> None:
        self._world = world
        self._device = device
        self._debug = debug
        self._transport = Transport(world.world_size, device)
        self._host = host_transport(self._transport)
        self._fingerprints = Fingerprints(self._host, debug, {self._host, self._transport})
        self._check = self._fingerprints.check

    def anew(self) -> GroupCollectives:
        """Return new collectives for the present default group; calls are counted and compared from the first one."""
        return GroupCollectives(self._world, self._device, self._debug)

    @property
    def calls(self) -> int:
        """Number of collectives of this group so far."""
        return self._transport.calls

    def gather(self, value: Any) -> Any:
        if not holds_tensors(value):
            return self.gather_objects(value)
        self._check("gather", value)
        return _map_tensors("gather", self._gather_one, value)

    def gather_uneven(self, value: Any) -> Any:
        self._check("gather_uneven", value, Shape.ROWS_VARY)
        rows_of = iter(self._sizes([tensor.shape[0] if tensor.ndim else 1 for tensor in _tensors(value)]))
        return _map_tensors("gather", lambda tensor: self._gather_rows(tensor, next(rows_of)), value)

    def gather_objects(self, value: Any) -> Any:
        self._check("gather_object")
        data, is_sent = _packed(value)
        (sizes,) = self._sizes([len(data) if is_sent else -len(data)])
        received = self._gather_rows(_as_tensor(data), [abs(size) for size in sizes], self._host).numpy().tobytes()
        ends = [sum(map(abs, sizes[: rank + 1])) for rank in range(len(sizes))]
        parts = [received[end - abs(size) : end] for end, size in zip(ends, sizes, strict=True)]
        _refuse_unsent("gather_object", {rank: parts[rank] for rank, size in enumerate(sizes) if size < 0})
        return join([unpack(part, self._device) for part in parts])

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        _refuse_unknown(reduction)
        self._check(f"reduce {reduction}", value)
        return _map_tensors("reduce", lambda tensor: self._reduce_one(tensor, reduction, scale), value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        self._refuse_unknown_rank(source)
        self._check(f"broadcast from {source}", value)
        return _map_tensors("broadcast", lambda tensor: self._transport.broadcast(tensor, source), value)

    def broadcast_objects(self, values: list[Any], source: int = 0) -> list[Any]:
        self._refuse_unknown_rank(source)
        call = "broadcast_object_list"
        self._check(f"{call} of {len(values)} from {source}")
        is_source = self._world.rank == source
        data, is_sent = _packed(values) if is_source else (b"", True)
        size = int(self._host.broadcast(torch.tensor(len(data) if is_sent else -len(data), device="cpu"), source))
        sent = _as_tensor(data) if is_source else torch.empty(abs(size), dtype=torch.uint8, device="cpu")
        received = self._host.broadcast(sent, source).numpy().tobytes()
        _refuse_unsent(call, {source: received} if size < 0 else {})
        if not is_source:
            values[:] = unpack(received, self._device)
        return values

    def pad(self, value: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        self._check(f"pad_across_processes along {dim}", value, Shape.ANY)
        sizes_of = iter(self._sizes([_size(tensor, dim) for tensor in _tensors(value)]))

        def one(tensor: Tensor) -> Tensor:
            missing = max(next(sizes_of)) - _size(tensor, dim)
            return _pad(tensor, dim, missing, pad_index, pad_first) if missing else tensor

        return _map_tensors("pad_across_processes", one, value)

    def any(self, flag: bool, call: str = "any") -> bool:
        self._check(call)
        return bool(self._host.read_all(torch.tensor(int(flag), device="cpu")).any())

    def announce(self, call: str, text: str = "") -> list[str]:
        self._check(call)
        return self._fingerprints.exchange(text)

    def agree(self, call: str) -> None:
        self._check(call, always=True)

    def barrier(self) -> None:
        if self._check("wait_for_everyone"):
            return  # the comparison was a barrier
        if self._host is self._transport:
            self._transport.barrier()
        else:  # torch's own would be the device's
            self._host.read_all(torch.zeros(1, device="cpu"))

    def tell(self, call: str, numbers: Tensor) -> Tensor:
        self._fingerprints.enter(call)
        return self._host.read_all(numbers)

    @property
    def device(self) -> torch.device:
        return self._transport.device

    def start_sum(self, tensor: Tensor) -> Any:
        return self._transport.start_sum(tensor)

    def finish_sums(self, call: str, sums: Sequence[Any]) -> None:
        self._fingerprints.enter(call)
        self._transport.finish_sums(sums)

    def _gather_one(self, tensor: Tensor, by: Transport | None = None) -> Tensor:
        rows = tensor.detach() if tensor.requires_grad else tensor
        return (by or self._transport).all_gather(rows.contiguous() if rows.ndim else rows[None])

    def _gather_rows(self, tensor: Tensor, sizes: list[int], by: Transport | None = None) -> Tensor:
        """Gather as `_gather_one` does, for first dimensions of `sizes`, by rank."""
        rows = tensor if tensor.ndim else tensor[None]
        longest = max(sizes)
        if min(sizes) == longest:
            return self._gather_one(rows, by)
        padded = _pad(rows, 0, longest - rows.shape[0], 0, False) if rows.shape[0] < longest else rows
        parts = self._gather_one(padded, by).split(longest)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def _reduce_one(self, tensor: Tensor, reduction: str, scale: float) -> Tensor:
        if reduction == "none":
            return tensor
        if reduction in ("max", "min"):
            compared = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.MIN
            reduced = self._transport.all_reduce(tensor, compared)
        else:
            counted = tensor.long() if tensor.dtype is torch.bool else tensor
            reduced = self._transport.all_reduce(counted, dist.ReduceOp.SUM)
            if reduction == "mean":
                reduced = reduced / self._world.world_size
        return reduced if scale == 1.0 else reduced * scale

    def _sizes(self, sizes: list[int]) -> list[list[int]]:
        """Return, for each of this rank's `sizes`, its value on every rank."""
        by_rank: list[list[int]] = self._host.read_all(torch.tensor(sizes, device="cpu")).tolist()
        return [list(size) for size in zip(*by_rank, strict=True)]

    def _refuse_unknown_rank(self, source: int) -> None:
        if not 0 <= source < self._world.world_size:
            raise ValueError(f"from_process must lie in 0..{self._world.world_size - 1}, got {source}")


def holds_tensors(value: Any) -> bool:
    """Return whether there is a tensor anywhere in `value`."""
    return isinstance(value, Tensor) or any(isinstance(leaf, Tensor) for leaf in leaves(value))


def holds_only_tensors(value: Any) -> bool:
    """Return whether `value` can be gathered as tensors: it contains some, and nothing else but None."""
    return holds_tensors(value) and all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves(value))


def _refuse_unknown(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def _map_tensors(operation: str, function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if value is None:
        return None
    rebuilt = map_children(lambda child: _map_tensors(operation, function, child), value)
    if rebuilt is value:
        raise TypeError(
            f"{operation} takes tensors, in any nesting of tuples, lists, dicts and dataclasses; "
            f"got {type(value).__name__}. gather_for_metrics takes any picklable object."
        )
    return rebuilt


def _size(tensor: Tensor, dim: int) -> int:
    """Return the length of `tensor` along `dim`; 0 where it has no such dimension, and nothing to be padded."""
    return tensor.shape[dim] if -tensor.ndim <= dim < tensor.ndim else 0


def _pad(tensor: Tensor, dim: int, missing: int, pad_index: float, pad_first: bool) -> Tensor:
    # Not by F.pad: before torch 2.7 it refuses a tensor that has no elements in another dimension.
    shape = list(tensor.shape)
    shape[dim] += missing
    padded = tensor.new_full(shape, pad_index)
    padded.narrow(dim, missing if pad_first else 0, tensor.shape[dim]).copy_(tensor)
    return padded


def _packed(value: Any) -> tuple[bytes, bool]:
    """Return `value` as bytes and True, or the reason why not and False. Before any collective, so no rank hangs."""
    try:
        return pack(value), True
    except Exception as error:
        return f"{type(error).__name__}: {error}".encode(), False


def _refuse_unsent(call: str, reasons: dict[int, bytes]) -> None:
    """Raise, on every rank, the reasons why some ranks' objects were not sent."""
    if reasons:
        sides = "\n".join(f"  rank {rank}: {reason.decode()}" for rank, reason in reasons.items())
        raise TypeError(f"{call} sends what can be pickled, and one rank's object cannot be:\n{sides}")


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
