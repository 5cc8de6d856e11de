"""SizeCache: results of earlier batch size searches, in memory or in a folder. Runs in ranks.

A size found before is only a proposal: it is tried once more before it is used, since memory depends on more than
the signature lists.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from nbaccel.base.values import frozen
from nbaccel.train.distributed.callers import warn_user

__all__ = [
    "FoundInFolder",
    "Size",
    "SizeCache",
    "signature",
]

_FILE = "batch_sizes.json"


@frozen
class Size:
    """Result of a search.

    Args:
        size: Samples per rank.
        used: As `Trial.used`, of the trial that showed that the size fits.
    """

    size: int
    used: float | None


class SizeCache:
    """Sizes by the signature of their search; lost with this object."""

    def __init__(self) -> None:
        self._sizes: dict[str, Size] = {}

    def get(self, signature: str) -> Size | None:
        return self._sizes.get(signature)

    def put(self, signature: str, size: Size) -> None:
        self._sizes[signature] = size


class FoundInFolder(SizeCache):
    """Sizes in a file of `folder`, which is made if it does not exist; a person may read or delete the file.

    Args:
        is_writer: One rank writes for all. A file that cannot be read counts as empty; where none can be written there
            is a warning.
    """

    def __init__(self, folder: str | os.PathLike[str], is_writer: bool = True) -> None:
        super().__init__()
        self._path = Path(folder) / _FILE
        self._is_writer = is_writer

    def get(self, signature: str) -> Size | None:
        entry = self._read().get(signature)
        return None if entry is None else Size(int(entry["size"]), entry["used"])

    def put(self, signature: str, size: Size) -> None:
        if not self._is_writer:
            return
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(self._read() | {signature: asdict(size)}, indent=1), encoding="utf-8")
            os.replace(unfinished, self._path)
        except OSError as error:
            warn_user(f"batch size {size.size} is not kept for the next run: {error}")

    def _read(self) -> dict[str, Any]:
        try:
            sizes: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return sizes


def signature(
    models: Iterable[Module],
    optimizers: Iterable[Optimizer],
    shapes: Sequence[str],
    device: torch.device,
    others: Iterable[object],
) -> str:
    """Return a short name for a search: models and optimizers by structure, samples by shape, device, torch, `others`.

    Example:
        >>> linear = torch.nn.Linear(1, 1)
        >>> one, two = (signature([linear], [], [of], torch.device("cpu"), []) for of in ("int64[8]", "int64[16]"))
        >>> one == two
        False
    """
    parts: list[object] = [torch.__version__, device.type, *shapes, *others]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    for model in models:
        parts += [model, model.training]
        parts += [(name, list(value.shape), value.dtype, value.requires_grad) for name, value in _tensors(model)]
    for optimizer in optimizers:
        parts += [type(optimizer).__qualname__, *(_options(group) for group in optimizer.param_groups)]
    return hashlib.blake2b("\n".join(map(str, parts)).encode(), digest_size=16).hexdigest()


def _tensors(model: Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _options(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the optimizer options that may change its memory: switches and names, not learning rates."""
    return [(name, value) for name, value in group.items() if isinstance(value, (bool, str, type(None)))]
