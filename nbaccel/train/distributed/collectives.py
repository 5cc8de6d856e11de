"""Collectives over nested containers: gather, reduce, broadcast, pad, barrier. Run in ranks, by every rank.

`Collectives` itself is for one process: values come back as they went in. `GroupCollectives` uses torch's default
process group, and decides what is sent; the `Transport` decides how, and how long to wait. The first calls of a group
are compared between the ranks (`Fingerprints`). Objects other than tensors are sent as pickles; only pickles that ranks
of our own process group wrote are read here.
"""

from __future__ import annotations

import functools
import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from nbaccel.base.aborting import leave_exchange, refuse_if_exchange_was_left
from nbaccel.base.events import CollectiveEntered, emit
from nbaccel.base.world import World
from nbaccel.errors import CollectiveMismatch, NbaccelError
from nbaccel.train.distributed.nested import children, is_container, leaves, map_children
from nbaccel.train.distributed.transport import Transport, host_transport

__all__ = [
    "CHECKED_CALLS",
    "Collectives",
    "Fingerprints",
    "GroupCollectives",
    "Shape",
    "holds_only_tensors",
    "holds_tensors",
    "join",
    "pack",
    "unpack",
]

_REDUCTIONS = ("sum", "mean", "max", "min", "none")

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Collectives:
    """Collectives of a single process.

    Attributes:
        debug: Every call is compared, not only the first ones; in a group, to set it is a collective.
    """

    debug = False

    def gather(self, value: Any) -> Any:
        """Gather every tensor in `value`, those of all ranks joined along the first dimension, on every rank.

        A value without any tensor is gathered as by `gather_objects`; None stays None.
        """
        return value

    def gather_uneven(self, value: Any) -> Any:
        """Gather as `gather` does, for first dimensions that may differ between ranks; one more small exchange."""
        return value

    def gather_objects(self, value: Any, call: str = "gather_object") -> Any:
        """Gather any picklable values: lists of all ranks joined, mappings joined by key, others listed by rank.

        Args:
            call: The call as a message about ranks that wait names it.
        """
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
        """Return whether `flag` is true on any rank.

        Args:
            call: What the ranks are doing, for messages.
        """
        return flag

    def announce(self, call: str, text: str = "") -> list[str]:
        """Return every rank's text, by rank, cut to half a kilobyte.

        Args:
            call: What the ranks are doing, for messages.
        """
        return [text]

    def agree(self, call: str, details: str = "", tensors: Mapping[str, Tensor] | None = None) -> None:
        """Wait until every rank is about to make the same `call`; for calls in which torch itself would wait for ever.

        Args:
            details: More words on the call, which have to be equal too.
            tensors: By name, those that torch is about to exchange: their names, types and shapes have to be equal, in
                this order. Where they differ and the call has `details`, they are named.

        Raises:
            CollectiveMismatch: The ranks are about to do different things.
        """

    def barrier(self) -> None:
        """Wait until every rank has called this."""

    def tell(self, call: str, numbers: Tensor) -> Tensor:
        """Return a small tensor of every rank, stacked, on the host.

        Args:
            call: What the ranks are doing, for messages.
        """
        return numbers.cpu()[None]

    def tell_numbers(self, call: str, numbers: Sequence[float]) -> list[list[float]]:
        """Return equally many numbers of every rank, by rank: as `tell` does, for what is sent in every step."""
        told: list[list[float]] = self.tell(call, torch.tensor(numbers, dtype=torch.float64, device="cpu")).tolist()
        return told

    @property
    def device(self) -> torch.device:
        """The device on which `start_sum` takes tensors."""
        return torch.device("cpu")

    def forget_messages(self) -> None:
        """Begin a task: `tell_numbers` of an earlier one may have been left half-way. Every rank calls it."""

    def start_sum(self, tensor: Tensor, is_of_step: bool = False) -> Any:
        """Begin to sum `tensor` of all ranks in place, if the backend can add it; for `finish_sums`.

        Args:
            is_of_step: It is finished before the next `tell_numbers`, or never.
        """

    def finish_sums(self, call: str, sums: Sequence[Any]) -> None:
        """Wait until all of `sums`, at least one, are over.

        Args:
            call: What the ranks are doing, for messages.
        """


def _entire(method: _Method) -> _Method:
    """Decorate a collective of several exchanges: an exception between two of them leaves it half-way, too.

    Errors about what was to be sent are those of all ranks, with nothing under way, and torch's own come with the end
    of the connection.
    """

    @functools.wraps(method)
    def call(self: GroupCollectives, *args: Any, **kwargs: Any) -> Any:
        calls = self.calls
        try:
            return method(self, *args, **kwargs)
        except (NbaccelError, TypeError, ValueError):
            raise
        except BaseException as error:
            if type(error) is not RuntimeError and self.calls != calls:
                leave_exchange(self.call, error)
            raise

    return call  # type: ignore[return-value]  # of the same signature


class GroupCollectives(Collectives):
    """Collectives of the ranks of torch's default process group.

    Data that only the host has, or needs, are sent from host to host where the group can do that: no rank then
    waits for a device's pending work. Tensors of the program are sent by the device's backend
    wherever they are, since one rank's may be on the CPU and another one's not.

    Args:
        device: This rank's.
        debug: Compare every call, not only the first ones.
    """

    def __init__(self, world: World, device: torch.device, debug: bool = False) -> None:
        self._world = world
        self._device = device
        self._debug = debug
        self._transport = Transport(world.world_size, device)
        self._host = host_transport(self._transport)
        self._fingerprints = Fingerprints(self._host, debug, {self._host, self._transport})
        self._check = self._fingerprints.check

    @property
    def debug(self) -> bool:
        return self._debug

    @debug.setter
    def debug(self, debug: bool) -> None:
        self.agree(f"debug = {debug}")
        self._debug = debug
        self._fingerprints.compare_all(debug)

    def anew(self) -> GroupCollectives:
        """Return new collectives for the present default group; calls are counted and compared from the first one."""
        return GroupCollectives(self._world, self._device, self._debug)

    @property
    def calls(self) -> int:
        """Number of collectives of this group so far."""
        return self._transport.calls

    @property
    def call(self) -> str:
        """The latest of them, in words."""
        return self._transport.call

    @_entire
    def gather(self, value: Any) -> Any:
        if not holds_tensors(value):
            return self.gather_objects(value)
        self._check("gather", value)
        return _map_tensors("gather", self._gather_one, value)

    @_entire
    def gather_uneven(self, value: Any) -> Any:
        self._check("gather_uneven", value, Shape.ROWS_VARY)
        rows_of = iter(self._sizes([tensor.shape[0] if tensor.ndim else 1 for tensor in _tensors(value)]))
        return _map_tensors("gather", lambda tensor: self._gather_rows(tensor, next(rows_of)), value)

    @_entire
    def gather_objects(self, value: Any, call: str = "gather_object") -> Any:
        self._check(call)
        data, is_sent = _packed(value)
        (sizes,) = self._sizes([len(data) if is_sent else -len(data)])
        received = self._gather_rows(_as_tensor(data), [abs(size) for size in sizes], self._host).numpy().tobytes()
        ends = [sum(map(abs, sizes[: rank + 1])) for rank in range(len(sizes))]
        parts = [received[end - abs(size) : end] for end, size in zip(ends, sizes, strict=True)]
        _refuse_unsent("gather_object", {rank: parts[rank] for rank, size in enumerate(sizes) if size < 0})
        return join([unpack(part, self._device) for part in parts])

    @_entire
    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        _refuse_unknown(reduction)
        self._check(f"reduce {reduction}", value)
        return _map_tensors("reduce", lambda tensor: self._reduce_one(tensor, reduction, scale), value)

    @_entire
    def broadcast(self, value: Any, source: int = 0) -> Any:
        self._refuse_unknown_rank(source)
        self._check(f"broadcast from {source}", value)
        return _map_tensors("broadcast", lambda tensor: self._transport.broadcast(tensor, source), value)

    @_entire
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

    @_entire
    def pad(self, value: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        self._check(f"pad_across_processes along {dim}", value, Shape.ANY)
        sizes_of = iter(self._sizes([_size(tensor, dim) for tensor in _tensors(value)]))

        def one(tensor: Tensor) -> Tensor:
            missing = max(next(sizes_of)) - _size(tensor, dim)
            return _pad(tensor, dim, missing, pad_index, pad_first) if missing else tensor

        return _map_tensors("pad_across_processes", one, value)

    @_entire
    def any(self, flag: bool, call: str = "any") -> bool:
        self._check(call)
        return bool(self._host.read_all(torch.tensor(int(flag), device="cpu")).any())

    @_entire
    def announce(self, call: str, text: str = "") -> list[str]:
        self._check(call)
        return self._fingerprints.exchange(text)

    @_entire
    def agree(self, call: str, details: str = "", tensors: Mapping[str, Tensor] | None = None) -> None:
        mine = [f"{name} {_describe(tensor, Shape.ALL)}" for name, tensor in (tensors or {}).items()]
        texts = self._fingerprints.unlike(f"{call} {details}".rstrip(), "\n".join(mine))
        if not texts:
            return
        if not details or not all(text.startswith(f"{call} ") for text in texts):
            raise CollectiveMismatch(self._fingerprints.mismatch(texts))
        # Then all ranks are here, since each of them has read these texts.
        everyones: list[list[str]] = self.gather_objects([mine], call)
        raise CollectiveMismatch(self._fingerprints.mismatch(texts, _unlike(everyones)))

    @_entire
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

    def tell_numbers(self, call: str, numbers: Sequence[float]) -> list[list[float]]:
        self._fingerprints.enter(call)
        return self._host.read_numbers(numbers)

    @property
    def device(self) -> torch.device:
        return self._transport.device

    def forget_messages(self) -> None:
        self._host.forget_messages()

    def start_sum(self, tensor: Tensor, is_of_step: bool = False) -> Any:
        return self._transport.start_sum(tensor, is_of_step)

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


CHECKED_CALLS = 16
"""Number of calls of a group that are compared without debug mode."""

_SHOWN = 4
_TEXT_BYTES = 512
_DIGEST_BYTES = 8


class Shape(Enum):
    """The part of a tensor's shape that must be equal on all ranks."""

    ALL = "all dimensions"
    ROWS_VARY = "all dimensions but the first"
    ANY = "none, but as many dimensions"


class Fingerprints:
    """Counts the calls of one process group, and compares them.

    Without the comparison torch would hang, or mix the bytes of two calls. Comparing costs one more small exchange, so
    only the first calls of a process group are compared, and all in debug mode: a program that mixes its collectives
    does so early.

    Args:
        transport: Used for the comparison.
        debug: Compare every call, not only the first ones.
        told: The transports of the group, to which each call is reported.
    """

    def __init__(self, transport: Transport, debug: bool, told: Collection[Transport]) -> None:
        self._transport = transport
        self._told = tuple(told)
        self.compare_all(debug)

    def compare_all(self, debug: bool) -> None:
        """Compare every call from now on, or the first ones alone."""
        self._compared = sys.maxsize if debug else CHECKED_CALLS

    def check(self, operation: str, value: Any = None, shape: Shape = Shape.ALL, always: bool = False) -> bool:
        """Enter a collective; return False when it was not compared with the other ranks'.

        Args:
            always: Compare it, whatever the number of calls.

        Raises:
            CollectiveMismatch: On every rank, with the call of each rank.
        """
        transport = self._transport
        is_compared = always or transport.calls < self._compared
        self.enter(operation, is_compared)
        if not is_compared:
            return False
        if texts := self._compare(operation if value is None else f"{operation} {_describe(value, shape)}"):
            raise CollectiveMismatch(self.mismatch(texts))
        return True

    def unlike(self, operation: str, beyond: str) -> list[str]:
        """Enter a collective; return every rank's words for it if they differ, or `beyond` does; else nothing."""
        self.enter(operation, is_compared=True)
        return self._compare(operation, beyond)

    def _compare(self, mine: str, beyond: str = "") -> list[str]:
        for each in self._told:
            each.call = mine
        everyone = self._exchange(mine, beyond)
        return [text for text, _ in everyone] if any(theirs != everyone[0] for theirs in everyone) else []

    def enter(self, operation: str, is_compared: bool = False) -> None:
        """Count a collective."""
        refuse_if_exchange_was_left(operation)
        emit(CollectiveEntered(operation, is_compared))
        for each in self._told:
            each.call = operation
            each.calls += 1

    def exchange(self, text: str) -> list[str]:
        """Return every rank's text, cut to half a kilobyte."""
        return [said for said, _ in self._exchange(text)]

    def _exchange(self, text: str, beyond: str = "") -> list[tuple[str, bytes]]:
        """Return every rank's text: its beginning, and a digest of the whole text and of what is `beyond` it."""
        data = text.encode()
        digest = hashlib.blake2b(data + beyond.encode(), digest_size=_DIGEST_BYTES).digest()
        shown = data[: _TEXT_BYTES - _DIGEST_BYTES].ljust(_TEXT_BYTES - _DIGEST_BYTES)
        said = torch.frombuffer(bytearray(digest + shown), dtype=torch.uint8)
        rows = [row.tobytes() for row in self._transport.read_all(said).numpy()]
        return [(row[_DIGEST_BYTES:].decode(errors="replace").rstrip(), row[:_DIGEST_BYTES]) for row in rows]

    def mismatch(self, texts: list[str], why: str = "") -> str:
        """Return the error for ranks that meet with these words.

        Args:
            why: How they differ, as sentences; by default what most often is the reason.
        """
        # A rank in an exchange that is not compared, such as a sum of gradients, has sent numbers instead of a text.
        said = [text if text.isprintable() else "an exchange of numbers, such as gradients" for text in texts]
        sides = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(said))
        return (
            f"the ranks met in different collectives (call {self._transport.calls} of this process group); nothing was "
            f"exchanged.\n{sides}\n  "
            + (
                why
                or "Every rank must make the same call with the same shapes. For first dimensions that differ call "
                "accelerator.pad_across_processes first; a call under `if is_main_process` belongs outside of it."
            )
        )


def _unlike(everyones: Sequence[Sequence[str]]) -> str:
    """Return how the tensors of the ranks differ, as sentences; empty if they do not."""
    common = set(everyones[0]).intersection(*everyones[1:])
    own = [[entry for entry in entries if entry not in common] for entries in everyones]
    parts = [
        f"Rank {rank} has {', '.join(entries[:_SHOWN])}"
        f"{f' and {len(entries) - _SHOWN} more' * (len(entries) > _SHOWN)}, which not all ranks have."
        for rank, entries in enumerate(own)
        if entries
    ]
    if not parts:
        at = next((at for at, row in enumerate(zip(*everyones, strict=True)) if len(set(row)) > 1), None)
        if at is None:
            return ""
        parts = [f"They have the same tensors in another order, from the {at + 1}. on: {everyones[0][at]} in rank 0."]
    return (
        f"{' '.join(parts)} Build the same model in every rank: torch exchanges parameters and buffers by their "
        "places, and no `if is_main_process` may add, freeze or cast one."
    )


def _describe(value: Any, shape: Shape) -> str:
    """Return dtype and shape of each tensor: ``{x: float32[4, 3], y: int64[4]}``; the class of anything else."""
    if isinstance(value, Tensor):
        sizes = ["any"] * value.ndim if shape is Shape.ANY else list(map(str, value.shape))
        if shape is Shape.ROWS_VARY:
            sizes[:1] = ["any"]
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"
    if not is_container(value):
        return type(value).__name__
    return "{" + ", ".join(f"{name}: {_describe(child, shape)}" for name, child in children(value)) + "}"


def pack(value: Any) -> bytes:
    """Return `value` as bytes; tensors of a device are copied to the host."""
    written = io.BytesIO()
    _Pickler(written, pickle.HIGHEST_PROTOCOL).dump(value)
    return written.getvalue()


def unpack(data: bytes, device: torch.device) -> Any:
    """Return what was packed; tensors that were on a device are on `device`, whatever the sender's number was."""
    return _Unpickler(io.BytesIO(data), device).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Tensor | None:
        return value.detach().cpu() if isinstance(value, Tensor) and value.device.type != "cpu" else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device)


def join(values: list[Any]) -> Any:
    """Join the values of all ranks: lists joined, mappings joined by key, tensors by rows, others listed by rank.

    Values of different kinds are listed by rank too.

    Example:
        >>> join([["a"], ["b", "c"]]), join([{"loss": 1}, {"loss": 2}]), join(["a", "b"]), join([[1], None])
        (['a', 'b', 'c'], {'loss': [1, 2]}, ['a', 'b'], [[1], None])
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return values
    if isinstance(first, Tensor):
        return torch.cat([tensor if tensor.ndim else tensor[None] for tensor in values])
    if isinstance(first, Mapping):
        is_alike = all(value.keys() == first.keys() for value in values)
        return {key: join([value[key] for value in values]) for key in first} if is_alike else values
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*[join(list(column)) for column in zip(*values, strict=True)])
    if isinstance(first, (list, tuple)):
        return type(first)(child for value in values for child in value)
    return values
