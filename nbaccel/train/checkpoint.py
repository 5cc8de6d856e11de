"""Checkpoints: a training's state in a folder of safetensors and JSON. Runs in ranks; rank 0 writes, all may read.

A checkpoint is written beside its name and renamed when it is complete and on disk, so a folder of that name is
always a whole one. Nothing in it is a pickle. Gradients of an open accumulation window and the position inside
an epoch are not saved.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["read_checkpoint", "read_generators", "restore_generators", "write_checkpoint"]

_STATE = "state"
_SCALARS = (bool, int, float, str, type(None))


def write_checkpoint(folder: str | os.PathLike[str], models: list[dict[str, Any]], state: dict[str, Any]) -> None:
    """Write `folder`: each model's state dict in a file of its own, everything else together.

    An earlier folder of that name is replaced once the new one is complete. Blocks until the disk has it.
    """
    target = Path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        for name, content in [*_named(models), (_STATE, state)]:
            _write(unfinished, name, content)
        _sync(unfinished)
        _replace(target, unfinished)
        _sync(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read_checkpoint(folder: str | os.PathLike[str], models: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What `write_checkpoint` was given.

    models: how many there must be.
    Raises:
        FileNotFoundError: there is no checkpoint in `folder`.
        ValueError: it holds another number of models.
    """
    source = Path(folder)
    if not (source / f"{_STATE}.json").is_file():
        raise FileNotFoundError(f"there is no checkpoint in {source}: {_STATE}.json is missing")
    names = [name for name, _ in _named([{}] * models)]
    saved = sorted(path.stem for path in source.glob("model*.json"))
    if saved != sorted(names):
        raise ValueError(f"{source} holds {len(saved)} model(s), and {models} are prepared: prepare the same ones")
    return [_read(source, name) for name in names], _read(source, _STATE)


def read_generators(device: torch.device) -> dict[str, Any]:
    """The states of this process's random generators."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_generators(state: dict[str, Any], rank: int, device: torch.device) -> None:
    """Continue rank 0's random numbers; on other ranks start new ones that follow from rank 0's and the rank."""
    if rank:
        seed = zlib.crc32(bytes(state["torch"].tolist())) + rank
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        return
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in sys.modules and "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _named(models: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Accelerate's names: model, model_1, model_2, ..."""
    return [(f"model_{index}" if index else "model", model) for index, model in enumerate(models)]


def _write(folder: Path, name: str, content: dict[str, Any]) -> None:
    packer = _Packer()
    structure = packer.pack(content, "")
    save_file(packer.tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
    (folder / f"{name}.json").write_text(json.dumps(structure))
    for suffix in ("safetensors", "json"):
        _sync(folder / f"{name}.{suffix}")


def _read(folder: Path, name: str) -> dict[str, Any]:
    tensors = load_file(folder / f"{name}.safetensors")
    content: dict[str, Any] = _unpack(json.loads((folder / f"{name}.json").read_text()), tensors)
    return content


class _Packer:
    """Turns a nested state into JSON, and puts its tensors aside under dotted names."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def pack(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self._put_aside(value, name)}
        if isinstance(value, _SCALARS):
            return value
        if isinstance(value, dict):
            return {"dict": [[key, self.pack(child, _join(name, key))] for key, child in value.items()]}
        if isinstance(value, (list, tuple)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self.pack(child, _join(name, index)) for index, child in enumerate(value)]}
        raise TypeError(f"a checkpoint holds tensors, numbers, texts and containers; {name} is {type(value).__name__}")

    def _put_aside(self, tensor: Tensor, name: str) -> str:
        """Tied weights are written once: safetensors takes no tensor twice."""
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in self._names:
            return self._names[place]
        self._names[place] = name
        plain = tensor.detach().cpu().contiguous()
        is_view = plain.untyped_storage().nbytes() != plain.numel() * plain.element_size()
        self.tensors[name] = plain.clone() if is_view else plain
        return name


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(child, tensors) for key, child in content}
    children = [_unpack(child, tensors) for child in content]
    return tuple(children) if kind == "tuple" else children


def _join(name: str, part: Any) -> str:
    return f"{name}.{part}" if name else str(part)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(target: Path, complete: Path) -> None:
    """Rename `complete` to `target`; an older target is deleted after that."""
    if not target.exists():
        complete.rename(target)
        return
    outdated = target.with_name(f".{target.name}.{os.getpid()}.outdated")
    target.rename(outdated)
    complete.rename(target)
    shutil.rmtree(outdated)
