"""Folders of checkpoints of a cell: what is in them beside the difference. Runs in ranks.

They have the manifest, the names and the random states of a prepared training's checkpoints, and are as complete or
absent as these. A thread may write them. The loss of the step after a save is added later, in a sealed file.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nbaccel.base.events import Checkpoint, emit
from nbaccel.base.values import frozen
from nbaccel.errors import CheckpointCorrupt
from nbaccel.features.cell_checkpoints.difference import CellDifference
from nbaccel.train.checkpoint import rng_files
from nbaccel.train.checkpoint.atomic_folder import replacing, sweep
from nbaccel.train.checkpoint.directory import Timeline, is_of
from nbaccel.train.checkpoint.generators import State
from nbaccel.train.checkpoint.manifest import OF_A_CELL, Manifest, Stamp, read_sealed, write_sealed
from nbaccel.train.checkpoint.save_agreement import Alone
from nbaccel.train.checkpoint.serialization import pack, unpack

__all__ = ["CellPosition", "CellSave", "conditions", "is_of_cell", "next_loss", "read_place"]

_NEXT_LOSS = "next_loss.json"
"""Sealed by itself, since it is added later; no manifest lists it."""


@frozen
class CellPosition:
    """The place of a cell in its run, and facts about that run; its data are elsewhere.

    Args:
        position: See `cell_run`.
        source: Marks of the cell and of the functions and classes that it names.
        conditions: See `conditions`.
    """

    position: Mapping[str, Any]
    source: Mapping[str, str]
    conditions: Mapping[str, Any]

    def packed(self) -> Any:
        """Return it as JSON: later changes of what it refers to do not change that."""
        return pack({name: getattr(self, name) for name in ("position", "source", "conditions")}).structure


class CellSave:
    """A checkpoint of a cell, ready to be written by rank 0, also while the training goes on.

    Args:
        place: Of `CellPosition.packed`.
        difference: Its tensors do not change before `write` has returned.
        generators: Random states of this rank.
    """

    def __init__(
        self,
        target: Path,
        stamp: Stamp,
        manifest: Manifest,
        place: Any,
        difference: CellDifference,
        generators: State,
    ) -> None:
        self._target, self._stamp, self._manifest = target, stamp, manifest
        self._place, self._difference, self._generators = place, difference, generators
        self._lock = threading.Lock()
        self._is_written = False
        self._next_loss: float | None = None

    def write(self, timeline: Timeline) -> None:
        """Write it, and delete what is beyond the limit of `timeline`.

        Raises:
            CannotSave: No space, or no right to write there. The older checkpoint does not change.
        """
        began, stamp = time.monotonic(), str(self._stamp)
        with Alone().decided(self._target), replacing(self._target, self._difference.nbytes) as folder:
            records = self._difference.write(folder)
            write_sealed(folder / f"{OF_A_CELL}.json", {"place": self._place})
            rng_files.write(folder, 0, stamp, self._generators)
            sweep(folder)
            rng_files.carry(self._target, folder, stamp)
            self._manifest.seal(folder, records)
        rng_files.adopt(self._target, self._stamp)
        timeline.latest = self._target
        timeline.tidy()
        emit(Checkpoint(str(self._target), self._manifest.step, time.monotonic() - began, goes_on=True))
        with self._lock:
            self._is_written = True
            self._write_next_loss()

    def add_next_loss(self, loss: float) -> None:
        """Add the loss of the step after it, now or as soon as the folder is there."""
        with self._lock:
            self._next_loss = loss
            self._write_next_loss()

    def _write_next_loss(self) -> None:
        """Add the loss, unless the checkpoint has been replaced."""
        if self._is_written and self._next_loss is not None and is_of(self._target, str(self._stamp)):
            unfinished = self._target.with_name(f".{self._target.name}.next_loss")
            write_sealed(unfinished, {"stamp": str(self._stamp), "loss": self._next_loss})
            os.replace(unfinished, self._target / _NEXT_LOSS)


def is_of_cell(manifest: Manifest | None) -> bool:
    """Return whether a checkpoint is of a cell whose loop prepares nothing."""
    return manifest is not None and manifest.parts == [OF_A_CELL]


def read_place(folder: Path) -> CellPosition:
    """Return where the cell was.

    Raises:
        CheckpointCorrupt: The file is damaged.
    """
    path = folder / f"{OF_A_CELL}.json"
    try:
        return CellPosition(**unpack(read_sealed(path)["place"], {}))
    except (FileNotFoundError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path} is damaged: {error}", str(path)) from error


def next_loss(folder: Path, manifest: Manifest) -> float | None:
    """Return the loss of the step after the save; None if it was not added."""
    try:
        found = read_sealed(folder / _NEXT_LOSS)
    except (FileNotFoundError, CheckpointCorrupt):
        return None
    return float(found["loss"]) if found.get("stamp") == manifest.stamp else None


def conditions(world_size: int, parts: int, device: torch.device) -> dict[str, Any]:
    """Return facts under which the same numbers are computed bit by bit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "ranks": world_size,
        "parts of a batch": parts,
        "device": f"{device.type} {name}",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
