"""Tensors in a safetensors file, written and checksummed in one pass. Written by rank 0; read by any safetensors.

The library's writer would need a second reading of the file for the checksum, which costs a third of a save. The
format is 8 bytes of header size, a JSON header, and the tensors' bytes without gaps, widest types first
(https://huggingface.co/docs/safetensors, "Format"). The bytes equal those of the library.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from nbaccel.train.checkpoint.files import SideThread
from nbaccel.train.checkpoint.manifest import FileRecord

__all__ = ["knows_dtypes_of", "record_of", "write_tensors"]

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

_flush: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # macOS has only fsync

_ORDER = {dtype: -place for place, dtype in enumerate(_NAMES)}


def knows_dtypes_of(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether `write_tensors` can write `tensors`; rarer types are written by the library."""
    return all(tensor.dtype in _NAMES for tensor in tensors.values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write `tensors`, which are on the CPU; return size and checksum of the file, which may not be on the disk yet.

    metadata: texts for the file's header.
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
