"""Reader of folders of torch's distributed checkpoints (DCP), which Accelerate writes under FSDP. Runs in ranks.

Such a folder has one ``.distcp`` file per rank, and ``.metadata``, a pickle that says which box of a tensor is where.
The pickle is read by an unpickler that knows the few names which DCP writes and gives empty objects of our own for
them, so it builds data and runs nothing; any other name is refused. Each piece in a file is what ``torch.save`` wrote,
and is loaded with ``weights_only``. Nothing of ``torch.distributed.checkpoint`` is imported. Only the pieces are read
of which this rank needs rows. There are no checksums in this format.

Not covered: compressed pieces, and state dicts that were saved without DCP's flattening of names.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbaccel.errors import CheckpointCorrupt, UntrustedPickle
from nbaccel.train.checkpoint.shards import StoredTensor

__all__ = [
    "by_position",
    "read_dcp",
]

_METADATA = ".metadata"
_UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, EOFError, pickle.UnpicklingError)
"""Errors of unpickling bytes that are something else, and of using what came out."""


def read_dcp(folder: Path) -> dict[str, Any]:
    """Return the nested state dict in `folder`, its tensors as `StoredTensor`.

    Raises:
        UntrustedPickle: The metadata or a value asks for more than data.
        CheckpointCorrupt: A file is missing, or is not as DCP writes it.
    """
    path = folder / _METADATA
    try:
        with open(path, "rb") as file:
            metadata = _Metadata(file, path).load()
        places = {
            _key(index.fqn, getattr(index, "offset", None)): place for index, place in metadata.storage_data.items()
        }
        pieces = _Pieces(folder, places)
        state: dict[str, Any] = {}
        for name, record in metadata.state_dict_metadata.items():
            value = _tensor(pieces, name, record) if hasattr(record, "chunks") else pieces.value(_key(name, None))
            _enter(state, metadata.planner_data[name], value)
    except (*_UNREADABLE, OSError) as error:
        raise CheckpointCorrupt(f"{path} is no metadata of a distributed checkpoint: {error!r}", str(path)) from error
    return {name: _lists(child) for name, child in state.items()}


def by_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer as the optimizer itself has it, by numbers of parameters instead of names."""
    groups: list[dict[str, Any]] = []
    numbers: dict[Any, int] = {}
    for group in state.get("param_groups", []):
        for name in group["params"]:
            numbers[name] = len(numbers)
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    entries = {numbers[name]: entry for name, entry in state.get("state", {}).items() if name in numbers}
    return {"state": entries, "param_groups": groups}


class _Pieces:
    """The pieces of a folder: a tensor's box, or a value, at an offset of a file."""

    def __init__(self, folder: Path, places: Mapping[str, Any]) -> None:
        self._folder = folder
        self._places = places

    def read(self, file: str, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return the rows `index` of the piece with the key `file`, as `StoredTensor` asks for them."""
        piece = self.value(file)
        if not isinstance(piece, Tensor):
            raise CheckpointCorrupt(f"{self._folder}: {name} is no tensor", str(self._folder))
        return piece[index] if index else piece

    def value(self, key: str) -> Any:
        """Load one piece.

        Raises:
            UntrustedPickle: It is more than data.
            CheckpointCorrupt: It is not complete.
        """
        place = self._places[key]
        name = str(place.relative_path)
        if os.path.basename(name) != name:
            raise CheckpointCorrupt(f"{self._folder / _METADATA} points out of its folder: {name!r}", str(self._folder))
        if getattr(place, "transform_descriptors", None):
            raise CheckpointCorrupt(
                f"{self._folder / name} is compressed ({place.transform_descriptors}), and only torch reads that: load "
                "it with torch.distributed.checkpoint, and save it again",
                name,
            )
        path = self._folder / name
        try:
            with open(path, "rb") as file:
                file.seek(place.offset)
                content = file.read(place.length)
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UntrustedPickle(f"{path} holds more than data, and is not loaded: {error}") from error
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error}", str(path)) from error


def _tensor(pieces: _Pieces, name: str, record: Any) -> StoredTensor:
    dtype = record.properties.fields[0]
    boxes = [(_key(name, chunk.offsets), tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in record.chunks]
    return StoredTensor(pieces, name, record.size, dtype, boxes, was_sharded=len(boxes) > 1)


def _key(name: str, offset: Any) -> str:
    return name if offset is None else f"{name}@{tuple(offset)}"


def _enter(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for name in path[:-1]:
        state = state.setdefault(name, {})
    state[path[-1]] = value


def _lists(value: Any) -> Any:
    """Return `value` with lists in place of dicts whose keys are the numbers from 0 on: groups of parameters."""
    if not isinstance(value, dict):
        return value
    below = {name: _lists(child) for name, child in value.items()}
    is_list = bool(below) and all(type(name) is int for name in below) and sorted(below) == list(range(len(below)))
    return [below[index] for index in range(len(below))] if is_list else below


class _Record:
    """Fields of an object in the metadata, without its class."""

    fields: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.fields = tuple(state)


def _first(*values: Any) -> Any:
    return values[0] if values else None


def _path(*parts: Any) -> str:
    return "/".join(map(str, parts))


_OF_METADATA = {
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "ChunkStorageMetadata",
    "BytesStorageMetadata",
    "TensorProperties",
    "StorageMeta",
}

_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _first,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _first,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _Record,
    **{("torch.distributed.checkpoint.metadata", name): _Record for name in _OF_METADATA},
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
"""What stands for each name that DCP writes; none of these does anything but hold values."""


class _Metadata(pickle.Unpickler):
    """Reads the metadata, and refuses every name but those of `_KNOWN` and of dtypes."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise UntrustedPickle(
            f"{self._path} is a pickle that asks for {module}.{name}, which no distributed checkpoint does: it could "
            "run any code, and is not loaded"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise UntrustedPickle(f"{self._path} refers to {pid!r} outside of it, and is not loaded")
