"""Weights: one model in a folder of Hugging Face's layout, readable without nbaccel. Runs in ranks; rank 0 writes.

The file is ``model.safetensors``, or, where that would be larger than `max_shard_size`,
``model-00001-of-00003.safetensors`` and so on with ``model.safetensors.index.json``, which says where each tensor is.
With ``safe_serialization=False`` it is ``pytorch_model.bin``, in the same way. Each file is written under a temporary
name and renamed, the index last.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from nbaccel.base.aborting import refuse_if_aborted
from nbaccel.base.quantised import base_of, trained_state
from nbaccel.base.quantities import listed
from nbaccel.train.checkpoint.atomic_folder import as_cannot_save
from nbaccel.train.checkpoint.content import load_pickle, load_tensors, read_part
from nbaccel.train.checkpoint.manifest import MANIFEST, Manifest, sync
from nbaccel.train.checkpoint.serialization import CannotPack, frozen_file, pack, refuse_unknown
from nbaccel.train.checkpoint.shard_facts import is_sharded_tensor
from nbaccel.train.checkpoint.shards import first_names, unsharded
from nbaccel.train.strategies.single import plain_name

__all__ = [
    "load_model",
    "load_trained",
    "load_weights",
    "parse_size",
    "read_weights",
    "save_weights",
    "with_tied",
    "without_base",
    "without_prefix",
    "write_object",
    "write_then_rename",
]

_T = TypeVar("_T")

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    unit: 2 ** (10 * power) for power, unit in enumerate(("KIB", "MIB", "GIB", "TIB"), start=1)
}
_SIZE = r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*"
_NAMES = {True: "model.safetensors", False: "pytorch_model.bin"}


def parse_size(size: int | str) -> int:
    """Return a size in bytes; "10GB" is decimal, "10GiB" binary, as Hugging Face reads them.

    Example:
        >>> parse_size("10GB"), parse_size("1.5KiB"), parse_size(7)
        (10000000000, 1536, 7)
    """
    if isinstance(size, int):
        return size
    said = re.fullmatch(_SIZE, size.upper())
    if said is None or said[2] not in _UNITS:
        raise ValueError(f"max_shard_size must be bytes, or text such as '10GB' or '500MiB', got {size!r}")
    return int(float(said[1]) * _UNITS[said[2]])


def save_weights(state: Mapping[str, Any], folder: Path, max_shard_size: int | str, safe: bool) -> None:
    """Write the state dict of a model into `folder`; files of an earlier model there are removed.

    Raises:
        NotADirectoryError: `folder` is a file.
        CannotPack: With `safe`, the state holds what is no tensor, or one of a type that safetensors does not have.
        CannotSave: No space, or no right to write there.
    """
    if folder.is_file():
        raise NotADirectoryError(f"save_model writes into a folder, and {folder} is a file: give it another name")
    packed = pack(unsharded(dict(state), "save_model"))
    if safe:
        try:
            refuse_unknown(packed)
        except CannotPack as error:
            raise CannotPack(f"{error}: save_model(..., safe_serialization=False) writes it") from None
    shards = _cut(packed.tensors, parse_size(max_shard_size))
    stem, suffix = os.path.splitext(_NAMES[safe])
    names = [f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [_NAMES[safe]]
    size = sum(tensor.nbytes for tensor in packed.tensors.values())
    with as_cannot_save(folder, size):
        folder.mkdir(parents=True, exist_ok=True)
        for name, shard in zip(names, shards, strict=True):
            write_then_rename(folder / name, _writer(shard, {} if len(shards) > 1 else packed.aliases, safe))
        index = folder / f"{_NAMES[safe]}.index.json"
        if len(shards) > 1:
            places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
            places |= {alias: places[kept] for alias, kept in packed.aliases.items()}
            text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2)
            write_then_rename(index, lambda path: path.write_text(text))
        for outdated in folder.glob(f"{stem}*"):
            is_ours = re.fullmatch(rf"{stem}(-\d+-of-\d+)?{re.escape(suffix)}(\.index\.json)?", outdated.name)
            if is_ours and outdated.name not in names and (outdated != index or len(shards) == 1):
                outdated.unlink()


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the state dict in a folder that `save_weights` or a Hugging Face library wrote, or in one weights file.

    Raises:
        FileNotFoundError: There are no weights at `path`.
        CheckpointCorrupt: A file is damaged or missing.
        UntrustedPickle: A .bin file contains more than tensors.
    """
    if path.is_file():
        return _read_file(path)
    if (path / MANIFEST).is_file() and (manifest := Manifest.read(path)).shards.get("model"):
        state: dict[str, Tensor] = dict(read_part(path, "model", manifest, trust=False))  # a checkpoint of ours
        return state
    for name in _NAMES.values():
        if (path / name).is_file():
            frozen = path / frozen_file("model")  # beside it in a checkpoint of ours
            return _read_file(path / name) | (_read_file(frozen) if frozen.is_file() else {})
        if (path / f"{name}.index.json").is_file():
            places = json.loads((path / f"{name}.index.json").read_text())["weight_map"]
            state = {}
            for shard in sorted(set(places.values())):
                if os.path.basename(shard) != shard:
                    raise ValueError(f"{path / name}.index.json points out of its folder: {shard!r}")
                state |= _read_file(path / shard)
            return state
    raise FileNotFoundError(f"there are no weights in {path}: neither {' nor '.join(_NAMES.values())}, nor an index")


def load_weights(model: Module, state: dict[str, Tensor], strict: bool = True) -> list[str]:
    """Load `state` into `model`; return the names of the model that `state` did not hold.

    A name that is missing because its weight is tied to another one is filled through that one.

    Raises:
        RuntimeError: With `strict`, other names or shapes; torch's own message.
    """
    state = with_tied(model, without_prefix(state))
    if base := base_of(model):
        return load_trained(model, without_base(model, state, base), base, strict)
    return list(model.load_state_dict(state, strict=strict).missing_keys)


def load_trained(
    model: Module, state: Mapping[str, Any], base: frozenset[str], strict: bool = True, **options: Any
) -> list[str]:
    """Load into `model` a state that was saved without the base; return the names of the model that it did not hold.

    Args:
        base: Names of the tensors of `model` that stay as they are.
        **options: For its ``load_state_dict``.

    Raises:
        RuntimeError: With `strict`, a trained tensor has no place in the model, or one is missing.
    """
    own = model.state_dict()
    missing = sorted(name for name in trained_state(model, own, base) if name not in state)
    odd = sorted(name for name in state if name not in own)
    if strict and (missing or odd):
        faults = [
            f"{len(names)} {what} ({listed(names, 4)})"
            for what, names in (("missing", missing), ("unknown", odd))
            if names
        ]
        raise RuntimeError(
            f"these are the trained tensors of a model with other adapters than this {type(model).__name__}: "
            f"{', '.join(faults)}. Make the same adapters (LoraConfig) as in the training, before prepare."
        )
    return list(model.load_state_dict(state, strict=False, **options).missing_keys)


def without_base(model: Module, state: dict[str, Any], base: frozenset[str]) -> dict[str, Any]:
    """Return what is trained in a state of a quantised `model`, which other libraries save with the base.

    Raises:
        RuntimeError: The base in `state` is another one, as its tensors that are not packed show.
    """
    if base.isdisjoint(state):
        return state
    own = model.state_dict()
    others = sorted(name for name in base & state.keys() & own.keys() if _differs(own[name], state[name]))
    if others:
        raise RuntimeError(
            f"the checkpoint has other frozen weights than this {type(model).__name__}, whose quantised base stays as "
            f"it is: {listed(others, 4)}. Load the model from the files from which the training loaded it."
        )
    described = own.keys() - trained_state(model, own, base).keys()
    return {name: value for name, value in state.items() if name not in described}


def _differs(own: Any, stored: Any) -> bool:
    """Return whether a frozen tensor that is not packed has other numbers in a checkpoint."""
    if type(own) is not Tensor or not own.is_floating_point() or own.dtype != stored.dtype:
        return False
    return own.shape != stored.shape or not torch.equal(own.cpu(), stored.cpu())


def load_model(model: Module, path: str | os.PathLike[str], strict: bool = True) -> list[str]:
    """Load the weights that `Accelerator.save_model` wrote. Every rank that has the model calls it.

    Trained tensors of a quantised model are loaded beside the base that `model` has.

    Args:
        model: The model, which gets the weights.
        path: The folder, or one .safetensors or .bin file.
        strict: The names must be those of the model.

    Returns:
        The names of the model that were not in it.

    Raises:
        FileNotFoundError: There are no weights at `path`.
        RuntimeError: With `strict`, names or shapes differ from the model's.

    Example:
        >>> import tempfile
        >>> from nbaccel import Accelerator
        >>> model, copy = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Accelerator().save_model(model, folder)
        ...     load_model(copy, folder)
        []
        >>> torch.equal(model.weight, copy.weight)
        True
    """
    return load_weights(model, read_weights(Path(path)), strict)


def without_prefix(state: dict[str, _T]) -> dict[str, _T]:
    """Return `state` without DDP's ``module.``, if every name has it: Accelerate's checkpoints of several ranks."""
    if not all(name.startswith("module.") for name in state):
        return state
    return {name.removeprefix("module."): value for name, value in state.items()}


def with_tied(model: Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with the names that safetensors files leave out because `model` ties their weights to others.

    Names that only differ because a part is compiled, here or where the state was saved, become those of `model`.
    """
    own = model.state_dict()
    names = {plain_name(name): name for name in own}
    state = {names.get(plain_name(name), name): value for name, value in state.items()}
    first = first_names(model)
    places = {
        name: first.get(name, name) if is_sharded_tensor(tensor) else _place(tensor)
        for name, tensor in own.items()
        if isinstance(tensor, Tensor)
    }
    by_place = {places[name]: name for name in state if name in places}
    tied = {name: state[by_place[place]] for name, place in places.items() if name not in state and place in by_place}
    return {**state, **tied}


def write_then_rename(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` to make a file that becomes `path` once it is on the disk."""
    unfinished = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        write(unfinished)
        sync(unfinished)
        os.rename(unfinished, path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _writer(tensors: dict[str, Tensor], aliases: dict[str, str], safe: bool) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        if safe:
            save_file(tensors, path, metadata={"format": "pt", **aliases})
        else:
            torch.save(tensors | {alias: tensors[kept] for alias, kept in aliases.items()}, path)
        refuse_if_aborted(
            f"the weights in {path.parent}"
        )  # only now: a copy from a device waits for what is queued there

    return write


def _cut(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Return shards of at most `limit` bytes, filled in order; a tensor larger than that is a shard of its own."""
    shards: list[dict[str, Tensor]] = []
    open_shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if tensor.nbytes > limit:
            shards.append({name: tensor})
            continue
        if size + tensor.nbytes > limit:
            shards.append(open_shard)
            open_shard, size = {}, 0
        open_shard[name] = tensor
        size += tensor.nbytes
    return [*shards, open_shard] if open_shard or not shards else shards


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_tensors(path)
    state: dict[str, Tensor] = load_pickle(path, trust=False)
    return state


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def write_object(obj: Any, f: Any, safe_serialization: bool = False) -> None:
    """Write `obj` from this process to `f`, a path or an open file."""

    def write(file: Any) -> None:
        if safe_serialization:
            packed = pack(dict(obj))
            save_file(packed.tensors, file, metadata={"format": "pt", **packed.aliases})
        else:
            torch.save(obj, file)
        refuse_if_aborted(f"the file {f}")  # only now: a copy from a device waits for what is queued there

    if isinstance(f, (str, os.PathLike)):
        with as_cannot_save(Path(f)):
            write_then_rename(Path(f), write)
    else:
        write(f)
