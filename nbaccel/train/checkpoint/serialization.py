"""Convert a nested state to JSON plus named tensors, and write the tensors to safetensors files. Runs in ranks.

`pack` is pure. `write_tensors` writes and checksums a file in one pass, in rank 0; any safetensors can read it. The
library's writer would need a second reading of the file for the checksum, which costs a third of a save. `write_once`
stores weights without gradient on the disk once, however many checkpoints hold them.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import sys
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbaccel.base.quantities import with_article
from nbaccel.base.values import frozen
from nbaccel.errors import CheckpointCorrupt
from nbaccel.train.checkpoint.manifest import FileRecord, SideThread
from nbaccel.train.checkpoint.shard_facts import is_sharded_tensor
from nbaccel.train.checkpoint.shards import LocalRows, rows_of

__all__ = [
    "CannotPack",
    "Packed",
    "ToHost",
    "frozen_file",
    "knows_dtypes_of",
    "on_host",
    "pack",
    "record_of",
    "refuse_unknown",
    "shareable_bytes",
    "unpack",
    "write_once",
    "write_tensors",
]

ToHost = Callable[[str, Tensor], Tensor]
"""Function that returns the tensor of that name on the CPU, not as a view of a larger one."""

_SCALARS = (bool, int, float, str, type(None))


class CannotPack(TypeError):
    """The state holds a value that is neither data nor a plain container; the message names it and its place."""


@frozen
class Packed:
    """A state that is ready to be written.

    Args:
        structure: JSON.
        tensors: By dotted name, on the CPU, in any layout, none of them a view of a larger one.
        aliases: Second and further names of a tensor in the state's first level, as tied weights have.
        rows: Of sharded tensors the part of this rank, by dotted name; on the CPU like `tensors`.
    """

    structure: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    rows: dict[str, LocalRows] = field(default_factory=dict)


@frozen
class _Kind:
    """Functions that split values of one exact type into children, and rebuild them."""

    take_apart: Callable[[Any], Iterable[Any]]
    put_together: Callable[[list[Any]], Any]


def _flat(mapping: Mapping[Any, Any]) -> list[Any]:
    return [part for item in mapping.items() for part in item]


def _pairs(parts: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


_MAPPINGS: dict[type, Callable[[list[tuple[Any, Any]]], Any]] = {
    dict: dict,
    OrderedDict: OrderedDict,
    Counter: lambda pairs: Counter(dict(pairs)),  # MultiStepLR's milestones
}

_KINDS: dict[type, _Kind] = {
    list: _Kind(list, list),
    tuple: _Kind(list, tuple),
    set: _Kind(list, set),
    frozenset: _Kind(list, frozenset),
    deque: _Kind(lambda value: [value.maxlen, *value], lambda parts: deque(parts[1:], parts[0])),
    complex: _Kind(lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytes: _Kind(lambda value: [base64.b64encode(value).decode()], lambda parts: base64.b64decode(parts[0])),
    torch.Size: _Kind(list, torch.Size),
    torch.device: _Kind(lambda value: [str(value)], lambda parts: torch.device(parts[0])),
    torch.dtype: _Kind(lambda value: [str(value)], lambda parts: _dtype(parts[0])),
}

_BY_NAME = {kind.__name__: codec for kind, codec in _KINDS.items()}
_MAPPING_BY_NAME = {kind.__name__: build for kind, build in _MAPPINGS.items()}


def on_host(name: str, tensor: Tensor) -> Tensor:
    """Return `tensor` itself if it is on the CPU already, else a copy there."""
    plain = tensor.detach().cpu().contiguous()
    is_view = plain.untyped_storage().nbytes() != plain.numel() * plain.element_size()
    return plain.clone() if is_view else plain


def pack(state: Any, to_host: ToHost = on_host, rows_only: bool = False) -> Packed:
    """Return `state` as JSON and tensors, which `to_host` brings to the CPU.

    Every value that is not a JSON scalar becomes ``{kind: [children]}``, so unpacking only ever builds the kinds of one
    table: reading a checkpoint runs no code that its writer chose. A value that is not in the table is refused, and the
    error names its place.

    Not kept: ``requires_grad`` and the device of tensors (they come back on the CPU), and views as views. A tensor that
    occurs twice is stored once, so tied weights cost nothing. Of sharded tensors only this rank's rows are taken.

    Args:
        rows_only: Bring nothing else to the CPU; another rank writes the rest.

    Raises:
        CannotPack: `state` holds an object of another kind.
        CannotSave: A tensor is sharded in a way that cannot be saved.

    Example:
        >>> packed = pack({"weight": torch.ones(2), "steps": (1, 2)})
        >>> packed.structure
        {'dict': ['weight', {'tensor': ['weight']}, 'steps', {'tuple': [1, 2]}]}
        >>> unpack(packed.structure, packed.tensors)
        {'weight': tensor([1., 1.]), 'steps': (1, 2)}
    """
    packer = _Packer(to_host, rows_only)
    structure = packer.pack(state, "")
    return Packed(structure, packer.tensors, packer.aliases, packer.rows)


def unpack(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `pack` was given.

    Raises:
        KeyError, ValueError: `structure` was not made by `pack`, or not with these tensors.
    """
    if type(structure) in _SCALARS:
        return structure
    ((name, parts),) = structure.items()
    if name == "tensor":
        return tensors[parts[0]]
    if name == "ndarray":
        return tensors[parts[0]].numpy()
    if name == "number":
        return _numpy().dtype(parts[0]).type(parts[1])
    children = [unpack(part, tensors) for part in parts]
    if name in _MAPPING_BY_NAME:
        return _MAPPING_BY_NAME[name](_pairs(children))
    return _BY_NAME[name].put_together(children)


class _Packer:
    """Converts one state to JSON; its tensors are collected under dotted names."""

    def __init__(self, to_host: ToHost, rows_only: bool) -> None:
        self._to_host = to_host
        self._rows_only = rows_only
        self.rows: dict[str, LocalRows] = {}
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self._places: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, name: str) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if isinstance(value, Tensor):
            return {"tensor": [self._put_aside(value, name)]}
        if kind in _MAPPINGS:
            return {kind.__name__: self._pack_items(value, name)}
        if kind in _KINDS:
            parts = enumerate(_KINDS[kind].take_apart(value))
            return {kind.__name__: [self.pack(part, _join(name, index)) for index, part in parts]}
        if kind.__module__ == "numpy":
            return self._pack_numpy(value, name)
        raise CannotPack(
            f"a checkpoint holds tensors, arrays, numbers, texts and containers; {name or 'the state'} is "
            f"{with_article(kind.__name__)}"
        )

    def _pack_items(self, mapping: Mapping[Any, Any], name: str) -> list[Any]:
        pairs = [(key, child, _join(name, key)) for key, child in mapping.items()]
        return [part for key, child, below in pairs for part in (self.pack(key, below), self.pack(child, below))]

    def _pack_numpy(self, value: Any, name: str) -> Any:
        np = _numpy()
        if isinstance(value, np.generic) and isinstance(value.item(), _SCALARS):
            return {"number": [str(value.dtype), value.item()]}
        try:
            tensor = torch.from_numpy(np.array(value))
        except TypeError:
            raise CannotPack(f"{name or 'the state'} is an array of {value.dtype}, which is no tensor") from None
        return {"ndarray": [self._put_aside(tensor, name)]}

    def _put_aside(self, tensor: Tensor, name: str) -> str:
        rows = rows_of(tensor, name) if is_sharded_tensor(tensor) else None
        whole_shape = tuple(tensor.shape)
        tensor = tensor if rows is None else rows.local
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            shown = "on the meta device" if tensor.is_meta else f"{tensor.layout} of {tensor.dtype}"
            raise CannotPack(f"{name or 'the state'} is a tensor without plain memory ({shown})")
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, whole_shape)
        if tensor.numel() and place in self._places:
            kept = self._places[place]
            self.aliases[name] = kept
            return kept
        while name in self.tensors or name in self.rows:  # {"a": {"b": …}} and {"a.b": …} have the same name
            name += "'"
        self._places[place] = name
        if rows is not None:
            self.rows[name] = replace(rows, local=self._to_host(name, tensor))
        else:
            self.tensors[name] = tensor if self._rows_only else self._to_host(name, tensor)
        return name


def _join(name: str, part: Any) -> str:
    return f"{name}.{part}" if name else str(part)


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text} is no dtype")
    return dtype


def _numpy() -> Any:
    """Return NumPy, which is optional for torch; imported only where a state has an array."""
    if "numpy" not in sys.modules:
        import numpy  # noqa: F401
    return sys.modules["numpy"]


_ALIGNMENT = 8
_CHUNK_BYTES = 8 << 20
_FLUSH_BYTES = 16 << 20
"""Least number of bytes to flush at once: each flush costs an entry in the file system's journal."""

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Names of dtypes in the order in which safetensors lays them out, the last ones first in the file."""

_UNKNOWN = frozenset({torch.complex128, torch.complex32})
"""Types that safetensors does not have."""

_flush: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # macOS has only fsync

_ORDER = {dtype: -place for place, dtype in enumerate(_NAMES)}


def refuse_unknown(packed: Packed) -> None:
    """Refuse tensors that no safetensors file can hold.

    Raises:
        CannotPack: There is one.
    """
    for name, tensor in packed.tensors.items():
        if tensor.dtype in _UNKNOWN:
            raise CannotPack(f"{name} is {tensor.dtype}, which safetensors does not have")


def knows_dtypes_of(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether `write_tensors` can write `tensors`; rarer types are written by the library."""
    return all(tensor.dtype in _NAMES for tensor in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write `tensors`, which are on the CPU; return size and checksum of the file, which may not be on the disk yet.

    The format is 8 bytes of header size, a JSON header, and the tensors' bytes without gaps, widest types first
    (https://huggingface.co/docs/safetensors, "Format"). The bytes equal those of the library.

    Args:
        metadata: Texts for the file's header.
    """
    crc, size, flushed_size = 0, 0, 0
    with (
        open(path, "wb", buffering=0) as file,
        SideThread("nbaccel-crc") as checker,
        SideThread("nbaccel-disk") as disk,
    ):
        checked = checker.submit(zlib.crc32, b"")
        flushed: Future[None] = Future()
        flushed.set_result(None)
        for chunk in _chunks(tensors, metadata):
            crc = checked.result()
            checked = checker.submit(zlib.crc32, chunk, crc)  # computed while the same bytes are being written
            written = 0
            while written < len(chunk):
                written += file.write(chunk[written:])
            size += len(chunk)
            if size - flushed_size >= _FLUSH_BYTES and flushed.done():
                flushed.result()
                # The disk works while the rest is written: most of the file is there when it is synced at the end.
                flushed, flushed_size = disk.submit(_flush, file.fileno()), size
        crc = checked.result()
        flushed.result()  # an error is reported to the first call only, so a later fsync may not see it
    return FileRecord(size, f"{crc:08x}")


def record_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Return size and checksum of the file that `write_tensors` would write; nothing is written."""
    crc, size = 0, 0
    for chunk in _chunks(tensors, metadata):
        crc = zlib.crc32(chunk, crc)
        size += len(chunk)
    return FileRecord(size, f"{crc:08x}")


def _chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    ordered = sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0]))
    yield memoryview(_header(ordered, metadata))
    for _, tensor in ordered:
        if tensor.numel():
            data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
            for start in range(0, len(data), _CHUNK_BYTES):
                yield data[start : start + _CHUNK_BYTES]


def _header(ordered: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


_SUFFIX = ".frozen.safetensors"


def frozen_file(part: str) -> str:
    """Return the name of the file with the frozen tensors of `part`."""
    return part + _SUFFIX


def write_once(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], earlier: Path | None
) -> FileRecord:
    """Write as `write_tensors` does; but if the checkpoint `earlier` has the same file, make `path` a link to it.

    It is for weights without gradient. Adapters are trained on a base that does not change, and is most of the bytes.
    Its tensors have a file of their own, ``model.frozen.safetensors``. When the checkpoint before has the very same
    file, by size and checksum, the file gets a second name in the new folder (a hard link): each folder is complete by
    itself, may be copied or deleted alone, and is verified by its manifest like any other. Where links do not work
    (another disk, a mounted drive) the file is written again.

    Not covered: damage to the shared file is damage to all folders that share it. The next save detects it, since it
    reads the file before it links it, and writes a good one.
    """
    if earlier is not None and (earlier / path.name).is_file():
        record = record_of(tensors, metadata)
        with suppress(CheckpointCorrupt, OSError):  # other content, or a file system without links
            record.verify(earlier / path.name)
            os.link(earlier / path.name, path)
            return record
    return write_tensors(path, tensors, metadata)


def shareable_bytes(earlier: Path | None, folder: Path) -> int:
    """Return the bytes of frozen files in `earlier` for which a new checkpoint in `folder` may need no space."""
    if earlier is None or not (earlier.is_dir() and folder.is_dir()) or earlier.stat().st_dev != folder.stat().st_dev:
        return 0
    return sum(path.stat().st_size for path in earlier.glob(f"*{_SUFFIX}"))
