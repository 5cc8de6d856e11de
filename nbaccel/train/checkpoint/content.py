"""Content: what one checkpoint holds, between the prepared objects and the files. Runs in ranks.

It is only data: state dicts, and `progress`, which says where the training stood. Which objects they belong to,
and whether their numbers fit, is `Prepared`'s and `Checkpointing`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbaccel.train.checkpoint.packing import Packed
from nbaccel.train.checkpoint.parts import count_parts, numbered, pack_part, read_part, write_part

__all__ = ["Content", "PackedContent"]

_PROGRESS = "training"


@dataclass(frozen=True, slots=True)
class Content:
    """State dicts by kind, in the order of `prepare` and of `register_for_checkpointing`.

    progress: step, seed, gradient scaler and the positions of loaders; empty keys stay as they are.
    """

    models: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    customs: list[Any] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> PackedContent:
        """Ready for the disk; device memory is copied to the host here."""
        parts = {name: (state, *pack_part(state)) for name, state in self._named()}
        return PackedContent(
            {name: (state, packed) for name, (state, packed, _) in parts.items()},
            [reason for _, _, reason in parts.values() if reason],
        )

    @classmethod
    def read(cls, folder: Path, trust: bool) -> Content:
        """What was written into `folder`, whose files were verified already.

        Raises:
            UntrustedPickle: a part is a pickle, and `trust` was not given.
            CheckpointCorrupt: a part cannot be read.
        """

        def all_of(name: str) -> list[Any]:
            return [read_part(folder, numbered(name, index), trust) for index in range(count_parts(folder, name))]

        return cls(
            all_of("model"),
            all_of("optimizer"),
            all_of("scheduler"),
            all_of("custom"),
            read_part(folder, _PROGRESS, trust=False),
        )

    def _named(self) -> Iterator[tuple[str, Any]]:
        kinds = {
            "model": self.models,
            "optimizer": self.optimizers,
            "scheduler": self.schedulers,
            "custom": self.customs,
        }
        for name, states in kinds.items():
            yield from ((numbered(name, index), state) for index, state in enumerate(states))
        yield _PROGRESS, self.progress


@dataclass(frozen=True, slots=True)
class PackedContent:
    """A content on the host, ready to be written.

    parts: name to the state, and the state packed (None: only a pickle can hold it).
    reasons: for each part that has to be a pickle, why.
    """

    parts: dict[str, tuple[Any, Packed | None]]
    reasons: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, which is nearly all of the checkpoint."""
        packed = [packed for _, packed in self.parts.values() if packed is not None]
        return sum(tensor.nbytes for one in packed for tensor in one.tensors.values())

    def write(self, folder: Path) -> None:
        for name, (state, packed) in self.parts.items():
            write_part(folder, name, state, packed)
