"""File that makes a folder a checkpoint, the records that detect damage, and the run's name. Runs in ranks.

The `Manifest` is written last, by rank 0, and read by all. It lists every file with its size and CRC32, and the
position of the training, in plain JSON. A folder without a complete manifest was never finished. `Manifest.seal` makes
a checkpoint durable: it flushes every file, then the manifest, then the folder to the disk; after that `atomic_folder`
gives the folder its name. The random states of ranks are not in the list, since a rank may add its own later; their
files are sealed. A *sealed* JSON file contains the CRC32 of its own content. CRC32 (6.8 GiB/s here, SHA-256 1.9)
detects damage, not malice: against malice, pickles are never loaded. `Lineage` records which run has written a
checkpoint, and which runs it continues.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import platform
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import torch

from nbaccel.base.values import frozen
from nbaccel.errors import CheckpointCorrupt

__all__ = [
    "MANIFEST",
    "OF_A_CELL",
    "FileRecord",
    "Lineage",
    "Manifest",
    "SideThread",
    "Stamp",
    "aside",
    "checksum",
    "names_added",
    "read_sealed",
    "sync",
    "write_sealed",
]

MANIFEST = "manifest.json"

OF_A_CELL = "cell"
"""The only part of a checkpoint of a loop that prepares nothing, which a feature writes."""

_SEALED_THEMSELVES = "generators_*.json"

_LAYOUT = 3
"""Version of the layout; increased when an older nbaccel could no longer read what this one writes."""

_LAYOUT_WITHOUT_SHARDS = 2
"""Layout of a checkpoint that one rank has written, which an older nbaccel reads too."""

_READABLE = (1, 2, 3)
"""Layouts that can be read. 1: without the names of runs. 2: without shards."""


@frozen
class FileRecord:
    """Size and checksum of one file as it was written.

    Args:
        size: Bytes.
        crc32: Eight hexadecimal digits.
    """

    size: int
    crc32: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        return cls(path.stat().st_size, checksum(path))

    def verify(self, path: Path) -> None:
        """Compare the file at `path` with this record.

        Raises:
            CheckpointCorrupt: The file is missing, or is not what was written.
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


@frozen
class Stamp:
    """The name of one save, equal on all ranks that take part, without communication.

    Args:
        step: Optimizer steps done.
        position: Batches of an open accumulation window.
        run: The name of the run.
        save: Distinguishes it from other saves at that moment, where the folder's name does not.
    """

    step: int
    position: int
    run: str
    save: str = ""

    def __str__(self) -> str:
        moment = f"step {self.step} + {self.position} of run {self.run or '?'}"
        return f"{moment}, {self.save}" if self.save else moment


@frozen
class Manifest:
    """Position of the training, and the files that hold it.

    Args:
        stamp: Names the moment of the save, equal on all ranks that took part.
        step: Optimizer steps done.
        epoch: Iterations of the first prepared loader that are done.
        batch: Batches of the current epoch that are done, of all ranks together.
        parts: Names of the states that are in the files: "model", "optimizer", "custom_1".
        files: By path inside the folder; those of hooks are among them.
        saved_at: Seconds since 1970, by the clock of the machine that wrote it.
        run, ancestors: As in `Lineage`; empty where an older nbaccel wrote it. The parent is the last ancestor.
        shards: For each part, and each of its tensors that several ranks have written, ``{"shape": [11, 4], "dtype":
            "torch.float32", "boxes": [[file, offset, shape], ...]}``: which box of the tensor is in which file.
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
    shards: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def seal(self, folder: Path, records: Mapping[str, FileRecord] = MappingProxyType({})) -> None:
        """Flush every file in `folder` to the disk, list those that are not sealed, and write the manifest.

        Args:
            records: Records of files that were checksummed while they were written, by name.
        """
        paths = sorted(folder.rglob("*"))
        with SideThread("nbaccel-sync") as disk:  # checksums are computed while the disk writes
            synced = disk.map(sync, paths)
            listed = [path for path in paths if path.is_file() and not path.match(_SEALED_THEMSELVES)]
            listed = [path for path in listed if path != folder / MANIFEST]  # of an earlier checkpoint in this folder
            names = [path.relative_to(folder).as_posix() for path in listed]
            files = {name: records.get(name) or FileRecord.of(folder / name) for name in names}
            list(synced)  # raises what it raised
        content = {**asdict(self), "files": _as_json(files)}
        if not self.shards:
            del content["shards"]
        write_sealed(folder / MANIFEST, {"layout": _LAYOUT if self.shards else _LAYOUT_WITHOUT_SHARDS, **content})
        sync(folder)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of `folder`; the files that it lists are not read.

        Raises:
            CheckpointCorrupt: There is none, it is damaged, or a newer nbaccel wrote it.
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
            CheckpointCorrupt: Names the first file that differs.
        """
        for name, record in sorted(self.files.items(), key=lambda item: item[1].size):
            record.verify(folder / name)


def _as_json(files: dict[str, FileRecord]) -> dict[str, dict[str, Any]]:
    return {name: asdict(record) for name, record in files.items()}


_P = ParamSpec("_P")
_T = TypeVar("_T")

_CHUNK_BYTES = 1 << 20

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of file systems that cannot sync a folder (FUSE, network drives); there only the rename is possible."""


class SideThread(ThreadPoolExecutor):
    """One thread that works beside the thread that made it; where no thread can be started, the caller does the work.

    Python 3.12.0 and 3.12.1 start none once a program is at its end, where its last checkpoint may still be written.
    """

    def __init__(self, name: str) -> None:
        super().__init__(1, name)
        self._has_thread = True

    def submit(self, function: Callable[_P, _T], /, *args: _P.args, **options: _P.kwargs) -> Future[_T]:
        if self._has_thread:
            try:
                return super().submit(function, *args, **options)
            except RuntimeError:
                self._has_thread = False  # the work stays in a queue that nothing reads from here on
        done: Future[_T] = Future()
        try:
            done.set_result(function(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


def aside(target: Path, pattern: str) -> Iterator[Path]:
    """Yield paths beside `target` with names such as ``.<name>.tmp-17``; `pattern` is the part after the name."""
    return target.parent.glob(f".{glob.escape(target.name)}.{pattern}")


def names_added(folder: Path) -> set[str]:
    """Return the names of files that other ranks' hooks have added to the checkpoint `folder` after its manifest."""
    names: set[str] = set()
    for path in folder.glob(_SEALED_THEMSELVES):
        with suppress(OSError, CheckpointCorrupt):
            names.update(map(str, read_sealed(path).get("files", ())))
    return names


def checksum(path: Path) -> str:
    """Return the CRC32 of the file, eight hexadecimal digits."""
    crc, buffer = 0, bytearray(_CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
    return f"{crc:08x}"


# A file that is flushed may lack its entry in the folder: http://manpages.ubuntu.com/manpages/dapper/man2/fsync.2.html.
def sync(path: Path) -> None:
    """Wait until the disk has the file, or the folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_FOLDER_SYNC):
            raise
    finally:
        os.close(descriptor)


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write `content` with its checksum; it is on the disk when this returns."""
    path.write_text(json.dumps({**content, "crc32": _crc(content)}, indent=1), encoding="utf-8")
    sync(path)


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what `write_sealed` was given.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointCorrupt: The file is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        expected = content.pop("crc32")
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {error}", str(path), "sealed JSON", str(error)) from error
    got = _crc(content)
    if got != expected:
        raise CheckpointCorrupt(
            f"{path} is damaged: its checksum is {got}, it was written with {expected}", str(path), str(expected), got
        )
    return dict(content)


def _crc(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def _new_name() -> str:
    return secrets.token_hex(6)


@dataclass(slots=True)
class Lineage:
    """One run of a program, and the runs that it continues.

    A run counts, replaces and deletes only checkpoints of its own and of the runs that it continues, up to the
    checkpoint that it has loaded. It does not touch what another run has saved in the same folder: neither what the
    same program saved when it was started before, nor what another continuation of the same checkpoint saves.

    Args:
        run: Its name. Before the ranks have agreed on one, each has a name of its own.
        ancestors: The names of those runs, the latest last, each with the time when the checkpoint that was continued
            was saved, in seconds since 1970.
        is_agreed: Every rank has this name.
        turns: How often the run went back to an earlier step, equally on all ranks: it repeats steps then.
    """

    run: str = field(default_factory=_new_name)
    ancestors: Mapping[str, float] = field(default_factory=dict)
    is_agreed: bool = False
    turns: int = 0

    def agree(self, run: str) -> None:
        """Take the name on which all ranks agree."""
        self.run, self.is_agreed = run, True

    def follow(self, loaded: Manifest | None) -> None:
        """Continue from a checkpoint.

        Args:
            loaded: Its manifest; None for a folder of Accelerate's, which names no run.
        """
        self.turns += 1
        if loaded is None:
            self.ancestors = {}
        elif loaded.run != self.run:  # otherwise the run went back to an earlier checkpoint of its own
            parent = {loaded.run: loaded.saved_at} if loaded.run else {}
            self.ancestors = {**loaded.ancestors, **parent}

    def holds(self, saved: Manifest) -> bool:
        """Return whether the checkpoint with this manifest is of this run, or one that led to it.

        Example:
            >>> first = Manifest("step 1", 1, 0, 0, 1, run="a", saved_at=10.0)
            >>> later = Manifest("step 2", 2, 0, 0, 1, run="a", saved_at=20.0)
            >>> lineage = Lineage("b")
            >>> lineage.follow(first)
            >>> lineage.holds(first), lineage.holds(later)
            (True, False)
        """
        if saved.run == self.run:
            return True
        until = self.ancestors.get(saved.run)
        return until is not None and saved.saved_at <= until
