"""Parts: the state of one object in a folder, as safetensors and JSON. Written by rank 0, read by all.

``optimizer`` is two files: `optimizer.json`, its structure, and `optimizer.safetensors`, its tensors (where it has
any); frozen ones of a model have a file of their own, see `frozen`. A state that is more than data (an object of the
user's own class) becomes ``optimizer.pkl``, which is only read back with ``trust=True``.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nbaccel.errors import CheckpointCorrupt, UntrustedPickle
from nbaccel.train.checkpoint.frozen import frozen_file, write_once
from nbaccel.train.checkpoint.manifest import FileRecord, Manifest
from nbaccel.train.checkpoint.packing import CannotPack, Packed, ToHost, on_host, pack, unpack
from nbaccel.train.checkpoint.tensors import knows_dtypes_of, write_tensors

__all__ = ["Part", "load_pickle", "load_tensors", "numbered", "read_part"]

_MODEL = "model"
"""Prefix of the names of parts that hold weights; see `numbered`."""


def numbered(name: str, index: int) -> str:
    """Return a name with a number as Accelerate counts: model, model_1, model_2, ..."""
    return f"{name}_{index}" if index else name


@dataclass(frozen=True, slots=True)
class Part:
    """The state of one object, ready to be written.

    packed: its structure and tensors; None where only a pickle can hold it.
    pickled: that pickle.  reason: why a pickle is needed.
    frozen: names of tensors that need no gradient.
    """

    name: str
    packed: Packed | None
    pickled: bytes = b""
    reason: str = ""
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(cls, name: str, state: Any, to_host: ToHost = on_host, frozen: frozenset[str] = frozenset()) -> Part:
        try:
            return cls(name, pack(state, to_host), frozen=frozen)
        except CannotPack as error:
            pickled = io.BytesIO()
            torch.save(state, pickled)
            return cls(name, None, pickled.getvalue(), str(error))

    def write(self, folder: Path, earlier: Path | None = None) -> dict[str, FileRecord]:
        """Write the part, without flushing; return the records of files that are checksummed already, by name.

        earlier: the checkpoint before, which may hold the frozen tensors already.
        """
        if self.packed is None:
            (folder / f"{self.name}.pkl").write_bytes(self.pickled)
            return {}
        (folder / f"{self.name}.json").write_text(json.dumps(self.packed.structure), encoding="utf-8")
        tensors, path = self.packed.tensors, folder / f"{self.name}.safetensors"
        if not tensors:
            return {}
        records = {}
        frozen = {key: tensor for key, tensor in tensors.items() if key in self.frozen}
        if frozen and knows_dtypes_of(frozen):
            shared = folder / frozen_file(self.name)
            records[shared.name] = write_once(shared, frozen, _metadata(self.packed, frozen), earlier)
            tensors = {key: tensor for key, tensor in tensors.items() if key not in frozen}
        metadata = _metadata(self.packed, tensors)
        if knows_dtypes_of(tensors):
            return {**records, path.name: write_tensors(path, tensors, metadata)}
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata=metadata)
        return records


def _metadata(packed: Packed, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the header of a file with `tensors`: it also names tied weights, where safetensors looks for them."""
    return {"format": "pt", **{alias: kept for alias, kept in packed.aliases.items() if kept in tensors}}


def read_part(folder: Path, name: str, manifest: Manifest, trust: bool) -> Any:
    """Read the state that a `Part` was made of, from files that `manifest` lists.

    Raises:
        CheckpointCorrupt: a file of the part is missing or cannot be read.
            UntrustedPickle: the part is a pickle that could run code, without `trust`.
    """
    if f"{name}.json" not in manifest.files:
        return load_pickle(folder / f"{name}.pkl", trust)
    structure = folder / f"{name}.json"
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in (f"{name}.safetensors", frozen_file(name)):
            tensors |= load_tensors(folder / file) if file in manifest.files else {}
        if not name.startswith(_MODEL):
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
        CheckpointCorrupt: the file is no complete safetensors file.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}", str(path)) from error


def load_pickle(path: Path, trust: bool) -> Any:
    """Load what ``torch.save`` wrote to `path`, tensors on the CPU; data only, unless `trust`.

    Raises:
        UntrustedPickle: the file contains more than tensors and plain containers.
        CheckpointCorrupt: the file cannot be read.
    """
    try:
        with torch.serialization.safe_globals(_harmless()):
            return torch.load(path, map_location="cpu", weights_only=not trust)
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
