"""Saving: one object in one file, written once for all ranks, and read without running code. Runs in ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nbaccel.aborting import refuse_if_aborted
from nbaccel.train.checkpoint.atomic_folder import sayable
from nbaccel.train.checkpoint.model_weights import write_then_rename
from nbaccel.train.checkpoint.serialization import pack
from nbaccel.train.distributed.partial_state import current_world

__all__ = ["load", "save", "write_object"]


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Call ``torch.save(obj, f)`` on the main process only; a path is written under a temporary name and renamed.

    save_on_each_node: on the first rank of each node.
    safe_serialization: `obj` is a dict of tensors; write it as safetensors.

    Raises:
        CannotSave: no space, or no right to write there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save({"epoch": 3}, f"{folder}/state.pt")
    ...     load(f"{folder}/state.pt")
    {'epoch': 3}
    """
    world = current_world()
    if world.is_main_process or (save_on_each_node and world.is_local_main_process):
        write_object(obj, f, safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Call ``torch.load`` for tensors and plain data. A file that holds other objects is refused, as torch does.

    kwargs: for `torch.load`; ``weights_only=False`` runs code from the file, so use that only with files of your own.
    """
    return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


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
        with sayable(Path(f)):
            write_then_rename(Path(f), write)
    else:
        write(f)
