"""Where the weights of a model are that wait on the host or on the disk: in memory, or in files. Runs in ranks.

Weights that are in memory alone and shall wait on the disk are written once, into one file of the folder that was
named; others are never written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module

from nbaccel.base.quantities import gigabytes
from nbaccel.features.big_models.device_plan import DISK
from nbaccel.features.big_models.module_sizes import every_tensor
from nbaccel.features.big_models.stored_tensors import KeptTensor, Stored, from_offload_index, weights_in
from nbaccel.train.checkpoint.atomic_folder import as_cannot_save
from nbaccel.train.checkpoint.model_weights import write_then_rename

__all__ = ["SOURCE", "WeightSources", "aliases_in"]

SOURCE = "_nbaccel_stored"
"""Attribute of a model with the tensors in files that `load_checkpoint_in_model` has found for it."""


class WeightSources:
    """The places of the tensors that a model does not have in memory, or shall not have there."""

    def __init__(
        self,
        model: Module,
        state_dict: Mapping[str, Tensor] | None,
        offload_dir: str | os.PathLike[str] | None,
        offload_index: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        self._model = model
        self._state = state_dict or {}
        self._folder = None if offload_dir is None else Path(offload_dir)
        self._index = offload_index
        self._aliases = aliases_in(model)
        self._stored: Mapping[str, Stored] | None = vars(model).get(SOURCE)

    def find(self, name: str) -> Stored | None:
        """Return the tensor of this name, or of one that is tied to it; None if there is none."""
        if self._stored is None:
            self._stored = self._looked_up()
        for each in self._aliases.get(name, [name]):
            if each in self._state:
                return KeptTensor(self._state[each])
            if each in self._stored:
                return self._stored[each]
        return None

    def of(self, names: Iterable[str], places: Mapping[str, Any]) -> dict[str, Stored]:
        """Return where each of these tensors waits; those in memory are kept there, or written to the disk."""
        found: dict[str, Stored] = {}
        to_write: dict[str, Tensor] = {}
        tensors = dict(every_tensor(self._model))
        kept: dict[int, KeptTensor] = {}
        for name in names:
            held = tensors[name]
            if not held.is_meta and places[name] == DISK:
                to_write[name] = held.detach()
            elif not held.is_meta:
                if id(held) not in kept:
                    kept[id(held)] = KeptTensor(_pinned(held.detach().to("cpu")))
                found[name] = kept[id(held)]
            else:
                found[name] = self.checked(name, held)
        return found | (self._written(to_write) if to_write else {})

    def loaded(self, name: str, empty: Tensor, device: torch.device) -> Tensor:
        """Return the numbers of a tensor that is on the meta device, in memory on `device`."""
        return self.checked(name, empty).read({}).to(device, empty.dtype, copy=True)

    def refresh(self, name: str, buffer: Tensor) -> None:
        """Give a buffer that stays in memory the numbers that are stored with the weights of the model, if they are."""
        stored = None if buffer.is_meta else self.find(name)
        if stored is not None and stored.shape == buffer.shape:
            buffer.copy_(stored.read({}))

    def checked(self, name: str, held: Tensor) -> Stored:
        """Return where the numbers of a tensor on the meta device are.

        Raises:
            ValueError: They are nowhere, or have another shape.
        """
        stored = self.find(name)
        if stored is None:
            raise ValueError(
                f"{name} of {type(self._model).__name__} is on the meta device and has no numbers: load a checkpoint "
                "with load_checkpoint_and_dispatch, or name one that has it with offload_dir"
            )
        if stored.shape != held.shape:
            raise ValueError(f"{name} has the shape {tuple(held.shape)}, and {tuple(stored.shape)} where it is stored")
        return stored

    def _looked_up(self) -> Mapping[str, Stored]:
        if self._index is not None:
            return from_offload_index(self._index, self._folder)
        if self._folder is None or not self._folder.exists():
            return {}
        index = self._folder / "index.json"  # Accelerate's offload folder
        if index.is_file():
            return from_offload_index(json.loads(index.read_text()), self._folder)
        return weights_in(self._folder)

    def _written(self, tensors: dict[str, Tensor]) -> dict[str, Stored]:
        """Write tensors that are in memory alone into the folder, a tied one once; return where they are."""
        size = sum({id(tensor): tensor.nbytes for tensor in tensors.values()}.values())
        if self._folder is None:
            raise ValueError(
                f"{len(tensors)} tensors of {type(self._model).__name__} ({gigabytes(size)}) are in memory and shall "
                "wait on the disk: name a folder for them, offload_dir=..., or load the model from a checkpoint by "
                "load_checkpoint_and_dispatch, which writes nothing"
            )
        first = {name: self._aliases[name][0] for name in tensors}
        unique = {name: tensor for name, tensor in tensors.items() if first[name] not in tensors or first[name] == name}
        said = repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in sorted(unique.items())])
        kind = type(self._model).__name__
        path = self._folder / f"offloaded-{kind}-{hashlib.sha256(said.encode()).hexdigest()[:8]}.safetensors"
        with as_cannot_save(self._folder, size):
            self._folder.mkdir(parents=True, exist_ok=True)
            contents = {name: tensor.contiguous() for name, tensor in unique.items()}
            write_then_rename(path, lambda unfinished: save_file(contents, unfinished))
        stored = weights_in(path)
        return {name: stored[name if name in stored else first[name]] for name in tensors}


def aliases_in(model: Module) -> dict[str, list[str]]:
    """Return all names of the tensor of each name, in the order of the model."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in every_tensor(model):
        names[id(tensor)].append(name)
    return {name: group for group in names.values() for name in group}


def _pinned(tensor: Tensor) -> Tensor:
    if torch.cuda.is_available():
        try:
            return tensor.pin_memory()
        except RuntimeError:  # the system has no more memory to pin, or does not let this process
            return tensor
    return tensor
