"""Find the sharded tensors (DTensors) in the values of a rank, and this rank's rows of each. Runs in ranks.

A sharded tensor leaves the ranks without a collective: every rank sends its own rows, and the notebook joins them
(`JoinedTensors`). A tensor is known in all ranks by its key, the path to it from a name: ranks run one program. Objects
that torch's `fully_shard` has changed are reduced in `reductions`. Nothing here gathers, copies rows or imports torch.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from nbaccel.namespace.kinds import Kinds
from nbaccel.namespace.wrappers import is_hook_of_sharding

__all__ = ["Piece", "RowsReport", "ShardedTensors", "held_in_shards", "is_sharded"]

_MOST_OBJECTS = 300_000
_CONTAINERS = (dict, OrderedDict, list, tuple)

_Way = tuple[Any, str, Any]
"""The way to an object: that to its owner, and the step from there; at the beginning None, and the name."""

_SIMPLE = frozenset({"float", "complex", "int", "bfloat", "bool", "uint"})
"""Beginnings of the names of types whose values are bytes of one length each, so that rows can be put together."""


class Piece(NamedTuple):
    """The part of one sharded tensor that one rank has.

    Args:
        shape: The shape of the whole tensor.
        dtype: Its name, "bfloat16".
        start, length: The rows of this rank, which may be none.
        is_copy: Every rank has the whole tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    length: int
    is_copy: bool


class RowsReport(NamedTuple):
    """The state of the rows of one rank.

    Args:
        steps: Optimizer steps that they have had.
        is_inside: The rank left in the middle of one.
        lost: Why they cannot be used; empty if they can.
    """

    steps: int
    is_inside: bool
    lost: str


def is_sharded(obj: Any) -> bool:
    """Return whether it is a tensor of which each rank has a part, by its true type."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and issubclass(type(obj), tensors.DTensor)


class ShardedTensors:
    """The sharded tensors that `values` lead to.

    Modules that hold whole parameters after a forward (`reshard_after_forward`) get their sharded ones back: FSDP does
    this for every state dict too, and exchanges nothing.

    Objects are followed as in an `Inventory`, 300,000 of each name at most; elements of sets are not.

    Args:
        values: In an order that all ranks have.
        world_size: Number of ranks; only tensors that lie on all of them can be joined.

    Attributes:
        names: Those that lead to such tensors, by a path on which no earlier name leads.
    """

    def __init__(self, values: Mapping[str, Any], world_size: int) -> None:
        self.names: set[str] = set()
        self._world_size = world_size
        self._keys: dict[int, str] = {}
        self._tensors: dict[str, Any] = {}  # kept, so that no id is used twice
        self._seen: dict[int, Any] = {}
        self._resharded: set[int] = set()
        self._kinds = Kinds()
        if values and _are_there_meshes():
            for name, value in values.items():
                self._walk(name, value)
        self._seen.clear()

    def __len__(self) -> int:
        return len(self._tensors)

    def key(self, tensor: Any) -> str:
        """Return the name by which the other ranks know a tensor that was found."""
        return self._keys[id(tensor)]

    def obstacle(self, tensor: Any) -> str:
        """Return why the tensor cannot be joined of rows; empty if it can."""
        from torch.distributed.tensor import Replicate, Shard

        if id(tensor) not in self._keys:
            return f"it is in a place that is not searched, as in a set; {_HOW}"
        mesh, placements = tensor.device_mesh, tuple(tensor.placements)
        if mesh.ndim != 1 or mesh.size() != self._world_size:
            sizes = " x ".join(map(str, mesh.shape))
            return f"it lies on a mesh of {sizes} ranks, and only one of all {self._world_size} ranks is joined; {_HOW}"
        (placement,) = placements
        is_of_rows = type(placement) is Shard and placement.dim == 0
        if not is_of_rows and type(placement) is not Replicate:
            return f"it is placed as {placement!r}, and only rows, Shard(dim=0), are joined; {_HOW}"
        dtype = _name(tensor.dtype)
        return "" if dtype.rstrip("0123456789") in _SIMPLE else f"rows of {dtype} are not joined; {_HOW}"

    def rows(self) -> Iterator[tuple[str, Piece, Callable[[], memoryview]]]:
        """Yield the key of each tensor that can be joined, the place of this rank's rows, and a way to read them."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        for key, tensor in self._tensors.items():
            if self.obstacle(tensor):
                continue
            rows = tensor.detach().to_local()
            shape, dtype = tuple(tensor.shape), _name(tensor.dtype)
            if not tensor.placements[0].is_shard():
                yield key, Piece(shape, dtype, 0, 0, is_copy=True), partial(_bytes, rows)
                continue
            own, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
            if tuple(own) == tuple(rows.shape):  # otherwise the notebook misses them, and says so
                yield key, Piece(shape, dtype, offset[0], own[0], is_copy=False), partial(_bytes, rows)

    def _walk(self, name: str, value: Any) -> None:
        """Give a key to each sharded tensor that `value` leads to; the shortest path decides, so ranks agree on it."""
        todo: deque[tuple[Any, _Way]] = deque([(value, (None, "", name))])
        left = _MOST_OBJECTS
        while todo:
            obj, way = todo.popleft()
            if is_sharded(obj):
                self.names.add(name)
                self._add(obj, way)
                continue
            if id(obj) in self._seen or _is_of_distributed(obj):
                continue
            self._seen[id(obj)] = obj
            kind = self._kinds.of(obj)
            if kind is None:
                continue
            self._reshard(obj)
            try:
                parts = [*self._stepped(obj), *islice(kind.parts(obj), left)]
            except Exception:  # a foreign class of objects with inconsistent answers
                continue
            left -= len(parts)
            keys = {step[1]: part for step, part in parts if step[0] == "key"}
            for (word, at), part in parts:
                if word == "at" and is_sharded(keys.get(at)):  # the state of a parameter, whatever its position
                    self._add(keys[at], (way, "key", at))
                    todo.append((part, (way, "of", self.key(keys[at]))))
                elif type(part) not in _CONTAINERS or part:
                    todo.append((part, (way, word, at)))

    def _add(self, tensor: Any, way: _Way) -> None:
        if id(tensor) not in self._keys:
            path = _path(way)
            self._keys[id(tensor)] = path
            self._tensors[path] = tensor

    def _reshard(self, obj: Any) -> None:
        torch: Any = sys.modules["torch"]
        if not issubclass(type(obj), torch.nn.Module) or id(obj) in self._resharded:
            return
        for module in torch.nn.Module.modules(obj):
            self._resharded.add(id(module))
            for hook in list(vars(module).get("_state_dict_pre_hooks", {}).values()):
                if is_hook_of_sharding(hook):
                    with suppress(Exception):  # of a device that failed; the rows are read as they are
                        hook(module, "", False)

    @staticmethod
    def _stepped(obj: Any) -> list[tuple[tuple[str, Any], Any]]:
        """Return the groups of an optimizer: its parameters are known before the state that belongs to them."""
        torch: Any = sys.modules["torch"]
        if not issubclass(type(obj), torch.optim.Optimizer):
            return []
        groups = enumerate(obj.param_groups)
        return [(("stepped", (at, index)), each) for at, group in groups for index, each in enumerate(group["params"])]


def held_in_shards(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that lead to what `fully_shard` has sharded here, each with what to do.

    One rank has a part of such values: without the others they would be half old and half new.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not fsdp.FSDPModule.__subclasses__():
        return {}
    return dict.fromkeys(sorted(ShardedTensors(values, 0).names), "the ranks have it in shards, which --out joins")


_HOW = "send what full_tensor() returns in every rank"


def _path(way: _Way) -> str:
    steps = []
    while way[0] is not None:
        steps.append(f"{way[1]}:{way[2]!r}")
        way = way[0]
    return "/".join([way[2], *reversed(steps)])


def _are_there_meshes() -> bool:
    """Return whether this process has made a mesh, on which every sharded tensor lies; most programs make none."""
    meshes: Any = sys.modules.get("torch.distributed.device_mesh")
    kind = getattr(meshes, "DeviceMesh", None)  # not there if torch was built without process groups
    return kind is not None and any(type(obj) is kind for obj in gc.get_objects())


def _bytes(rows: Any) -> memoryview:
    """Return the bytes of the rows; those of a device are copied to the host only when they are about to be sent."""
    torch: Any = sys.modules["torch"]
    host = rows.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return memoryview(host.view(torch.uint8).numpy()) if host.numel() else memoryview(b"")


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _is_of_distributed(obj: Any) -> bool:
    """Return whether it belongs to the process groups or to FSDP itself, and not to the program."""
    kind = type(obj)
    torch: Any = sys.modules["torch"]
    module = str(type.__dict__["__module__"].__get__(kind))
    return module.startswith("torch.distributed.") and not issubclass(kind, torch.nn.Module)
