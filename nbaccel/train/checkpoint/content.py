"""States in one checkpoint, between the prepared objects and the files. Runs in ranks; rank 0 writes, all ranks read.

`Content` is only data: state dicts, and `progress`, the position of the training. `TrainingState` and `ResumePolicy`
decide to which objects the states belong, and whether their numbers fit. Each state is one part of the folder,
safetensors and JSON (`ObjectState`). `Staging` is host memory that holds the states while they are written in the
background.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nbaccel.base.values import frozen
from nbaccel.errors import CannotSave, CheckpointCorrupt, UntrustedPickle
from nbaccel.train.checkpoint.manifest import FileRecord, Manifest
from nbaccel.train.checkpoint.save_agreement import Share
from nbaccel.train.checkpoint.serialization import (
    CannotPack,
    Packed,
    ToHost,
    frozen_file,
    knows_dtypes_of,
    on_host,
    pack,
    refuse_unknown,
    unpack,
    write_once,
    write_tensors,
)
from nbaccel.train.checkpoint.shard_facts import holds_shards, is_sharded_tensor
from nbaccel.train.checkpoint.shards import StoredFiles, StoredTensor, rows_of
from nbaccel.train.distributed.nested import children

__all__ = [
    "Content",
    "ObjectState",
    "Staging",
    "load_pickle",
    "load_tensors",
    "numbered",
    "read_part",
]

_KINDS = ("model", "optimizer", "scheduler", "custom")
PROGRESS = "training"
_REMEMBERED = "remembered"


@frozen
class Content:
    """State dicts by kind, in the order of `prepare` and of `register_for_checkpointing`.

    Args:
        progress: Step, number of models, seed, gradient scaler, the epoch and the positions of loaders.
        remembered: The program's own values, by name.
        frozen: For each model, names of its tensors that need no gradient.
        is_stored: Tensors of models and optimizers, and sharded ones, are `StoredTensor`, which are read when needed.
    """

    models: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    customs: list[Any] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    remembered: dict[str, Any] = field(default_factory=dict)
    frozen: list[frozenset[str]] = field(default_factory=list)
    is_stored: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all plain tensors, which are nearly all of the bytes that will be written, by all ranks."""
        sizes = {_address(tensor): tensor.nbytes for _, state in self._named() for tensor in _tensors(state)}
        return sum(sizes.values())

    def ready(self, staging: Staging | None = None, rows_only: bool = False) -> Iterator[ObjectState]:
        """Yield the parts, ready to be written. The tensors of one part at a time are copied to the host.

        Args:
            staging: Holds copies of all of them, so that the training may continue before they are written; the copies
                are complete after the last part.
            rows_only: Of sharded tensors the rows of this rank, and nothing else.
        """
        is_complete = len(self.frozen) == len(self.models)  # hooks may have taken some of them out
        frozen = {numbered("model", index): names for index, names in enumerate(self.frozen) if is_complete}
        for name, state in self._named():
            to_host = on_host if staging is None else partial(staging.copy, name)
            yield ObjectState.of(name, state, to_host, frozen.get(name, frozenset()), rows_only)
        if staging is not None:
            staging.settle()

    @classmethod
    def read(cls, folder: Path, manifest: Manifest, trust: bool, as_stored: bool = False) -> Content:
        """Read the parts that the manifest of `folder` names, from files that are verified already.

        Args:
            as_stored: Do not read tensors of models and optimizers: this rank may need some of their rows only. It is
                so in any case if several ranks have written them.

        Raises:
            UntrustedPickle: A part is a pickle, and `trust` was not given.
            CheckpointCorrupt: A part cannot be read.
        """
        as_stored |= bool(manifest.shards)
        files = StoredFiles(folder)
        kinds = _KINDS[:2] if as_stored else ()
        states = {
            name: read_part(folder, name, manifest, trust, files if name.startswith(kinds) else None)
            for name in manifest.parts
        }

        def all_of(kind: str) -> list[Any]:
            names = (numbered(kind, index) for index in range(len(states)))
            return [states[name] for name in names if name in states]

        models, optimizers, schedulers, customs = map(all_of, _KINDS)
        progress, remembered = states.get(PROGRESS, {}), states.get(_REMEMBERED, {})
        return cls(models, optimizers, schedulers, customs, progress, remembered, is_stored=as_stored)

    def _named(self) -> Iterator[tuple[str, Any]]:
        for kind, states in zip(_KINDS, (self.models, self.optimizers, self.schedulers, self.customs), strict=True):
            yield from ((numbered(kind, index), state) for index, state in enumerate(states))
        yield PROGRESS, self.progress
        if self.remembered:
            yield _REMEMBERED, self.remembered


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor) and state.layout is torch.strided:
        yield state
    for _, child in children(state):
        yield from _tensors(child)


def _address(tensor: Tensor) -> int:
    if not is_sharded_tensor(tensor):
        return tensor.data_ptr()
    local = rows_of(tensor).local
    return local.data_ptr() or id(tensor)


_MODEL = "model"
"""Prefix of the names of parts that hold weights; see `numbered`."""


def numbered(name: str, index: int) -> str:
    """Return a name with a number as Accelerate counts: model, model_1, model_2, ..."""
    return f"{name}_{index}" if index else name


@frozen
class ObjectState:
    """The state of one object, ready to be written.

    ``optimizer`` is two files: `optimizer.json`, its structure, and `optimizer.safetensors`, its tensors (where it has
    any); frozen ones of a model have a file of their own, see `write_once`. A state that is more than data (an object
    of the user's own class) becomes ``optimizer.pkl``, which is only read back with ``trust=True``.

    Args:
        packed: Its structure and tensors; None where only a pickle can hold it.
        pickled: That pickle.
        reason: Why a pickle is needed.
        frozen: Names of tensors that need no gradient.
    """

    name: str
    packed: Packed | None
    pickled: bytes = b""
    reason: str = ""
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        name: str,
        state: Any,
        to_host: ToHost = on_host,
        frozen: frozenset[str] = frozenset(),
        rows_only: bool = False,
    ) -> ObjectState:
        """Return the part `name` of a checkpoint, with its tensors on the host.

        Args:
            rows_only: Of sharded tensors the rows of this rank, and nothing else.

        Raises:
            CannotSave: The state holds sharded tensors, and something that only a pickle can hold.
        """
        try:
            packed = pack(state, to_host, rows_only)
            refuse_unknown(packed)
            return cls(name, packed, frozen=frozen)
        except CannotPack as error:
            if holds_shards(state):
                raise CannotSave(
                    f"{name} holds sharded tensors, of which a pickle would have one rank's rows, and needs a pickle: "
                    f"{error}"
                ) from error
            if rows_only:
                return cls(name, Packed(None))
            pickled = io.BytesIO()
            torch.save(state, pickled)
            return cls(name, None, pickled.getvalue(), str(error))

    def write(self, folder: Path, earlier: Path | None = None) -> dict[str, FileRecord]:
        """Write the part, without flushing; return the records of files that are checksummed already, by name.

        Args:
            earlier: The checkpoint before, which may hold the frozen tensors already.
        """
        if self.packed is None:
            (folder / f"{self.name}.pkl").write_bytes(self.pickled)
            return {}
        (folder / f"{self.name}.json").write_text(json.dumps(self.packed.structure), encoding="utf-8")
        tensors, path = self.packed.tensors, folder / f"{self.name}.safetensors"
        if not tensors:
            return {}
        records: dict[str, FileRecord] = {}
        frozen = {key: tensor for key, tensor in tensors.items() if key in self.frozen}
        if frozen and knows_dtypes_of(frozen):
            shared = folder / frozen_file(self.name)
            records[shared.name] = write_once(shared, frozen, _metadata(self.packed, frozen), earlier)
            tensors = {key: tensor for key, tensor in tensors.items() if key not in frozen}
        metadata = _metadata(self.packed, tensors)
        if tensors or not self.packed.rows:
            records |= _write_file(path, tensors, metadata)
        return records

    def write_rows(self, folder: Path, rank: int, world_size: int, earlier: Path | None = None) -> Share:
        """Write this rank's rows of sharded tensors, without flushing; return what is in which file.

        ``model-rank00001-of-00004.safetensors`` has the rows of rank 1, and frozen ones are in a second file. A rank
        without rows writes none.
        """
        if self.packed is None or not self.packed.rows:
            return Share({}, {})
        stem = f"{self.name}-rank{rank:05d}-of-{world_size:05d}"
        written = {name: rows.local for name, rows in self.packed.rows.items() if rows.is_first and rows.local.numel()}
        file_of = dict.fromkeys(written, f"{stem}.safetensors")
        records: dict[str, FileRecord] = {}
        metadata = {"format": "pt"}
        if (frozen := {name: rows for name, rows in written.items() if name in self.frozen}) and knows_dtypes_of(
            frozen
        ):
            shared = folder / frozen_file(stem)
            records[shared.name] = write_once(shared, frozen, metadata, earlier)
            file_of |= dict.fromkeys(frozen, shared.name)
        trained = {name: rows for name, rows in written.items() if name not in frozen or not records}
        if trained:
            path = folder / f"{stem}.safetensors"
            records[path.name] = _write_file(path, trained, metadata).get(path.name) or FileRecord.of(path)
        places = {
            name: {
                "shape": list(rows.shape),
                "dtype": str(rows.dtype),
                "boxes": [[file_of[name], list(rows.offset), list(rows.local.shape)]] if name in written else [],
            }
            for name, rows in self.packed.rows.items()
            if rank == 0 or name in written
        }
        return Share(records, {self.name: places})


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, FileRecord]:
    """Write a safetensors file; return its record, if it is known already, by name."""
    if knows_dtypes_of(tensors):
        return {path.name: write_tensors(path, tensors, metadata)}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata=dict(metadata))
    return {}


def _metadata(packed: Packed, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the header of a file with `tensors`: it also names tied weights, where safetensors looks for them."""
    return {"format": "pt", **{alias: kept for alias, kept in packed.aliases.items() if kept in tensors}}


def read_part(folder: Path, name: str, manifest: Manifest, trust: bool, stored: StoredFiles | None = None) -> Any:
    """Read the state that a `ObjectState` was made of, from files that `manifest` lists.

    Args:
        stored: Leave its tensors in these files, as `StoredTensor`.

    Raises:
        CheckpointCorrupt: A file of the part is missing or cannot be read.
        UntrustedPickle: The part is a pickle that could run code, without `trust`.
    """
    if f"{name}.json" not in manifest.files:
        return load_pickle(folder / f"{name}.pkl", trust)
    structure = folder / f"{name}.json"
    tensors: dict[str, Any] = {}
    try:
        for file in (f"{name}.safetensors", frozen_file(name)):
            if file in manifest.files:
                tensors |= load_tensors(folder / file) if stored is None else dict(stored.tensors(file))
        files = stored or StoredFiles(folder)
        for key, record in manifest.shards.get(name, {}).items():
            tensor = StoredTensor.of_shards(files, key, record)
            tensors[key] = tensor if stored is not None else tensor.whole()
        if not name.startswith(_MODEL) and stored is None:
            _move_into_torchs_memory(tensors)
        return unpack(json.loads(structure.read_text(encoding="utf-8")), tensors)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointCorrupt(f"{structure} cannot be read: {error!r}", str(structure)) from error


def _move_into_torchs_memory(tensors: dict[str, torch.Tensor]) -> None:
    """Copy each tensor, which is in the mapped file at any address, to an address that torch has chosen.

    An optimizer keeps the very tensors that it is given. torch's are at multiples of 64 bytes, and on some processors
    MKL computes other bits for other addresses (https://www.intel.com, "Getting reproducible results with Intel MKL"):
    a resumed training would differ from one that never stopped. Weights are copied into the model's own tensors.
    """
    for key, tensor in tensors.items():
        tensors[key] = tensor.clone()


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file by name, on the CPU.

    Raises:
        CheckpointCorrupt: The file is no complete safetensors file.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}", str(path)) from error


def load_pickle(path: Path, trust: bool, mmap: bool = False) -> Any:
    """Load what ``torch.save`` wrote to `path`, tensors on the CPU; data only, unless `trust`.

    Args:
        mmap: Map the file instead of reading it; only if it is an archive, as torch has written since 1.6.

    Raises:
        UntrustedPickle: The file contains more than tensors and plain containers.
        CheckpointCorrupt: The file cannot be read.
    """
    try:
        with torch.serialization.safe_globals(_harmless()):
            return torch.load(path, map_location="cpu", weights_only=not trust, mmap=mmap)
    except pickle.UnpicklingError as error:
        if trust:
            raise CheckpointCorrupt(f"{path} cannot be read: {error}", str(path)) from error
        wanted = str(error).partition("GLOBAL ")[2].split(" ")[0] or "more than data"
        raise UntrustedPickle(
            f"{path} is a pickle that asks for {wanted}, and loading it could run any code. If you or a program you "
            "trust wrote it, load_state(..., trust=True) loads it, and so does torch.load(path, weights_only=False)."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}", str(path)) from error


def _harmless() -> list[Any]:
    """Return types that only build data and that torch does not allow by default: NumPy's arrays of random states."""
    try:
        import numpy as np
    except ImportError:
        return []
    core = getattr(np, "_core", None) or np.core  # NumPy 2 renamed it
    kinds = {type(np.dtype(kind)) for kind in (np.uint32, np.int64, np.float32, np.float64, np.bool_)}
    return [core.multiarray._reconstruct, core.multiarray.scalar, np.ndarray, np.dtype, *kinds]


_SHARE_OF_HOST = 0.25
"""Share of the host's available memory that may be pinned: pinned memory cannot be swapped out, or used otherwise."""


class Staging:
    """Copies of tensors by name, each in a buffer of its own that the next copy of that name uses again.

    The buffers are kept from save to save: allocating fresh memory would take as long as the copy into it.

    Example:
        >>> staging = Staging()
        >>> weight = torch.ones(2)
        >>> first = staging.copy("model", "weight", weight)
        >>> weight.zero_()
        tensor([0., 0.])
        >>> first
        tensor([1., 1.])
        >>> staging.copy("model", "weight", weight) is first
        True
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._pinned = _Pinned()
        self._under_way: set[torch.device] = set()

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy(self, part: str, name: str, tensor: Tensor) -> Tensor:
        """Copy `tensor`, as it is now, to the CPU. An earlier copy of that name in that part is overwritten.

        A copy from CUDA is complete only after `settle`.
        """
        source = tensor.detach()
        buffer = self._buffers.get((part, name))
        if buffer is None or not _fits(buffer, source):
            self._buffers.pop((part, name), None)
            buffer = self._pinned.like(source) if source.is_cuda else torch.empty_like(source, device="cpu")
            self._buffers[part, name] = buffer
        # In the same layout the copy is one piece; in another one it needs a copy on the device, which may be full.
        if source.is_cuda and buffer.stride() == source.stride():
            buffer.copy_(source, non_blocking=True)
            self._under_way.add(source.device)
        else:
            buffer.copy_(source)
        return buffer

    def settle(self) -> None:
        """Wait until all copies are complete: one wait for all of them."""
        while self._under_way:
            torch.cuda.current_stream(self._under_way.pop()).synchronize()

    def clear(self) -> None:
        """Free the memory."""
        self._buffers.clear()
        self._pinned = _Pinned()


class _Pinned:
    """Memory that a GPU copies into at full speed, as long as it takes no more than its share of the host."""

    def __init__(self) -> None:
        self._left_bytes: int | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """Return an empty tensor on the CPU, in the layout of `tensor`, pinned if the share allows it."""
        if self._takes(tensor.nbytes):
            try:
                return torch.empty_like(tensor, device="cpu", pin_memory=True)
            except RuntimeError:  # the system has no more memory to pin, or does not let this process
                self._left_bytes = 0
        return torch.empty_like(tensor, device="cpu")

    def _takes(self, size_bytes: int) -> bool:
        if self._left_bytes is None:
            from nbaccel.base.hardware import usable_memory  # pinning alone needs it

            self._left_bytes = int(_SHARE_OF_HOST * usable_memory().available_bytes)
        taken_bytes = 1 << max(0, size_bytes - 1).bit_length()  # torch pins powers of two
        if taken_bytes > self._left_bytes:
            return False
        self._left_bytes -= taken_bytes
        return True


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    """Return whether `buffer` is like one that would be made for `tensor`."""
    if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        return False
    if tensor.is_contiguous():  # whatever its strides along dimensions of one element
        return buffer.is_contiguous()
    return buffer.stride() == torch.empty_like(tensor, device="meta").stride()
