"""Files that hooks write for a checkpoint in other ranks than the one that writes it. Runs in every rank.

Rank 0's hooks write into the unfinished folder. Those of another rank get a folder of their own beside it, since the
checkpoint's name belongs to an older checkpoint or to none until rank 0 commits, and whatever stands there then is
replaced. As with `rng_files` nobody waits: whoever is second of the rank and rank 0's commit moves the files in. Of a
file that several ranks write under one name, rank 0's stays.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbaccel.errors import CheckpointCorrupt
from nbaccel.train.checkpoint.manifest import Manifest, Stamp, aside, names_added, sync

__all__ = [
    "adopt",
    "collected",
    "move_in",
]


@contextmanager
def collected(target: Path, rank: int, stamp: Stamp) -> Iterator[Path]:
    """Yield an empty folder for files of this rank; they wait for the commit of `target` when the block ends."""
    waiting = _waiting(target, rank, stamp)
    unfinished = waiting.with_name(f"{waiting.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a killed program
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        found = sorted(unfinished.rglob("*"))
        for path in found:
            sync(path)
        if found:
            shutil.rmtree(waiting, ignore_errors=True)
            os.rename(unfinished, waiting)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def move_in(
    target: Path, rank: int, stamp: Stamp, committed: Callable[[str], Path | None] = lambda stamp: None
) -> list[str]:
    """Move the files of this rank into the checkpoint, if rank 0 has committed it; return their names at its top.

    Args:
        committed: See `rng_files.add`.
    """
    waiting = _waiting(target, rank, stamp)
    if not waiting.exists():
        return []
    names = sorted(path.name for path in waiting.iterdir())
    with suppress(CheckpointCorrupt):
        if Manifest.read(target).stamp == str(stamp):
            _move(waiting, target)
            return names
    if (place := committed(str(stamp))) is not None:
        _move(waiting, place)
    return names


def adopt(target: Path, stamp: Stamp, folder: Path | None = None) -> None:
    """Move in the files that wait for `target`, and delete those of earlier saves. Runs in the rank that writes it.

    Args:
        folder: The unfinished folder that becomes `target`; None after the commit.
    """
    ending = f"hooks*.step{stamp.step}.{_digest(stamp)}"
    elsewhere = target.parent.glob(f".*.{ending}") if stamp.save else ()  # a rank may have expected another name
    for waiting in sorted({*aside(target, ending), *elsewhere}):
        _move(waiting, target if folder is None else folder)
    if folder is not None:
        _carry(target, folder, stamp)
    for waiting in aside(target, "hooks*.step*"):
        step = waiting.name.rpartition(".step")[2].partition(".")[0]
        if step.isdecimal() and int(step) < stamp.step:
            shutil.rmtree(waiting, ignore_errors=True)


def _carry(target: Path, folder: Path, stamp: Stamp) -> None:
    """Copy what hooks of other ranks have added to `target`, which `folder` replaces, if it is of the same moment."""
    with suppress(CheckpointCorrupt):
        if Manifest.read(target).stamp != str(stamp):
            return
        for name in names_added(target):
            for path in sorted([target / name, *(target / name).rglob("*")]):
                place = folder / path.relative_to(target)
                if path.is_file() and not place.exists():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, place)


def _waiting(target: Path, rank: int, stamp: Stamp) -> Path:
    return target.with_name(f".{target.name}.hooks{rank}.step{stamp.step}.{_digest(stamp)}")


def _digest(stamp: Stamp) -> str:
    return f"{zlib.crc32(str(stamp).encode()):08x}"


def _move(waiting: Path, folder: Path) -> None:
    for path in sorted(waiting.rglob("*")):
        place = folder / path.relative_to(waiting)
        if path.is_dir():
            place.mkdir(exist_ok=True)
        elif not place.exists():
            with suppress(FileNotFoundError):  # the other side was quicker
                os.rename(path, place)
    shutil.rmtree(waiting, ignore_errors=True)
    with suppress(FileNotFoundError):  # it is replaced already
        sync(folder)
