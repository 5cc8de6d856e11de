"""Place: finds the folder of a checkpoint inside the folder that a program names. Runs in ranks; writes nothing.

A checkpoint replaces its folder as a whole, so that folder must hold nothing else: ``save_state("checkpoints/")``
may not delete ``checkpoints/epoch_0`` or the user's notes. In a folder with other things in it, and in one
that cannot be renamed, the checkpoint is a subfolder; `load_state` looks there too.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from nbaccel.errors import CheckpointCorrupt
from nbaccel.train.checkpoint.manifest import Manifest

__all__ = ["OURS", "SUBFOLDER", "place_for", "place_of"]

SUBFOLDER = "nbaccel_checkpoint"

OURS = re.compile(
    r"(model|optimizer|scheduler|custom)(_\d+)?(\.frozen)?\.(json|safetensors|pkl)|(training|remembered|manifest|generators_\d+)\.json"
    rf"|\.{SUBFOLDER}\..*"
)
"""Names of files in a checkpoint's folder, without the files of hooks."""

_NOBODYS = re.compile(r"\.ipynb_checkpoints|\.DS_Store|__pycache__")
"""Names that Jupyter and operating systems create in any folder that was opened."""


def place_for(folder: str | os.PathLike[str]) -> Path:
    """Return the folder that a checkpoint replaces when the program names `folder`. Links and ``~`` are followed."""
    named = Path(folder).expanduser().resolve()
    if (named / SUBFOLDER).exists() or os.path.ismount(named) or _holds_other_things(named):
        return named / SUBFOLDER
    return named


def place_of(folder: str | os.PathLike[str]) -> Path:
    """Return the folder to load from when the program names `folder`."""
    named = Path(folder).expanduser()
    return named / SUBFOLDER if (named / SUBFOLDER).exists() else named


def _holds_other_things(folder: Path) -> bool:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    strange = {name for name in names if not (OURS.fullmatch(name) or _NOBODYS.fullmatch(name))}
    return bool(strange) and not strange <= _listed(folder)


def _listed(folder: Path) -> set[str]:
    """Return the names that the manifest of a checkpoint in `folder` lists, files of hooks included."""
    for _ in range(2):  # rank 0 may be replacing the folder right now
        with suppress(CheckpointCorrupt):
            return {Path(name).parts[0] for name in Manifest.read(folder).files}
    return set()
