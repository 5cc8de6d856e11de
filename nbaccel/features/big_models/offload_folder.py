"""Folders with one file for each tensor, as programs for Accelerate write them before they dispatch a model.

`dispatch_model` reads such a folder, and writes none itself: weights wait in the checkpoint that has them. Runs
anywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from nbaccel.features.big_models.module_sizes import set_module_tensor_to_device
from nbaccel.features.big_models.stored_tensors import bytes_in
from nbaccel.features.big_models.weight_slots import on_device
from nbaccel.train.checkpoint.atomic_folder import as_cannot_save

__all__ = [
    "load_offloaded_weight",
    "load_offloaded_weights",
    "offload_state_dict",
    "offload_weight",
    "save_offload_index",
]

INDEX = "index.json"


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """Write a tensor into the file ``<weight_name>.dat`` of a folder that exists.

    Args:
        index: Gets an entry with the type and the shape of the tensor, and is returned.

    Raises:
        ValueError: The tensor has no numbers.
        CannotSave: No space.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> offload_weight(torch.zeros(2, 3), "layer.weight", folder, index={})
        {'layer.weight': {'dtype': 'float32', 'shape': [2, 3]}}
    """
    if weight.is_meta:
        raise ValueError(f"{weight_name} is on the meta device and has no numbers to write")
    values = weight.detach().cpu().contiguous()
    with as_cannot_save(Path(offload_folder), values.nbytes):
        (Path(offload_folder) / f"{weight_name}.dat").write_bytes(_bytes_of(values) or bytes(values.itemsize))
    if index is not None:
        index[weight_name] = {"dtype": str(values.dtype).removeprefix("torch."), "shape": list(values.shape)}
    return index


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Return the tensor in a file that `offload_weight` has written.

    Args:
        weight_info: Its entry in the index.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointCorrupt: The file does not have the bytes of such a tensor.
    """
    stored = bytes_in(Path(weight_file), weight_info)
    return on_device(stored, stored.shape, stored.dtype, torch.device("cpu"), {})


def load_offloaded_weights(
    model: Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Put the tensors of a folder into `model`, on the host.

    Args:
        index: Their entries by name; nothing if it is empty.

    Raises:
        ValueError: The model does not have such a tensor, or it has another shape.
    """
    for name, entry in (index or {}).items():
        value = load_offloaded_weight(Path(offload_folder) / f"{name}.dat", entry)
        set_module_tensor_to_device(model, name, "cpu", value=value)


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]) -> None:
    """Write `index` into the folder, beside the entries that its index has already; nothing if it is empty."""
    if not index:
        return
    path = Path(offload_folder) / INDEX
    before = json.loads(path.read_text()) if path.is_file() else {}
    with as_cannot_save(path.parent, 0):
        path.write_text(json.dumps({**before, **index}, indent=2))


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write all tensors of a state dict into a folder, with their index."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        offload_weight(tensor, name, save_dir, index)
    save_offload_index(index, save_dir)
