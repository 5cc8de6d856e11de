"""Collectives over nested containers: gather, reduce, broadcast, pad, barrier. Run in ranks, by every rank.

`Collectives` itself is one process alone: values come back as they went in. `GroupCollectives` talks through
torch's default process group. Its first calls carry a fingerprint (operation, dtypes, shapes), so that ranks
which met in different calls hear of it on all sides; torch would hang, or mix their bytes up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nbaccel.errors import CollectiveMismatch
from nbaccel.train.nested import children, map_children
from nbaccel.world import World

__all__ = ["CHECKED_CALLS", "Collectives", "GroupCollectives", "holds_only_tensors"]

CHECKED_CALLS = 16
"""How many calls of a group carry a fingerprint. A program that mixes its collectives up does so at once."""

_FINGERPRINT_BYTES = 512
_DIGEST_BYTES = 8

# torch 2.13 gave it a new name; the old one warns there.
_all_gather: Callable[[Tensor, Tensor], Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_SENDABLE = frozenset({
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
})  # fmt: skip
"""What every backend can send as it is; other dtypes are gathered as bytes."""

_REDUCTIONS = ("sum", "mean", "max", "min")


class Collectives:
    """One process alone."""

    def gather(self, value: Any) -> Any:
        """Every tensor in `value`, those of all ranks joined along the first dimension, on every rank."""
        return value

    def gather_uneven(self, value: Any) -> Any:
        """`gather` for first dimensions that may differ between ranks; one more exchange per tensor."""
        return value

    def gather_objects(self, value: Any) -> Any:
        """Any picklable value: lists of all ranks joined, mappings joined by key, other values listed by rank."""
        return value

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Every tensor in `value` summed, averaged or compared over the ranks; `value` itself is not changed."""
        _refuse_unknown(reduction)
        return value if scale == 1.0 else _map_tensors("reduce", lambda tensor: tensor * scale, value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Every tensor in `value` as rank `source` has it."""
        return value

    def pad(self, value: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Every tensor in `value` as long along `dim` as the longest of all ranks."""
        return value

    def barrier(self) -> None:
        """Return once every rank has called this."""


class GroupCollectives(Collectives):
    """The ranks of torch's default process group.

    device: where the group's backend can send from; fingerprints and sizes travel there.
    debug: check every call, not only the first ones.
    """

    def __init__(self, world: World, device: torch.device, debug: bool = False) -> None:
        self._world = world
        self._device = device
        self._unchecked_from = None if debug else CHECKED_CALLS
        self._calls = 0

    def gather(self, value: Any) -> Any:
        self._check("gather", value)
        return _map_tensors("gather", self._gather_one, value)

    def gather_uneven(self, value: Any) -> Any:
        self._check("gather_uneven", value, any_rows=True)
        return _map_tensors("gather", self._gather_rows, value)

    def gather_objects(self, value: Any) -> Any:
        self._check("gather_objects")
        return _merge(self._exchange_objects(value))

    def reduce(self, value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        _refuse_unknown(reduction)
        self._check(f"reduce {reduction}", value)
        operation = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}.get(reduction, dist.ReduceOp.SUM)
        if reduction == "mean":
            scale = scale / self._world.world_size

        def one(tensor: Tensor) -> Tensor:
            reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.all_reduce(reduced, operation)
            return reduced if scale == 1.0 else reduced * scale

        return _map_tensors("reduce", one, value)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        self._check(f"broadcast from {source}", value)

        def one(tensor: Tensor) -> Tensor:
            copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(copy, source)
            return copy

        return _map_tensors("broadcast", one, value)

    def pad(self, value: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        self._check(f"pad along {dim}", value, any_shape=True)

        def one(tensor: Tensor) -> Tensor:
            if not -tensor.ndim <= dim < tensor.ndim:
                return tensor
            missing = max(self._sizes(tensor, dim)) - tensor.shape[dim]
            return _pad(tensor, dim, missing, pad_index, pad_first) if missing else tensor

        return _map_tensors("pad_across_processes", one, value)

    def barrier(self) -> None:
        if self._check("wait_for_everyone"):
            return  # the exchange of fingerprints was a barrier
        dist.barrier(device_ids=[self._device.index] if self._device.type == "cuda" else None)

    def _gather_one(self, tensor: Tensor) -> Tensor:
        rows = tensor.detach()
        rows = rows.contiguous() if rows.ndim else rows[None]
        sent = rows if rows.dtype in _SENDABLE else rows.view(torch.uint8)
        joined = sent.new_empty((self._world.world_size * sent.shape[0], *sent.shape[1:]))
        _all_gather(joined, sent)
        return joined if sent is rows else joined.view(rows.dtype)

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        rows = tensor.detach() if tensor.ndim else tensor.detach()[None]
        sizes = self._sizes(rows, 0)
        longest = max(sizes)
        padded = _pad(rows, 0, longest - rows.shape[0], 0, False) if rows.shape[0] < longest else rows
        parts = self._gather_one(padded).split(longest) if longest else ()
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]) if parts else rows

    def _sizes(self, tensor: Tensor, dim: int) -> list[int]:
        """How long `tensor` is along `dim` on each rank."""
        size = torch.tensor([tensor.shape[dim]], device=self._device)
        sizes: list[int] = self._gather_one(size).tolist()
        return sizes

    def _exchange_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._world.world_size
        dist.all_gather_object(values, value)
        return values

    def _check(self, operation: str, value: Any = None, any_rows: bool = False, any_shape: bool = False) -> bool:
        """Compare this call with the other ranks'; False when it was not one of those that are compared.

        Raises:
            CollectiveMismatch: on every rank, naming what each of them called.
        """
        if self._calls == self._unchecked_from:
            return False
        self._calls += 1
        mine = f"{operation} {_describe(value, any_rows, any_shape)}".strip()
        everyone = self._exchange(mine)
        if any(theirs != everyone[0] for theirs in everyone):
            raise CollectiveMismatch(self._mismatch([text for text, _ in everyone]))
        return True

    def _exchange(self, text: str) -> list[tuple[str, bytes]]:
        """What every rank says: its beginning, and a digest of all of it."""
        data = text.encode()
        digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
        shown = data[: _FINGERPRINT_BYTES - _DIGEST_BYTES].ljust(_FINGERPRINT_BYTES - _DIGEST_BYTES)
        said = torch.frombuffer(bytearray(digest + shown), dtype=torch.uint8).to(self._device)
        rows = self._gather_one(said[None]).cpu().numpy()
        texts = [row.tobytes() for row in rows]
        return [(t[_DIGEST_BYTES:].decode(errors="replace").rstrip(), t[:_DIGEST_BYTES]) for t in texts]

    def _mismatch(self, texts: list[str]) -> str:
        sides = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
        return (
            f"the ranks met in different collectives (call {self._calls} of this process group); nothing was "
            f"exchanged.\n{sides}\n  Every rank must make the same call with the same shapes. For first dimensions "
            "that differ call accelerator.pad_across_processes first; a call under `if is_main_process` belongs "
            "outside of it."
        )


def holds_only_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    below = [child for _, child in children(value)]
    return bool(below) and all(holds_only_tensors(child) for child in below)


def _refuse_unknown(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}")


def _map_tensors(operation: str, function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    rebuilt = map_children(lambda child: _map_tensors(operation, function, child), value)
    if rebuilt is value:
        raise TypeError(
            f"{operation} takes tensors, in any nesting of tuples, lists, dicts and dataclasses; "
            f"got {type(value).__name__}. gather_for_metrics takes any picklable object."
        )
    return rebuilt


def _describe(value: Any, any_rows: bool, any_shape: bool) -> str:
    """dtype and shape of each tensor: ``{x: float32[4, 3], y: int64[4]}``."""
    if isinstance(value, Tensor):
        if any_shape:
            shape = "..."
        else:
            shape = ", ".join(map(str, value.shape))
            shape = ", ".join(["any", *map(str, value.shape[1:])]) if any_rows else shape
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
    below = [f"{name}: {_describe(child, any_rows, any_shape)}" for name, child in children(value)]
    return "{" + ", ".join(below) + "}" if below else ""


def _pad(tensor: Tensor, dim: int, missing: int, pad_index: float, pad_first: bool) -> Tensor:
    after = tensor.ndim - 1 - dim % tensor.ndim  # F.pad counts dimensions from the last one
    amounts = [0, 0] * after + ([missing, 0] if pad_first else [0, missing])
    return F.pad(tensor, amounts, value=pad_index)


def _merge(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat([tensor if tensor.ndim else tensor[None] for tensor in values])
    if isinstance(first, Mapping):
        return {key: _merge([value[key] for value in values]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_chain(values))
    return values


def _chain(values: list[Any]) -> Iterator[Any]:
    for value in values:
        yield from value
