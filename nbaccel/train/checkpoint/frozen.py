"""Frozen weights: stores weights without gradient on the disk once, however many checkpoints hold them. In rank 0.

Adapters are trained on a base that does not change, and is most of the bytes. Its tensors have a file of their own,
``model.frozen.safetensors``. When the checkpoint before has the very same file, by size and checksum, the file gets a
second name in the new folder (a hard link): each folder is complete by itself, may be copied or deleted alone, and is
verified by its manifest like any other. Where links do not work (another disk, a mounted drive) the file is written
again.

Not covered: damage to the shared file is damage to all folders that share it. The next save detects it, since it reads
the file before it links it, and writes a good one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from nbaccel.errors import CheckpointCorrupt
from nbaccel.train.checkpoint.manifest import FileRecord
from nbaccel.train.checkpoint.tensors import record_of, write_tensors

__all__ = ["frozen_file", "shareable_bytes", "write_once"]

_SUFFIX = ".frozen.safetensors"


def frozen_file(part: str) -> str:
    """Return the name of the file with the frozen tensors of `part`."""
    return part + _SUFFIX


def write_once(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], earlier: Path | None
) -> FileRecord:
    """Write as `write_tensors` does; but if the checkpoint `earlier` has the same file, make `path` a link to it."""
    if earlier is not None and (earlier / path.name).is_file():
        record = record_of(tensors, metadata)
        with suppress(CheckpointCorrupt, OSError):  # other content, or a file system without links
            record.verify(earlier / path.name)
            os.link(earlier / path.name, path)
            return record
    return write_tensors(path, tensors, metadata)


def shareable_bytes(earlier: Path | None, folder: Path) -> int:
    """Return the bytes of frozen files in `earlier` for which a new checkpoint in `folder` may need no space."""
    if earlier is None or not (earlier.is_dir() and folder.is_dir()) or earlier.stat().st_dev != folder.stat().st_dev:
        return 0
    return sum(path.stat().st_size for path in earlier.glob(f"*{_SUFFIX}"))
