"""What becomes of a folder when a session ends is said as the platforms do it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nbaccel.base.hardware import Platform
from nbaccel.base.storage import Storage

COLAB = [("/", "overlay"), ("/dev/shm", "tmpfs"), ("/content/drive", "fuse.drive")]
KAGGLE = [("/", "overlay"), ("/kaggle/input", "overlay"), ("/kaggle/working", "ext4")]
DESKTOP = [("/", "ext4"), ("/mnt/usb", "fuseblk"), ("/mnt/usb", "vfat"), ("/home/me", "nfs4")]


@pytest.mark.parametrize(
    ("platform", "table", "folder", "outlives", "reason"),
    [
        (Platform.KAGGLE, KAGGLE, "/kaggle/working/runs", True, '"Save Version"'),
        (Platform.KAGGLE_BATCH, KAGGLE, "/kaggle/working/runs", True, "the output of this version"),
        (Platform.KAGGLE, KAGGLE, "/tmp/runs", False, "keeps nothing but /kaggle/working"),
        (Platform.COLAB, COLAB, "/content/runs", False, "mount Google Drive"),
        (Platform.COLAB, COLAB, "/content/drive/MyDrive/runs", True, "a mounted drive (fuse.drive)"),
        (Platform.COLAB, COLAB, "/content/drives", False, "mount Google Drive"),
        (Platform.COLAB, COLAB, "/dev/shm/runs", False, "in memory (tmpfs)"),
        (Platform.JUPYTER, DESKTOP, "/tmp/runs", False, "temporary folders are emptied"),
        (Platform.JUPYTER, DESKTOP, "/home/me/runs", True, "a disk of this machine (nfs4)"),
        (Platform.SCRIPT, COLAB, "/root/runs", False, "inside of the container (overlay)"),
        (Platform.SCRIPT, [], "/root/runs", True, "a disk of this machine"),
    ],
)
def test_the_fate_of_a_folder(
    platform: Platform, table: list[tuple[str, str]], folder: str, outlives: bool, reason: str
) -> None:
    storage = Storage.of(Path(folder), lambda: [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in table])
    fate = storage.fate(platform)
    assert fate.outlives == outlives
    assert reason in str(fate)


@pytest.mark.parametrize(
    ("kind", "is_drive"),
    [("fuse.drive", True), ("fuse", True), ("fuse.rclone", True), ("fuseblk", False), ("fuse.fuse-overlayfs", False)],
)
def test_what_counts_as_a_mounted_drive(kind: str, is_drive: bool) -> None:
    assert Storage(Path("/"), kind).is_drive == is_drive


def test_of_two_mounts_on_one_place_the_later_one_is_seen() -> None:
    mounts = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in DESKTOP]
    assert Storage.of(Path("/mnt/usb/runs"), lambda: mounts).kind == "vfat"


def test_the_real_table_knows_memory() -> None:
    assert Storage.of(Path("/dev/shm")).kind == "tmpfs"


def test_without_a_table_of_mounts_a_folder_is_on_some_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(all: bool) -> None:
        raise PermissionError(13, "Permission denied", "/proc/self/mounts")

    monkeypatch.setattr(psutil, "disk_partitions", forbidden)
    assert Storage.of(Path("/dev/shm")) == Storage(Path("/dev/shm"), "")
