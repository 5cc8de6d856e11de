"""Frozen weights: what needs no gradient is on the disk once, however many checkpoints hold it. Runs in rank 0.

Adapters are trained on a base that stays as it is, and is most of the bytes. Its tensors have a file of their own,
``model.frozen.safetensors``. When the checkpoint before has the very same file, by size and checksum, it gets a second
name in the new folder (a hard link): each folder is whole by itself, may be copied or deleted alone, and is verified
by its manifest like any other. Where links do not work (another disk, a mounted drive) the file is written again.

Not covered: damage to the shared file is damage to all folders that share it. The next save finds it, since it reads
what it is about to link, and writes a good one.
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
    """The name of the file with the frozen tensors of `part`."""
    return part + _SUFFIX


def write_once(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], earlier: Path | None
) -> FileRecord:
    """As `write_tensors`; but where the checkpoint `earlier` holds the same file, `path` becomes a link to it."""
    if earlier is not None and (earlier / path.name).is_file():
        record = record_of(tensors, metadata)
        with suppress(CheckpointCorrupt, OSError):  # other content, or a file system without links
            record.verify(earlier / path.name)
            os.link(earlier / path.name, path)
            return record
    return write_tensors(path, tensors, metadata)


def shareable_bytes(earlier: Path | None, folder: Path) -> int:
    """Bytes of the frozen files in the checkpoint `earlier` that a new one in `folder` may need no space for."""
    if earlier is None or not (earlier.is_dir() and folder.is_dir()) or earlier.stat().st_dev != folder.stat().st_dev:
        return 0
    return sum(path.stat().st_size for path in earlier.glob(f"*{_SUFFIX}"))
