"""The mounts that a process sees, from `/proc/PID/mountinfo`, and which of them a file shield covers. Standard library.

Used by the kernel, by `shield_holder` and by ranks; the last two change their mounts with `call_libc`. An overlay suits
a local file system; others are shown as they are.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = [
    "OF_THE_SYSTEM",
    "SERVICES",
    "SeenMount",
    "call_libc",
    "is_covered",
    "is_in",
    "mount_points",
    "mount_tree",
    "read_mounts",
]

_FLAGS = {"nosuid": 2, "nodev": 4, "noexec": 8}

_LOCAL = frozenset(
    {"bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ntfs3", "overlay", "ramfs"}
    | {"reiserfs", "tmpfs", "vfat", "xfs", "zfs"}
)
_VIRTUAL = frozenset(
    {"autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"}
    | {"fuse.lxcfs", "fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs", "securityfs", "sysfs"}
    | {"tracefs"}
)
OF_THE_SYSTEM = ("/proc", "/sys", "/dev")
SERVICES = ("/run", "/tmp/nvidia-mps")
"""Folders of sockets and pipes: one that is seen through an overlay leads to no service."""


class SeenMount:
    """One mount that this process sees.

    point: its path.  kind: its file system.  options: those of the mount and of the file system.  on_top: the mounts on
    it, which are on no other.
    """

    def __init__(self, point: str, kind: str, options: Sequence[str]) -> None:
        self.point, self.kind, self.options = point, kind, options
        self.on_top: list[SeenMount] = []

    def below(self) -> Iterator[SeenMount]:
        """Yield every mount that lies below this one."""
        for mount in self.on_top:
            yield mount
            yield from mount.below()

    @property
    def flags(self) -> int:
        """Return the bits of those of its options that hold for an overlay too."""
        return sum(bit for name, bit in _FLAGS.items() if name in self.options)

    @property
    def is_shielded(self) -> bool:
        """Return whether it gets an overlay."""
        if "ro" in self.options or self.kind not in _LOCAL or is_in(self.point, OF_THE_SYSTEM):
            return False
        return self.kind != "tmpfs" or not is_in(self.point, SERVICES)

    @property
    def is_open(self) -> bool:
        """Return whether a program may keep files there, and it gets no overlay."""
        is_of_the_system = self.kind in _VIRTUAL or is_in(self.point, (*OF_THE_SYSTEM, *SERVICES))
        return not is_of_the_system and "ro" not in self.options and not self.is_shielded


def read_mounts() -> str:
    """Return the mounts of this process, a line each."""
    # Only a line feed ends a line: a path may have other characters that Python would take for an end.
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return file.read()


def mount_points(text: str) -> list[str]:
    """Return the paths of all mounts in `text`, of `read_mounts`."""
    return [mount.point for _, _, mount in _listed(text)]


def mount_tree(text: str) -> SeenMount | None:
    """Return the mount of the root folder, with all others that can be seen; None if the root folder is no mount.

    text: of `read_mounts`.
    """
    children: dict[str, list[tuple[str, SeenMount]]] = {}
    roots: list[tuple[str, SeenMount]] = []
    for number, parent, mount in _listed(text):
        if mount.point == "/":
            roots.append((number, mount))
        if number != parent:
            children.setdefault(parent, []).append((number, mount))
    return _seen(*roots[0], children) if roots else None


def _listed(text: str) -> Iterator[tuple[str, str, SeenMount]]:
    """Yield each mount with its number and that of the mount below it."""
    for line in text.split("\n"):
        if line:
            first, _, last = line.partition(" - ")
            number, parent, _, _, point, options = first.split(" ")[:6]
            kind, _, of_system = last.split(" ")[:3]
            yield number, parent, SeenMount(_unescaped(point), kind, [*options.split(","), *of_system.split(",")])


def _seen(number: str, mount: SeenMount, children: dict[str, list[tuple[str, SeenMount]]]) -> SeenMount:
    """Return the mount that is seen at the place of `mount`, with what is seen on top of it."""
    own = children.get(number, [])
    for other, covering in own:
        if covering.point == mount.point:
            return _seen(other, covering, children)
    points = [child.point for _, child in own]
    # Linux puts a mount on the topmost one: those that lie below another child of the same mount were there before it.
    mount.on_top = [
        _seen(other, child, children)
        for other, child in own
        if not any(is_in(child.point, (point,)) for point in points if point != child.point)
    ]
    return mount


def is_in(path: str, folders: Sequence[str]) -> bool:
    """Return whether `path` is one of `folders`, or lies below one.

    >>> is_in("/run/user", ["/run"]), is_in("/runs", ["/run"])
    (True, False)
    """
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _unescaped(text: str) -> str:
    r"""
    >>> _unescaped(r"/my\040data")
    '/my data'
    """
    for character in ("\t", "\n", " "):
        text = text.replace(f"\\{ord(character):03o}", character)
    return text.replace("\\134", "\\")


def is_covered(path: str, covered: Sequence[str], uncovered: Sequence[str]) -> bool:
    """Return whether an overlay lies over `path`: the longest of the folders that it is in decides.

    >>> is_covered("/home/me/data/x", ["/", "/home"], ["/home/me/data"]), is_covered("/home/me/x", ["/"], ["/proc"])
    (False, True)
    """
    longest = max((folder for folder in (*covered, *uncovered) if is_in(path, (folder,))), key=len, default="")
    return longest in covered and longest not in uncovered


def call_libc(name: str, *arguments: Any) -> None:
    """Call a function of libc, such as mount or unshare.

    Raises:
        OSError: it failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
