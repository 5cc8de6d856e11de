"""The files of random states in a checkpoint: one sealed JSON file for each rank. Runs in every rank.

`generators` reads and restores the states themselves.

The ranks do not wait for each other. Rank 0 commits the folder; rank r may be earlier or later. Rank r first
writes its file beside the folder's name, then checks whether the folder has been committed by this very save (equal
stamps); if so, it moves its file in. Rank 0, after its commit, moves in the files that it finds beside. Whichever is
second sees the other's work. A file with another stamp belongs to another save and is not used.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nbaccel.errors import CheckpointCorrupt
from nbaccel.train.checkpoint.generators import State
from nbaccel.train.checkpoint.manifest import Manifest, Stamp, aside, read_sealed, sync, write_sealed

__all__ = [
    "add",
    "adopt",
    "carry",
    "drop_outdated",
    "find",
    "write",
]

_WAITING = r"\.rank(?P<rank>\d+)\.step(?P<step>\d+)$"


def write(folder: Path, rank: int, stamp: str, state: State) -> str:
    """Write `rank`'s file into `folder`, which is still being written; return the file's name."""
    write_sealed(folder / _name(rank), {"stamp": stamp, "rank": rank, **state})
    return _name(rank)


def carry(target: Path, folder: Path, stamp: str) -> None:
    """Copy into `folder`, about to replace `target`, the files that ranks added to `target` when the stamps are equal.

    A program that was started again and saves at the same step as before has such a `target`.
    """
    if _stamp_of(target) == stamp:
        for path in target.glob(_name("*")):
            if not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


def add(
    target: Path,
    rank: int,
    stamp: Stamp,
    state: State,
    names: Sequence[str] = (),
    committed: Callable[[str], Path | None] = lambda stamp: None,
) -> None:
    """Add `rank`'s file to the checkpoint `target`, which rank 0 commits earlier or later, or never.

    Args:
        names: Files of the rank's hooks, which the manifest does not list where they came after it.
        committed: Finds the checkpoint of a stamp under another name, where rank 0 chooses the name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    waiting = _waiting(target, rank, stamp.step)
    unfinished = waiting.with_suffix(".unfinished")
    files = {"files": list(names)} if names else {}
    write_sealed(unfinished, {"stamp": str(stamp), "rank": rank, **files, **state})
    os.rename(unfinished, waiting)
    if _stamp_of(target) == str(stamp):
        _move_in(waiting, target, rank)
    elif (place := committed(str(stamp))) is not None:
        _move_in(waiting, place, rank)


def adopt(target: Path, stamp: Stamp) -> None:
    """Move in the files that wait for the commit, and delete those of earlier saves. Runs in rank 0, after its commit.

    With a stamp that names the save, files beside other names are found too: another rank may have expected another
    name.
    """
    elsewhere = target.parent.glob(f".*.rank*.step{stamp.step}") if stamp.save else ()
    for waiting in {*aside(target, "rank*.step*"), *elsewhere}:
        said = re.search(_WAITING, waiting.name)
        if said is None:
            continue
        rank, step = int(said["rank"]), int(said["step"])
        if step == stamp.step and _read(waiting).get("stamp") == str(stamp):
            _move_in(waiting, target, rank)
        elif step < stamp.step:  # so it is beside this very name
            waiting.unlink(missing_ok=True)


def drop_outdated(place: Path, step: int) -> None:
    """Delete files of saves before `step` whose checkpoint is gone, since their ranks came too late. Runs in rank 0."""
    for waiting in place.glob(".*.rank*.step*"):
        said = re.search(_WAITING, waiting.name)
        if said is not None and int(said["step"]) < step and not (place / waiting.name[1 : said.start()]).exists():
            waiting.unlink(missing_ok=True)


def find(target: Path, rank: int, manifest: Manifest) -> tuple[State | None, str]:
    """Return the state of `rank` at that save; or None and the reason."""
    inside = target / _name(rank)
    for path in (inside, _waiting(target, rank, manifest.step)):
        try:
            state = read_sealed(path)
        except FileNotFoundError:
            continue
        except CheckpointCorrupt as error:
            return None, str(error)
        if state["stamp"] == manifest.stamp:
            return state, ""
    return None, f"{inside} is missing" if not inside.exists() else f"{inside} is of another save"


def _name(rank: int | str) -> str:
    return f"generators_{rank}.json"


def _waiting(target: Path, rank: int, step: int) -> Path:
    return target.with_name(f".{target.name}.rank{rank}.step{step}")


def _move_in(waiting: Path, target: Path, rank: int) -> None:
    try:
        os.rename(waiting, target / _name(rank))
        sync(target)
    except FileNotFoundError:
        pass  # the other side was quicker, or the checkpoint is replaced already


def _stamp_of(target: Path) -> str | None:
    try:
        return Manifest.read(target).stamp
    except CheckpointCorrupt:
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_sealed(path)
    except (FileNotFoundError, CheckpointCorrupt):
        return {}
