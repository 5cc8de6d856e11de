"""Signs that a person is at the notebook: a front end that can be asked, no program that executes it. In the kernel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nbaccel.base.hardware import Platform

__all__ = ["can_answer", "runs_unattended"]


_UNATTENDED = ("nbconvert", "papermill", "jupyter-execute")


def can_answer(shell: Any) -> bool:
    """Return whether the front end that sent the running cell can be asked for input.

    Front ends say so, and programs that execute notebooks say that they cannot.
    """
    parent = getattr(shell, "parent_header", None) or {}
    return bool(parent.get("content", {}).get("allow_stdin"))


def runs_unattended(platform: Platform, parent: int | None = None, root: Path = Path("/")) -> bool:
    """Return whether a program executes the notebook from its first cell to its last, with no person watching.

    Kaggle states it; kernels of nbconvert, papermill and `jupyter execute` are their children.

    Args:
        parent: Process id, by default that of this process's parent.
        root: Replaces the root of the file system, in tests.
    """
    if platform is Platform.KAGGLE_BATCH:
        return True
    try:
        with open(f"{root}/proc/{parent or os.getppid()}/cmdline", "rb", buffering=0) as file:
            command = file.read().decode(errors="replace")
    except OSError:  # no Linux
        return False
    words = [os.path.basename(word) for word in command.split("\0")[:4]]  # python -m nbconvert --execute
    return any(name in word for word in words for name in _UNATTENDED)
