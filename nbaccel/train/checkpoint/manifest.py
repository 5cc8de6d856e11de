"""Manifest: the file that makes a folder a checkpoint. Written last, by rank 0; read by all.

It lists every file with its size and CRC32, and the position of the training, in plain JSON. A folder without a
complete manifest was never finished. The random states of ranks are not listed: a rank adds its own at any time,
and they are sealed themselves.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from nbaccel.errors import CheckpointCorrupt
from nbaccel.train.checkpoint.files import SideThread, checksum, read_sealed, sync, write_sealed

__all__ = ["MANIFEST", "FileRecord", "Manifest"]

MANIFEST = "manifest.json"

_SEALED_THEMSELVES = "generators_*.json"

_LAYOUT = 2
"""Version of the layout; increased when an older nbaccel could no longer read what this one writes."""

_READABLE = (1, 2)
"""Layouts that can be read. 1: without the names of runs."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksum of one file as it was written.  size: bytes.  crc32: eight hexadecimal digits."""

    size: int
    crc32: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        return cls(path.stat().st_size, checksum(path))

    def verify(self, path: Path) -> None:
        """Compare the file at `path` with this record.

        Raises:
            CheckpointCorrupt: the file is missing, or is not what was written.
        """
        if not path.is_file():
            raise CheckpointCorrupt(f"{path} is missing ({self.size} bytes)", str(path), f"{self.size} bytes", "none")
        size = path.stat().st_size
        if size != self.size:
            raise CheckpointCorrupt(
                f"{path} is damaged: it has {size} bytes, and {self.size} were written",
                str(path),
                f"{self.size} bytes",
                f"{size} bytes",
            )
        crc32 = checksum(path)
        if crc32 != self.crc32:
            raise CheckpointCorrupt(
                f"{path} is damaged: its checksum is {crc32}, it was written with {self.crc32}",
                str(path),
                self.crc32,
                crc32,
            )


def _versions() -> dict[str, str]:
    try:
        own = version("nbaccel")
    except PackageNotFoundError:  # it was imported from a folder on the path
        own = "not installed"
    return {"nbaccel": own, "torch": str(torch.__version__), "python": platform.python_version()}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Position of the training, and the files that hold it.

    stamp: names the moment of the save, equal on all ranks that took part.
    step: optimizer steps done.  epoch: iterations of the first prepared loader that are done.
    batch: batches of the current epoch that are done, of all ranks together.
    parts: names of the states that are in the files: "model", "optimizer", "custom_1".
    files: by path inside the folder; those of hooks are among them.
    saved_at: seconds since 1970, by the clock of the machine that wrote it.
    run, ancestors: as in `Lineage`; empty where an older nbaccel wrote it. The parent is the last ancestor.
    """

    stamp: str
    step: int
    epoch: int
    batch: int
    world_size: int
    settings: dict[str, Any] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=_versions)
    files: dict[str, FileRecord] = field(default_factory=dict)
    saved_at: float = field(default_factory=time.time)
    run: str = ""
    ancestors: dict[str, float] = field(default_factory=dict)

    def seal(self, folder: Path, records: Mapping[str, FileRecord] = MappingProxyType({})) -> None:
        """Flush every file in `folder` to the disk, list those that are not sealed, and write the manifest.

        records: records of files that were checksummed while they were written, by name.
        """
        paths = sorted(folder.rglob("*"))
        with SideThread("nbaccel-sync") as disk:  # checksums are computed while the disk writes
            synced = disk.map(sync, paths)
            listed = [path for path in paths if path.is_file() and not path.match(_SEALED_THEMSELVES)]
            listed = [path for path in listed if path != folder / MANIFEST]  # of an earlier checkpoint in this folder
            names = [path.relative_to(folder).as_posix() for path in listed]
            files = {name: records.get(name) or FileRecord.of(folder / name) for name in names}
            list(synced)  # raises what it raised
        write_sealed(folder / MANIFEST, {"layout": _LAYOUT, **asdict(self), "files": _as_json(files)})
        sync(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of `folder`; the files that it lists are not read.

        Raises:
            CheckpointCorrupt: there is none, it is damaged, or a newer nbaccel wrote it.
        """
        try:
            content = read_sealed(folder / MANIFEST)
        except FileNotFoundError:
            raise CheckpointCorrupt(
                f"{folder / MANIFEST} is missing: the folder was never finished, or is no checkpoint",
                str(folder / MANIFEST),
                "a manifest",
                "none",
            ) from None
        layout = content.pop("layout")
        if layout not in _READABLE:
            raise CheckpointCorrupt(
                f"{folder / MANIFEST} has layout {layout}, and this nbaccel reads layout {_LAYOUT} and older: it "
                f"was written by nbaccel {content.get('versions', {}).get('nbaccel', '?')}, load it with that version",
                str(folder / MANIFEST),
                f"layout {_LAYOUT}",
                f"layout {layout}",
            )
        return cls(**{**content, "files": {name: FileRecord(**record) for name, record in content["files"].items()}})

    def verify(self, folder: Path) -> None:
        """Compare every listed file with its record, the smallest first.

        Raises:
                CheckpointCorrupt: names the first file that differs.
        """
        for name, record in sorted(self.files.items(), key=lambda item: item[1].size):
            record.verify(folder / name)


def _as_json(files: dict[str, FileRecord]) -> dict[str, dict[str, Any]]:
    return {name: asdict(record) for name, record in files.items()}
