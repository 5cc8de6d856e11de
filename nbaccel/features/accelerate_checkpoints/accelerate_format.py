"""Readers of Accelerate's own checkpoint folders. Runs in ranks; writes nothing.

They load models, optimizers, schedulers, the gradient scaler, registered objects and random states. They do not load
the position inside an epoch, which Accelerate does not save for ordinary loaders, nor its `step`, which counts batches
and not optimizer steps. All but the models are pickles: they are read as data only, unless `trust`. Under FSDP a model
and its optimizer are distributed checkpoints, or whole ones of other names, and the optimizer's state goes by names.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nbaccel.errors import CheckpointCorrupt, UntrustedPickle
from nbaccel.features.accelerate_checkpoints.dcp_format import by_position, read_dcp
from nbaccel.train.checkpoint.content import Content, load_pickle, load_tensors, numbered
from nbaccel.train.checkpoint.model_weights import without_prefix

__all__ = [
    "read_foreign",
    "restore_foreign_generators",
]

_FSDP_MODEL = "pytorch_model_fsdp"


def read_foreign(folder: Path, trust: bool) -> Content:
    """Return the content of a folder that Accelerate wrote.

    Raises:
        UntrustedPickle: A file contains more than data, and `trust` was not given.
        CheckpointCorrupt: A file cannot be read.
    """

    def pickles(name: str, suffix: str) -> list[Any]:
        return _until_missing(
            lambda index: folder / f"{numbered(name, index)}.{suffix}", lambda path: load_pickle(path, trust)
        )

    safe = _until_missing(lambda index: folder / f"{numbered('model', index)}.safetensors", load_tensors)
    customs = _until_missing(
        lambda index: folder / f"custom_checkpoint_{index}.pkl", lambda path: load_pickle(path, trust)
    )
    models = safe or pickles("pytorch_model", "bin") or pickles(_FSDP_MODEL, "bin")
    shards = _until_missing(lambda index: folder / f"{_FSDP_MODEL}_{index}", lambda path: read_dcp(path)["model"])
    parts = _until_missing(lambda index: folder / f"optimizer_{index}", lambda path: read_dcp(path)["optimizer"])
    scaler = folder / "scaler.pt"
    progress = {"precision": load_pickle(scaler, trust)} if scaler.exists() else {}
    return Content(
        [without_prefix(model) for model in models or shards],
        [by_position(state) if _is_by_name(state) else state for state in pickles("optimizer", "bin") or parts],
        pickles("scheduler", "bin"),
        customs,
        progress,
        is_stored=bool(shards or parts),
    )


def _is_by_name(state: Any) -> bool:
    groups = state.get("param_groups", ()) if isinstance(state, dict) else ()
    return any(isinstance(name, str) for group in groups for name in group.get("params", ()))


def restore_foreign_generators(folder: Path, rank: int, device: torch.device, trust: bool) -> str:
    """Restore `rank`'s random states; return the reason where that is impossible, else an empty text."""
    import numpy as np

    path = folder / f"random_states_{rank}.pkl"
    if not path.exists():
        return f"{path} is missing"
    try:
        states = load_pickle(path, trust)
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
        if device.type == "cuda" and "torch_cuda_manual_seed" in states:
            torch.cuda.set_rng_state(states["torch_cuda_manual_seed"][device.index or 0], device)
    except (CheckpointCorrupt, UntrustedPickle) as error:
        return str(error)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        return f"{path} cannot be used: {error!r}"
    return ""


def _until_missing(name: Callable[[int], Path], read: Callable[[Path], Any]) -> list[Any]:
    found: list[Any] = []
    while (path := name(len(found))).exists():
        found.append(read(path))
    return found
