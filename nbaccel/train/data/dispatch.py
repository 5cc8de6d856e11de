"""Dispatch: rank 0 reads a loader, and every rank receives its batches. Runs in ranks; every batch is a collective.

Used where ranks would not read the same stream. Per round there are two collectives: a header of five numbers, and
one scatter of bytes that holds structure and tensors together, so that mixed dtypes and objects cost no more.
The loaders of the other ranks are never used.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from nbaccel.base.world import World
from nbaccel.errors import CannotSplit, NbaccelError
from nbaccel.train.data.counting import counting
from nbaccel.train.data.order import SharedOrder, begin_workers_anew, tell_epoch
from nbaccel.train.data.position import DatasetStates, LoaderPosition
from nbaccel.train.data.shard import NOTHING, StreamShard, unshared
from nbaccel.train.data.sources import Rest, SourceOfShard, begun, drawn_again, rebuilt
from nbaccel.train.distributed.transport import Transport, host_transport

__all__ = ["DispatchSource", "SliceFunction"]

SliceFunction = Callable[..., Any]
"""``slice_fn(batch, data_slice, process_index=r, num_processes=n)``: the part of rank r of a whole round's batch."""

_BATCH, _END, _FAILURE = range(3)

_ALIGNMENT = 16
"""Bytes; at least any element's size, so that a tensor can be a view of the received bytes."""


class DispatchSource(SourceOfShard):
    """A source of the batches of rank 0's loader.

    In rounds of one batch per rank, rank r gets batches r, r + n, ...; with `split` every batch is cut into n equal
    parts. The samples of the last, incomplete round are dealt in equal parts, filled up with the epoch's first
    samples so that n divides them. Without `even` the ranks get what is left; a rank that gets nothing is not told
    in the round before that its last batch was this one. With `drop_last` the round is dropped.

    Args:
        device: A device that the process group's backend can send from.
        length: Batches of rank 0's loader; None where unknown.
        keeps_on_host: The batches are wanted on the CPU. They also arrive there where the group sends from host to
            host.
    """

    shard: _RoundShard

    def __init__(
        self,
        loader: DataLoader[Any],
        world: World,
        device: torch.device,
        length: int | None,
        slice_function: SliceFunction | None,
        *,
        order: SharedOrder | None,
        even: bool,
        split: bool,
        keeps_on_host: bool,
    ) -> None:
        super().__init__(loader)
        self._world = world
        self.even = even
        self._order = order
        self._batches = length
        self._wire = _Wire(device, world, keeps_on_host)
        self._remainder, self._share = -1, 0
        if not world.is_main_process:
            self.states = DatasetStates(None)
        self._rest = None if order is None else Rest(order)
        self._read = counting(loader if self._rest is None else rebuilt(loader, self._rest))
        self.shard = _RoundShard(self._read, self.states, world, slice_function, even=even, split=split)

    @property
    def seed(self) -> int | None:
        return None if self._order is None else self._order.seed

    @seed.setter
    def seed(self, seed: int | None) -> None:
        if self._order is not None and seed is not None:
            self._order.seed = seed

    @property
    def is_stream(self) -> bool:
        return True

    @property
    def remainder(self) -> int:
        return self._remainder

    @property
    def may_be_uneven(self) -> bool:
        return self.shard.may_be_uneven or self.loader.num_workers > 1

    def last_samples(self, batch_size: int | None) -> int | None:
        if self._remainder > 0:
            return self._share
        return batch_size if self.even or self.shard.drop_last else None

    def lengths(self, skip: int = 0) -> list[int] | None:
        return None if self._batches is None else self.shard.lengths_of(self._batches - skip)

    def order(self) -> dict[str, Any]:
        return super().order() if self._world.is_main_process and self._order is None else {}

    def open(self, position: LoaderPosition) -> Iterator[tuple[Any, bool]]:
        self._remainder = -1
        return self._deal(position) if self._world.is_main_process else self._receive()

    def _deal(self, position: LoaderPosition) -> Iterator[tuple[Any, bool]]:
        """Read the batches, send the other ranks their parts, and yield the own part. Runs on rank 0."""
        if self._order is not None:
            self._order.draw = position.draw
        tell_epoch(position.epoch, self.loader.dataset, self.loader.sampler if self._order is None else self._order)
        begin_workers_anew(self._read)
        sent = 0
        for parts, payloads, is_last in self._packed(position):
            self._remainder, self._share = self.shard.remainder, self.shard.share
            self._wire.send(_BATCH, payloads, is_last, self._remainder, self._share)
            sent += 1
            if parts[0] is not NOTHING:
                yield parts[0], is_last
        if not sent:
            self._wire.send(_END, self._to_everyone(NOTHING))

    def _packed(self, position: LoaderPosition) -> Iterator[tuple[list[Any], list[_Payload], bool]]:
        """Yield each round's parts, and what is sent of them; report a failure to read to the waiting ranks."""
        try:
            for members, first, is_last in self._rounds(position):
                parts = self.shard.parts(members, first, is_last)
                yield parts, [_Payload.pack(part) for part in parts[1:]], is_last
        except Exception as error:
            self._wire.send(_FAILURE, self._to_everyone(f"{type(error).__name__}: {error}"))
            raise

    def _to_everyone(self, value: Any) -> list[_Payload]:
        return [_Payload.pack(value)] * (self._world.world_size - 1)

    def _rounds(self, position: LoaderPosition) -> Iterator[tuple[list[Any], list[Any], bool]]:
        """Yield the rounds from `position` on; the epoch's random draws are repeated."""
        skip = position.batches
        with drawn_again(position, self.loader):
            self.shard.resumed = self.states.resumed(position, self.shard.begin)
        if self.shard.resumed is not None:
            skip = 0
        if self._rest is not None:  # the epoch's first round is read again, in case it must fill up the last one
            self._rest.skip, self._rest.keep = skip, self.stride
            skip = min(skip, self.stride)
        self.shard.skip = skip
        with drawn_again(position, self.loader):
            rounds = self.shard.rounds()
            return begun(rounds) if position.goes_on and not position.batches else rounds

    def _receive(self) -> Iterator[tuple[Any, bool]]:
        is_last = False
        while not is_last:
            kind, part, is_last, self._remainder, self._share = self._wire.receive()
            if kind == _END:
                return
            if kind == _FAILURE:
                raise NbaccelError(f"rank 0 failed while it read a batch for all ranks: {part}")
            if part is not NOTHING:
                yield part, is_last


class _RoundShard(StreamShard):
    """A shard that cuts rounds for every rank, the last one into equal parts.

    Attributes:
        resumed: The batches that the next iteration reads, in place of those of a new one.
        share: Samples of each rank in the last round.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        states: DatasetStates,
        world: World,
        slice_function: SliceFunction | None,
        *,
        even: bool,
        split: bool,
    ) -> None:
        super().__init__(loader, states, world, even=even, split=split)
        self._slice_function = slice_function
        self.resumed: Iterator[Any] | None = None
        self.share = 0

    def begin(self) -> Iterator[Any]:
        """Begin to read the loader."""
        return unshared(iter(self.batches))  # at once: it draws a number

    def _begin(self) -> Iterator[Any]:
        resumed, self.resumed = self.resumed, None
        return self.begin() if resumed is None else resumed

    def parts(self, members: list[Any], first: list[Any], is_last: bool) -> list[Any]:
        """Return the share of each rank of a round."""
        if is_last and not self._is_complete(members):
            return self._last_parts(members, first)
        if self._slice_function is None:
            return [self.part(members, first, False, rank) for rank in range(self.world_size)]
        total = sum(self._size(batch) or 0 for batch in members)
        return self._dealt(members, total // self.world_size)

    def _share_of(self, samples: int) -> int | None:
        return -(-samples // self.world_size)  # equal parts, so that few samples are repeated

    def _filled_by_its_own(self, members: list[Any], first: list[Any]) -> list[Any]:
        if self._slice_function is not None:
            raise CannotSplit("only its own function cuts these batches")
        assert self.batch_size is not None
        self.share = self.batch_size // (self.world_size if self.split else 1)
        return super()._filled_by_its_own(members, first)

    def _dealt(self, parts: list[Any], length: int) -> list[Any]:
        self.share = length
        if self._slice_function is None:
            return super()._dealt(parts, length)
        whole, ranks = self._cut(parts, 0, length * self.world_size), range(self.world_size)
        return [
            self._slice_function(
                whole, slice(length * rank, length * (rank + 1)), process_index=rank, num_processes=self.world_size
            )
            for rank in ranks
        ]


class _Wire:
    """Sends objects with tensors in them from rank 0 to each rank, over the process group. Collective.

    The header is the collective that may wait long, until rank 0 has read: the `Transport` polls meanwhile, so
    the rank can be interrupted, and learns when rank 0 has left. The bytes follow at once. Where the group can,
    both go from host to host: no rank waits for its device's pending work, and no device holds the batches of
    all ranks.
    """

    def __init__(self, device: torch.device, world: World, keeps_on_host: bool) -> None:
        self._rank_device = device
        self._world = world
        self._keeps_on_host = keeps_on_host
        self._rounds = 0

    def send(
        self, kind: int, packed: list[_Payload], is_last: bool = False, remainder: int = -1, share: int = 0
    ) -> None:
        """Send each other rank its payload. Runs on rank 0."""
        head = max(len(payload.structure) for payload in packed)
        head += -head % _ALIGNMENT
        size = head + max(payload.tensor_bytes for payload in packed)
        _, device = self._header([kind, is_last, remainder, share, head, size])
        own = torch.empty(size, dtype=torch.uint8, device=device)
        dist.scatter(own, [torch.empty_like(own), *(payload.as_bytes(head, size).to(device) for payload in packed)], 0)

    def receive(self) -> tuple[int, Any, bool, int, int]:
        """Return kind, part, whether it is the last one, remainder, and samples of each rank. On the other ranks."""
        (kind, is_last, remainder, share, head, size), device = self._header([_BATCH, 0, -1, 0, 0, 0])
        arrived = torch.empty(size, dtype=torch.uint8, device=device)
        dist.scatter(arrived, None, 0)
        part = _unpack(arrived.cpu() if self._keeps_on_host else arrived, head)
        return kind, part, bool(is_last), remainder, share

    def _header(self, numbers: list[int]) -> tuple[list[int], torch.device]:
        """Return rank 0's numbers, on every rank, and the device from which the bytes are sent."""
        self._rounds += 1
        transport = host_transport(Transport(self._world.world_size, self._rank_device))
        transport.call = "the loop over a loader that rank 0 reads for all ranks"
        transport.calls = self._rounds
        of_rank_0: list[int] = transport.read_all(torch.tensor(numbers, dtype=torch.int64, device="cpu"))[0].tolist()
        return of_rank_0, transport.device


class _Payload(pickle.Pickler):
    """A pickle without its tensors; it stores their offsets in the bytes that follow it."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self.structure = b""
        self.tensor_bytes = 0
        self._tensors: list[tuple[int, torch.Tensor]] = []

    @classmethod
    def pack(cls, value: Any) -> _Payload:
        """Return a payload of `value`, which may be NOTHING."""
        buffer = io.BytesIO()
        payload = cls(buffer)
        payload.dump(value)
        payload.structure = buffer.getvalue()
        return payload

    def persistent_id(self, thing: Any) -> Any:
        if thing is NOTHING:
            return "nothing"
        if type(thing) is not torch.Tensor or thing.layout is not torch.strided or thing.is_quantized:
            return None
        flat = thing.detach().contiguous().reshape(-1).view(torch.uint8)
        offset = self.tensor_bytes
        self._tensors.append((offset, flat))
        self.tensor_bytes += flat.numel() + -flat.numel() % _ALIGNMENT
        return offset, flat.numel(), thing.dtype, tuple(thing.shape)

    def as_bytes(self, head: int, size: int) -> torch.Tensor:
        """Return the structure, followed by tensors from offset `head` on, `size` bytes in all."""
        packed = torch.zeros(size, dtype=torch.uint8, device="cpu")
        packed[: len(self.structure)] = torch.frombuffer(bytearray(self.structure), dtype=torch.uint8)
        for offset, flat in self._tensors:
            packed[head + offset : head + offset + flat.numel()] = flat
        return packed


class _Opener(pickle.Unpickler):
    def __init__(self, structure: bytes, tensors: torch.Tensor) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    def persistent_load(self, place: Any) -> Any:
        if place == "nothing":
            return NOTHING
        offset, size, dtype, shape = place
        return self._tensors[offset : offset + size].view(dtype).view(shape)


def _unpack(arrived: torch.Tensor, head: int) -> Any:
    return _Opener(arrived[:head].cpu().numpy().tobytes(), arrived[head:]).load()
