"""Storage: the kind of file system of a folder, and whether files there outlive the session.

Runs in the kernel, in scripts and in ranks; it only reads. A platform cannot be asked what it does with its disks after
a session, so it is written here, as of 2026. Not covered: the amount of free space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from nbaccel.base.hardware import Platform
from nbaccel.base.values import frozen

__all__ = ["Fate", "Storage"]

_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_CONTAINER_LAYERS = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
_KAGGLE_OUTPUT = Path("/kaggle/working")
_TEMPORARY = (Path("/tmp"), Path("/var/tmp"))


class Mount(Protocol):
    """One row of the table of mounts, as `psutil` returns it."""

    @property
    def mountpoint(self) -> str: ...
    @property
    def fstype(self) -> str: ...


def _mounts() -> Iterable[Mount]:
    """Return the table of mounts; empty if it may not be read."""
    import psutil

    rows: list[Mount] = []
    with suppress(OSError):
        rows += psutil.disk_partitions(all=True)
    return rows


@frozen
class Fate:
    """The fate of files at the end of a session.

    Args:
        outlives: Files stay.
        reason: Why, or under which condition; half a sentence.
    """

    outlives: bool
    reason: str

    def __str__(self) -> str:
        return f"{'outlives' if self.outlives else 'does NOT outlive'} the session: {self.reason}"


@frozen
class Storage:
    """The file system of one folder, which may not exist yet.

    Args:
        folder: Absolute, links followed.
        kind: The kind of its file system, "ext4" or "fuse.drive"; "" if it is not in the table.
    """

    folder: Path
    kind: str

    @classmethod
    def of(cls, folder: Path, mounts: Callable[[], Iterable[Mount]] = _mounts) -> Storage:
        """Return the storage of the innermost mount that contains `folder`; of several on one place the last one.

        Example:
            >>> Storage.of(Path("/dev/shm/runs")).kind
            'tmpfs'
        """
        resolved = folder.expanduser().resolve()
        kind, depth = "", 0
        for mount in mounts():
            point = Path(mount.mountpoint)
            if resolved.is_relative_to(point) and len(point.parts) >= depth:
                kind, depth = mount.fstype, len(point.parts)
        return cls(resolved, kind)

    @property
    def is_drive(self) -> bool:
        """Return whether it is a cloud drive that is mounted as a folder, such as Google Drive on Colab.

        Such drives put deleted files into a trash, which counts as used space.
        """
        is_fuse = self.kind == "fuse" or self.kind.startswith("fuse.")
        return is_fuse and self.kind not in _CONTAINER_LAYERS

    def fate(self, platform: Platform) -> Fate:
        """Return what happens to files in the folder when a session on `platform` ends.

        Example:
            >>> print(Storage(Path("/content/runs"), "overlay").fate(Platform.COLAB))
            does NOT outlive the session: Colab deletes its machine; mount Google Drive, and save there
        """
        if self.is_drive:
            return Fate(True, f"it is on a mounted drive ({self.kind})")
        if self.kind in _IN_MEMORY:
            return Fate(False, f"it is in memory ({self.kind})")
        if platform is Platform.COLAB:
            return Fate(False, "Colab deletes its machine; mount Google Drive, and save there")
        if platform in (Platform.KAGGLE, Platform.KAGGLE_BATCH):
            return self._fate_on_kaggle(platform)
        if any(self.folder.is_relative_to(place) for place in _TEMPORARY):
            return Fate(False, "temporary folders are emptied, at the latest when the machine starts again")
        if self.kind in _CONTAINER_LAYERS:
            return Fate(False, f"it is inside of the container ({self.kind}); save to a mounted volume")
        return Fate(True, f"it is on a disk of this machine{f' ({self.kind})' if self.kind else ''}")

    def _fate_on_kaggle(self, platform: Platform) -> Fate:
        if not self.folder.is_relative_to(_KAGGLE_OUTPUT):
            return Fate(False, f"Kaggle keeps nothing but {_KAGGLE_OUTPUT}")
        if platform is Platform.KAGGLE_BATCH:
            return Fate(True, f"Kaggle keeps {_KAGGLE_OUTPUT} as the output of this version")
        return Fate(True, f'Kaggle keeps {_KAGGLE_OUTPUT} with "Save Version", as the output of that version')
