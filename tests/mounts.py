"""File systems of a test's own: mounted in a child that has its own table of mounts, and gone with it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nbaccel.testing import run_ranks

_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 1, 32, 1 << 14, 1 << 18


def on_small_disk(folder: Path, size_bytes: int, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a child in which `folder` is a disk of `size_bytes`; skips where none may be mounted."""

    def run() -> Any:
        try:
            _checked("unshare", _CLONE_NEWNS)
            _checked("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
            _checked("mount", b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size_bytes}".encode())
        except PermissionError as error:
            return False, str(error)
        return True, function(*args)

    was_mounted, value = run_ranks(1, run)[0]
    if not was_mounted:
        pytest.skip(f"this process may not mount a file system: {value}")
    return value


def make_read_only(folder: Path) -> None:
    """In such a child: `folder` can no longer be written to, also by root."""
    _checked("mount", None, bytes(folder), None, _MS_REMOUNT | _MS_RDONLY, None)


def _checked(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
