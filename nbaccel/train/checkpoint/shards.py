"""Sharded tensors (torch's DTensor): a rank's rows, reading them from a checkpoint, gathering them. Runs in ranks.

Everything here works on any state dict, whoever sharded the model. Nothing is a collective except `whole_state`, and
nothing is imported for it: without a program that has imported ``torch.distributed.tensor`` there is no such tensor,
and the import takes half a second.

Known are tensors that are split along dimensions or replicated, on a mesh of any shape. Others (partial sums, strided
splits of tensor parallelism) are refused by name.
"""

from __future__ import annotations

import copy
import copyreg
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.base.values import frozen
from nbaccel.errors import CannotSave, CheckpointCorrupt
from nbaccel.train.checkpoint.shard_facts import holds_shards, is_sharded_tensor
from nbaccel.train.distributed.nested import children, map_children

__all__ = [
    "LocalRows",
    "Pieces",
    "StoredFiles",
    "StoredTensor",
    "first_names",
    "load_module",
    "load_optimizer",
    "loadable",
    "refuse_partial_torch_save",
    "rows_of",
    "unsharded",
    "whole_state",
]

_INSTEAD = (
    "accelerator.save_model(model, folder) writes the whole model, accelerator.get_state_dict(model) returns it on "
    "rank 0 (every rank calls either of them), and accelerator.save_state(folder) writes a checkpoint of all ranks."
)


@frozen
class LocalRows:
    """The part of a tensor that one rank holds.

    Args:
        shape, dtype: Those of the whole tensor.
        offset: Where the part begins, for each dimension.
        local: The part, which may have no elements.
        is_first: Of the ranks that hold this very part, this is the one that writes it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    local: Tensor
    is_first: bool

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return torch.Size(self.shape).numel()

    @property
    def index(self) -> tuple[slice, ...]:
        """The place of the part in the whole tensor."""
        return tuple(slice(begin, begin + length) for begin, length in zip(self.offset, self.local.shape, strict=True))


def rows_of(tensor: Any, name: str = "a tensor") -> LocalRows:
    """Return this rank's part of the DTensor `tensor`, which shares its memory. No collective.

    Args:
        name: For the error.

    Raises:
        CannotSave: The tensor is distributed in another way than by splits along dimensions and replicas.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    place = mesh.get_coordinate()
    offset, lengths, is_first = [0] * len(shape), list(shape), True
    is_known = place is not None
    for axis, placement in enumerate(tensor.placements if place is not None else ()):
        if type(placement) is Shard:
            dim, whole = placement.dim, lengths[placement.dim]
            chunk = -(-whole // mesh.size(axis))  # as torch.chunk: the last ranks may have fewer rows, or none
            begin = min(whole, chunk * place[axis])
            offset[dim] += begin
            lengths[dim] = min(whole, begin + chunk) - begin
        else:
            is_known &= isinstance(placement, Replicate)
            is_first &= place[axis] == 0
    with torch.no_grad():
        local = tensor.to_local().detach()
    if not is_known or tuple(local.shape) != tuple(lengths):
        raise CannotSave(
            f"{name} is distributed as {tensor.placements} over {mesh}, and checkpoints know tensors that are split "
            "along dimensions (Shard) or replicated (Replicate) over a mesh with every rank in it"
        )
    return LocalRows(shape, tensor.dtype, tuple(offset), local, is_first)


class StoredFiles:
    """The safetensors files of one checkpoint, opened when they are first read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}

    def open(self, file: str) -> Any:
        """Return the open file.

        Raises:
            CheckpointCorrupt: It is missing or damaged.
        """
        path = self._folder / file
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error}", str(path)) from error
        return self._open[file]

    def read(self, file: str, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return the rows `index` of a tensor in a file; all of a tensor without dimensions."""
        opened = self.open(file)
        try:
            rows: Tensor = opened.get_slice(name)[index] if index else opened.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointCorrupt(f"{self._folder / file} has no {name}: {error}", file) from error
        return rows

    def tensors(self, file: str) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the whole tensors of a file by name; their bytes are not read."""
        opened = self.open(file)
        for name in opened.keys():  # noqa: SIM118  # it is no mapping
            tensor = opened.get_tensor(name)  # mapped, not read
            shape = tuple(tensor.shape)
            yield name, StoredTensor(self, name, shape, tensor.dtype, [(file, (0,) * len(shape), shape)])


class Pieces(Protocol):
    """Files with pieces of tensors."""

    def read(self, file: str, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return the rows `index` of the piece of a tensor that is in a file."""


class StoredTensor:
    """A tensor in the files of a checkpoint; only those rows are read that somebody asks for.

    Args:
        shape, dtype: Those of the whole tensor.
        boxes: For each piece its file, where it begins, and its shape.
        was_sharded: Several ranks held it when it was saved.
    """

    def __init__(
        self,
        files: Pieces,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        boxes: Sequence[tuple[str, Sequence[int], Sequence[int]]],
        was_sharded: bool = False,
    ) -> None:
        self._files = files
        self._name = name
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._boxes = boxes
        self.was_sharded = was_sharded

    @classmethod
    def of_shards(cls, files: Pieces, name: str, record: Mapping[str, Any]) -> StoredTensor:
        """Return the tensor that a manifest records as the shards of several ranks."""
        dtype = getattr(torch, record["dtype"].removeprefix("torch."))
        return cls(files, name, record["shape"], dtype, record["boxes"], was_sharded=True)

    def whole(self) -> Tensor:
        """Read all of it into memory of its own."""
        return self.fill(torch.empty(self.shape, dtype=self.dtype, device="cpu"), (0,) * len(self.shape))

    def numpy(self) -> Any:
        return self.whole().numpy()

    def fill(self, out: Tensor, offset: Sequence[int]) -> Tensor:
        """Read into `out`, on any device, the part that begins at `offset`; return `out`.

        Raises:
            CheckpointCorrupt: The files do not contain all of it.
        """
        done = 0
        for file, begin, shape in self._boxes if out.numel() else ():
            low = list(map(max, begin, offset))
            high = [min(b + n, o + m) for b, n, o, m in zip(begin, shape, offset, out.shape, strict=True)]
            if any(first >= last for first, last in zip(low, high, strict=True)):
                continue
            inside = tuple(slice(a - b, z - b) for a, z, b in zip(low, high, begin, strict=True))
            target = out[tuple(slice(a - o, z - o) for a, z, o in zip(low, high, offset, strict=True))]
            target.copy_(self._files.read(file, self._name, inside))
            done += target.numel()
        if done != out.numel():
            raise CheckpointCorrupt(
                f"{self._name} of shape {tuple(self.shape)} is not complete in the checkpoint: {done} of {out.numel()} "
                f"elements from {tuple(offset)} on",
                self._name,
                str(out.numel()),
                str(done),
            )
        return out


def load_module(module: Module, state: Mapping[str, Any], **options: Any) -> None:
    """Load `state`, of whole or stored tensors, into `module`; into DTensors in place, this rank's rows only.

    Args:
        **options: As the module's own ``load_state_dict`` takes them. No collective.

    Raises:
        RuntimeError: Other names or shapes; torch's own message.
    """
    present = module.state_dict()
    values = {name: _put_into(present.get(name), value) for name, value in state.items()}
    if holds_shards(present):
        options.pop("assign", None)  # FSDP keeps the very tensors that it has sharded
    # torch copies what is loaded already onto itself: names, shapes and the module's own hooks are checked as ever.
    module.load_state_dict(values, **options)


def _put_into(present: Any, value: Any) -> Any:
    """Fill the DTensor `present` with its rows of `value`, and return it; return everything else whole."""
    if not isinstance(value, Tensor | StoredTensor):
        return loadable(value)
    if not is_sharded_tensor(present):
        return loadable(value)
    if present.shape != value.shape:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")  # for torch's message
    rows = rows_of(present)
    _fill(rows, value)
    return present


def _fill(rows: LocalRows, value: Tensor | StoredTensor) -> None:
    if isinstance(value, StoredTensor):
        value.fill(rows.local, rows.offset)
    else:
        rows.local.copy_(value[rows.index])


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load `state`, of whole or stored tensors, into `optimizer`. No collective.

    State of a DTensor parameter becomes DTensors like the present state, or like the parameter where it has its shape;
    counters stay plain.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    saved = [group.get("params", []) for group in state.get("param_groups", [])]
    if list(map(len, groups)) != list(map(len, saved)):  # torch says what differs
        optimizer.load_state_dict(loadable(dict(state)))
        return
    parameters = {
        index: parameter
        for ours, theirs in zip(groups, saved, strict=True)
        for index, parameter in zip(theirs, ours, strict=True)
    }
    values = {
        index: _state_of(parameters[index], optimizer.state.get(parameters[index], {}), entries)
        if index in parameters and isinstance(entries, Mapping)
        else loadable(entries)
        for index, entries in state["state"].items()
    }
    rest = {name: loadable(value) for name, value in state.items() if name != "state"}
    optimizer.load_state_dict({**rest, "state": values})


def _state_of(parameter: Tensor, present: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _like(parameter, present.get(name), value) for name, value in entries.items()}


def _like(parameter: Tensor, present: Any, value: Any) -> Any:
    """Return the state `value` of `parameter`, distributed as it must be for the optimizer to go on."""
    if not isinstance(value, Tensor | StoredTensor):
        return map_children(lambda child: _like(parameter, None, child), value)
    if not is_sharded_tensor(parameter):
        return loadable(value)
    if is_sharded_tensor(present) and present.shape == value.shape:
        return _spread(value, present)
    if parameter.shape == value.shape and value.shape:
        return _spread(value, parameter)
    if getattr(value, "was_sharded", False):  # of another shape, as factored moments have: alike on every rank
        return _replicated(loadable(value), parameter)
    return loadable(value)


def _spread(value: Tensor | StoredTensor, like: Any) -> Tensor:
    """Return a new DTensor of `value` that is placed as `like` is."""
    from torch.distributed.tensor import DTensor

    of_like = rows_of(like)
    local = torch.empty(of_like.local.shape, dtype=value.dtype, device=of_like.local.device)
    _fill(LocalRows(of_like.shape, value.dtype, of_like.offset, local, of_like.is_first), value)
    stride = torch.empty(like.shape, device="meta").stride()
    made: Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=stride
    )
    return made


def _replicated(whole: Tensor, parameter: Any) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    made: Tensor = DTensor.from_local(
        whole.to(parameter.to_local().device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return made


def loadable(value: Any, present: Any = None) -> Any:
    """Return `value` with tensors in place of stored ones: a DTensor where `present`, of the same form, has one."""
    if isinstance(value, Tensor | StoredTensor):
        if is_sharded_tensor(present) and present.shape == value.shape and not is_sharded_tensor(value):
            return _spread(value, present)
        return value.whole() if isinstance(value, StoredTensor) else value
    if isinstance(value, MutableMapping):
        by_name = present if isinstance(present, Mapping) else {}
        refilled = copy.copy(value)
        for name, child in value.items():
            refilled[name] = loadable(child, by_name.get(name))
        return refilled
    if type(value) in (list, tuple):
        is_alike = isinstance(present, Sequence) and len(present) == len(value)
        return type(value)(loadable(child, present[index] if is_alike else None) for index, child in enumerate(value))
    return value


def whole_state(module: Module, state: dict[str, Any], keeps: bool) -> dict[str, Any]:
    """Return `state`, the state dict of `module`, with whole tensors in the host's memory. Collective if it is sharded.

    One tensor at a time is gathered, so no device holds more than that. Tied weights stay one tensor.
    A state without DTensors is returned as it is, on every rank.

    Args:
        keeps: False returns an empty dict: this rank only takes part.
    """
    if not holds_shards(state):
        return state
    first = first_names(module)
    gathered: dict[str, Tensor | None] = {}
    whole: dict[str, Any] = {}
    for name, value in state.items():
        if is_sharded_tensor(value):
            kept = first.get(name, name)
            if kept not in gathered:
                full = value.full_tensor().detach()
                gathered[kept] = full.cpu() if keeps else None
                del full
            value = gathered[kept]
        if keeps:
            whole[name] = value
    return whole


def first_names(module: Module) -> dict[str, str]:
    """Return for each parameter the first name of the very same parameter. By identity, which is alike on all ranks."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def unsharded(state: Any, call: str) -> Any:
    """Return `state` with plain tensors in place of DTensors of which this rank holds everything.

    Args:
        call: What was called with it, for the error.

    Raises:
        CannotSave: Other ranks hold a part of one of them.
    """
    if not holds_shards(state):
        return state
    if (name := next(_partial(state, ""), None)) is not None:
        raise CannotSave(
            f"{call} was given a sharded tensor ({name}), of which this rank holds its own rows only: the others would "
            f"be missing from the file. {_INSTEAD}"
        )
    return _plain(state)


def _plain(value: Any) -> Any:
    return rows_of(value).local if is_sharded_tensor(value) else map_children(_plain, value)


def _partial(state: object, name: str) -> Iterator[str]:
    if is_sharded_tensor(state):
        if _is_split(state):
            yield name or "a tensor"
        return
    for key, child in children(state):
        yield from _partial(child, f"{name}.{key}" if name else key)


def _is_split(tensor: Any) -> bool:
    from torch.distributed.tensor import Replicate

    mesh = tensor.device_mesh
    return any(mesh.size(axis) > 1 and not isinstance(kind, Replicate) for axis, kind in enumerate(tensor.placements))


def refuse_partial_torch_save() -> None:
    """Make ``torch.save`` refuse a tensor of which other ranks hold a part; without this it writes one rank's rows.

    It applies to this process until its end. Other uses of pickle, and ``copy``, are as before. Repeated calls change
    nothing; a reducer that the program has registered itself stays.
    """
    with suppress(ImportError):  # a torch without distributed
        from torch.distributed.tensor import DTensor

        if DTensor not in copyreg.dispatch_table:
            copyreg.pickle(DTensor, _reduce)


def _reduce(tensor: Any) -> Any:
    """Reduce a DTensor as it does itself, but raise CannotSave below ``torch.save``."""
    frame: FrameType | None = sys._getframe(1)
    code = torch.save.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    if frame is not None and _is_split(tensor):
        raise CannotSave(
            f"torch.save was given a sharded tensor of shape {tuple(tensor.shape)}, of which this rank holds its own "
            f"rows only: the others would be missing from the file. {_INSTEAD}"
        )
    return tensor.__reduce_ex__(2)
