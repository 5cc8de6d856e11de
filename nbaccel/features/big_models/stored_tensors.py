"""Tensors that wait outside of a model: in files, which are read where they are, or on the host. Runs in ranks.

Of a safetensors file only the head is read in advance. `read` gives a view of the file, whose pages are the system's
cache and go with the tensor; `fill` reads into memory that is there, which takes a third of the time: every page of a
view, and of new memory, costs a fault of its own. Ranks of one machine share that cache. Nothing is ever written. Files
in PyTorch's own format are mapped by ``torch.load``, tensors alone.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from nbaccel.base.quantities import listed
from nbaccel.errors import CheckpointCorrupt
from nbaccel.train.checkpoint.content import load_pickle
from nbaccel.train.checkpoint.model_weights import without_prefix
from nbaccel.train.checkpoint.serialization import frozen_file

__all__ = [
    "KeptTensor",
    "MappedTensor",
    "PickledTensor",
    "Stored",
    "bytes_in",
    "from_offload_index",
    "weight_files",
    "weights_in",
]

_LONGEST_HEADER = 100_000_000
_LENGTH_BYTES = 8
_NAMES = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of safetensors files."""

Stamp = tuple[int, int]


class Stored(Protocol):
    """A tensor that can be read again and again."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, opened: dict[str, Any]) -> Tensor:
        """Return the tensor, on the host unless it is kept elsewhere; it may be a view of what is stored.

        Args:
            opened: Files that several readings one after the other share, by path.
        """

    def fill(self, target: Tensor, opened: dict[str, Any]) -> None:
        """Read the tensor into `target`, which is contiguous and has its shape, on the CPU."""

    def advise(self) -> None:
        """Let the system read ahead, since the tensor is needed soon."""


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that is kept in memory, pinned where that speeds up copies."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, opened: dict[str, Any]) -> Tensor:
        return self.tensor

    def fill(self, target: Tensor, opened: dict[str, Any]) -> None:
        target.copy_(self.tensor)

    def advise(self) -> None:
        """It is in memory."""


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor in a file that has its bytes, in the machine's order, beginning at `begin`.

    Args:
        stamp: The file's size and time of change when it was looked at. A file that changes meanwhile is refused, since
            the pages of a file that becomes shorter would end the process (SIGBUS).
    """

    path: str
    shape: torch.Size
    dtype: torch.dtype
    begin: int
    stamp: Stamp

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self, opened: dict[str, Any]) -> Tensor:
        """Return a view of the file; what is written into it stays in this process.

        Raises:
            CheckpointCorrupt: The file has changed, or is gone.
        """
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        first = self.begin - self.begin % mmap.ALLOCATIONGRANULARITY
        with self._opened() as file:
            pages = mmap.mmap(file.fileno(), self.begin + self.nbytes - first, access=mmap.ACCESS_COPY, offset=first)
        flat = torch.frombuffer(pages, dtype=torch.uint8, count=self.nbytes, offset=self.begin - first)
        if flat.data_ptr() % self.dtype.itemsize:
            flat = flat.clone()  # a file by another writer, whose tensors begin anywhere
        return flat.view(self.dtype).view(self.shape)

    def fill(self, target: Tensor, opened: dict[str, Any]) -> None:
        """Read the tensor into `target`.

        Raises:
            CheckpointCorrupt: The file has changed, or is gone.
        """
        if target.dtype != self.dtype:
            target.copy_(self.read(opened))
        elif self.nbytes:
            memory = memoryview((ctypes.c_char * self.nbytes).from_address(target.data_ptr())).cast("B")
            with self._opened() as file:
                file.seek(self.begin)
                while memory:
                    memory = memory[file.readinto(memory) or self._refuse() :]

    def advise(self) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError, CheckpointCorrupt), self._opened() as file:
                os.posix_fadvise(file.fileno(), self.begin, self.nbytes, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def _opened(self) -> Iterator[FileIO]:
        try:
            with open(self.path, "rb", buffering=0) as file:
                if _stamp(file.fileno()) != self.stamp:
                    self._refuse()
                yield file
        except OSError as error:
            raise CheckpointCorrupt(
                f"{self.path}, from which weights are read, cannot be opened: {error.strerror}", self.path
            ) from error

    def _refuse(self) -> NoReturn:
        raise CheckpointCorrupt(
            f"{self.path} has changed since the model was loaded from it, and weights are still read from there: load "
            "the model again",
            self.path,
        )


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor in a file of ``torch.save``, which is opened and mapped again for each block."""

    path: str
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def read(self, opened: dict[str, Any]) -> Tensor:
        if self.path not in opened:
            opened[self.path] = _unpickled(Path(self.path))
        found: Tensor = opened[self.path][self.name]
        return found

    def fill(self, target: Tensor, opened: dict[str, Any]) -> None:
        target.copy_(self.read(opened))

    def advise(self) -> None:
        """The file is mapped when it is read."""


def weights_in(checkpoint: str | os.PathLike[str]) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by name; nothing is read but the heads of its files.

    Args:
        checkpoint: A folder with ``model.safetensors`` or ``pytorch_model.bin``, whole or in shards with an index; one
            such file; or an index.

    Raises:
        FileNotFoundError: There are no weights, or a file that the index names is missing.
        CheckpointCorrupt: A file is damaged.
        UntrustedPickle: A file of PyTorch holds more than tensors.
    """
    found: dict[str, Stored] = {}
    for file in weight_files(Path(checkpoint)):
        found |= _mapped(file) if file.suffix == ".safetensors" else _pickled(file)
    return without_prefix(found)


def weight_files(checkpoint: Path) -> list[Path]:
    """Return the files that have the weights of a checkpoint.

    Raises:
        FileNotFoundError: There are no weights, or a file that the index names is missing.
        ValueError: A folder has several indices, or an index points out of it.
    """
    if checkpoint.is_dir():
        for name in _NAMES:
            if (checkpoint / name).is_file():
                frozen = checkpoint / frozen_file("model")  # beside it in a checkpoint of ours
                return [checkpoint / name, *([frozen] if frozen.is_file() else [])]
        indices = sorted(checkpoint.glob(f"*{_INDEX}"))
        known = [path for name in _NAMES if (path := checkpoint / f"{name}{_INDEX}") in indices] or indices
        if len(known) > 1 and known == indices and known[0].name.removesuffix(_INDEX) not in _NAMES:
            raise ValueError(f"{checkpoint} has several indices, {listed([path.name for path in known])}: name one")
        if not known:
            raise FileNotFoundError(
                f"there are no weights in {checkpoint}: neither {' nor '.join(_NAMES)}, nor an index (*{_INDEX})"
            )
        checkpoint = known[0]
    if not checkpoint.is_file():
        raise FileNotFoundError(
            f"there is no {checkpoint}: a checkpoint is a folder, a file of weights, or its index on this machine (a "
            "name on a hub is first downloaded, huggingface_hub.snapshot_download(name))"
        )
    if checkpoint.suffix != ".json":
        return [checkpoint]
    index = json.loads(checkpoint.read_text())
    places: dict[str, str] = index.get("weight_map", index)
    files = [checkpoint.parent / name for name in dict.fromkeys(places.values())]
    if outside := [file for file in files if file.parent.resolve() != checkpoint.parent.resolve()]:
        raise ValueError(f"{checkpoint} points out of its folder: {str(outside[0])!r}")
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"{checkpoint} names {listed(missing, 3)}, which {checkpoint.parent} does not have")
    return files


def from_offload_index(
    index: Mapping[str, Mapping[str, Any]], folder: str | os.PathLike[str] | None
) -> dict[str, Stored]:
    """Return the tensors that an index of Accelerate or transformers names: in safetensors files, or one file each.

    Args:
        folder: Where the latter are, ``<name>.dat``.
    """
    heads: dict[str, dict[str, Stored]] = {}
    found: dict[str, Stored] = {}
    for name, entry in index.items():
        if file := entry.get("safetensors_file"):
            heads.setdefault(file, _mapped(Path(file)))
            found[name] = heads[file][entry.get("weight_name", name)]
            continue
        found[name] = bytes_in(Path(folder or ".") / f"{name}.dat", entry)
    return found


def bytes_in(path: Path, entry: Mapping[str, Any]) -> MappedTensor:
    """Return the tensor in a file that has its bytes alone.

    Args:
        entry: Its "shape" and its "dtype", a name of torch's.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointCorrupt: It has another number of bytes.
    """
    shape, dtype = torch.Size(entry["shape"] or ()), getattr(torch, str(entry["dtype"]).removeprefix("torch."))
    stamp = _stamp(path)
    if stamp[0] != max(1, shape.numel()) * dtype.itemsize:
        raise CheckpointCorrupt(f"{path} does not have the bytes of {tuple(shape)} numbers of {dtype}", str(path))
    return MappedTensor(str(path.absolute()), shape, dtype, 0, stamp)


def _mapped(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file."""
    try:
        with open(path, "rb") as file:
            stamp = _stamp(file.fileno())
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, stamp[0] - _LENGTH_BYTES):
                raise ValueError(f"its head has {length} bytes, and the file {stamp[0]}")
            head = json.loads(file.read(length))
        return dict(_entries(path, head, _LENGTH_BYTES + length, stamp))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path} is no complete safetensors file: {error}", str(path)) from error


def _entries(path: Path, head: Mapping[str, Any], start: int, stamp: Stamp) -> Iterator[tuple[str, Stored]]:
    for name, entry in head.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} has the type {entry['dtype']}, which torch does not have")
        dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= stamp[0] - start or end - begin != shape.numel() * dtype.itemsize:
            raise ValueError(f"{name} is to lie at bytes {begin} to {end} of {stamp[0] - start}")
        yield name, MappedTensor(str(path.absolute()), shape, dtype, start + begin, stamp)


def _pickled(path: Path) -> dict[str, Stored]:
    return {
        name: PickledTensor(str(path.absolute()), name, tensor.shape, tensor.dtype)
        for name, tensor in _unpickled(path).items()
        if isinstance(tensor, Tensor)
    }


def _unpickled(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = load_pickle(path, trust=False, mmap=zipfile.is_zipfile(path))
    return state


def _stamp(file: int | Path) -> Stamp:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns
