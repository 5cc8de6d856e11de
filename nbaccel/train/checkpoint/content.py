"""Content: the states in one checkpoint, between the prepared objects and the files. Runs in ranks.

It is only data: state dicts, and `progress`, the position of the training. `Prepared` and `Checkpointing` decide to
which objects the states belong, and whether their numbers fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbaccel.train.checkpoint.manifest import Manifest
from nbaccel.train.checkpoint.packing import on_host
from nbaccel.train.checkpoint.parts import Part, numbered, read_part
from nbaccel.train.checkpoint.staging import Staging
from nbaccel.train.talk.nested import children

__all__ = ["Content", "Holdings"]

_KINDS = ("model", "optimizer", "scheduler", "custom")
_PROGRESS = "training"
_REMEMBERED = "remembered"


@dataclass(frozen=True, slots=True)
class Content:
    """State dicts by kind, in the order of `prepare` and of `register_for_checkpointing`.

    progress: step, number of models, seed, gradient scaler, the epoch and the positions of loaders.
    remembered: the program's own values, by name.
    frozen: for each model, names of its tensors that need no gradient.
    """

    models: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    customs: list[Any] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)
    remembered: dict[str, Any] = field(default_factory=dict)
    frozen: list[frozenset[str]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all plain tensors, which are nearly all of the bytes that will be written."""
        sizes = {tensor.data_ptr(): tensor.nbytes for _, state in self._named() for tensor in _tensors(state)}
        return sum(sizes.values())

    def ready(self, staging: Staging | None = None) -> Iterator[Part]:
        """Yield the parts, ready to be written. The tensors of one part at a time are copied to the host.

        staging: holds copies of all of them, so that the training may continue before they are written; the copies are
            complete after the last part.
        """
        is_complete = len(self.frozen) == len(self.models)  # hooks may have taken some of them out
        frozen = {numbered("model", index): names for index, names in enumerate(self.frozen) if is_complete}
        for name, state in self._named():
            to_host = on_host if staging is None else partial(staging.copy, name)
            yield Part.of(name, state, to_host, frozen.get(name, frozenset()))
        if staging is not None:
            staging.settle()

    @classmethod
    def read(cls, folder: Path, manifest: Manifest, trust: bool) -> Content:
        """Read the parts that the manifest of `folder` names, from files that are verified already.

        Raises:
            UntrustedPickle: a part is a pickle, and `trust` was not given.
            CheckpointCorrupt: a part cannot be read.
        """
        states = {name: read_part(folder, name, manifest, trust) for name in manifest.parts}

        def all_of(kind: str) -> list[Any]:
            names = (numbered(kind, index) for index in range(len(states)))
            return [states[name] for name in names if name in states]

        models, optimizers, schedulers, customs = map(all_of, _KINDS)
        return cls(models, optimizers, schedulers, customs, states.get(_PROGRESS, {}), states.get(_REMEMBERED, {}))

    def _named(self) -> Iterator[tuple[str, Any]]:
        for kind, states in zip(_KINDS, (self.models, self.optimizers, self.schedulers, self.customs), strict=True):
            yield from ((numbered(kind, index), state) for index, state in enumerate(states))
        yield _PROGRESS, self.progress
        if self.remembered:
            yield _REMEMBERED, self.remembered


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor) and state.layout is torch.strided:
        yield state
    for _, child in children(state):
        yield from _tensors(child)


@dataclass(frozen=True, slots=True)
class Holdings:
    """Numbers of objects of each kind in a checkpoint, or prepared and registered in a program."""

    models: int
    optimizers: int
    schedulers: int
    objects: int
    loaders: int

    @classmethod
    def in_checkpoint(cls, folder: Path, manifest: Manifest | None) -> Holdings | None:
        """Return those of the checkpoint in `folder`, without reading weights; None for a folder of Accelerate's."""
        if manifest is None:
            return None
        progress = read_part(folder, _PROGRESS, manifest, trust=False)
        count = Counter(part.partition("_")[0] for part in manifest.parts)
        models, loaders = progress.get("models", count["model"]), len(progress.get("loaders", ()))
        return cls(models, count["optimizer"], count["scheduler"], count["custom"], loaders)

    def __str__(self) -> str:
        counts = {kind: getattr(self, kind) for kind in self.__slots__}
        return ", ".join(f"{count} {kind.removesuffix('s') if count == 1 else kind}" for kind, count in counts.items())
