"""Shelf: which checkpoints there are, which one is next, which one to load, and which ones go. Runs in ranks.

It names and judges folders. Only rank 0 asks it to load or to delete; every rank asks it for the next name.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from nbaccel.errors import CheckpointCorrupt
from nbaccel.train.checkpoint.files import aside
from nbaccel.train.checkpoint.folder import complete_leftovers, delete_dead, delete_whole
from nbaccel.train.checkpoint.foreign import is_foreign
from nbaccel.train.checkpoint.manifest import MANIFEST, Manifest
from nbaccel.train.checkpoint.place import place_for, place_of
from nbaccel.train.project import ProjectConfiguration

__all__ = ["Choice", "Shelf", "Timeline"]

_NAME = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint to load.

    manifest: None for a folder of Accelerate's, which has none.
    passed_over: for each newer one that is damaged, what is wrong with it.
    """

    folder: Path
    manifest: Manifest | None
    passed_over: list[str] = field(default_factory=list)


class Shelf:
    """The checkpoints of one project.

    latest: what this process has written or loaded last, if anything.
    """

    def __init__(self, project: ProjectConfiguration) -> None:
        self.project = project
        self.latest: Path | None = None

    def next_folder(self, output_dir: str | os.PathLike[str] | None, stamp: str) -> Path:
        """Where the next checkpoint goes: `output_dir`, or the next number in the project's folder.

        Raises:
            ValueError: neither was given, or there is one of this number already that another save wrote.
        """
        if output_dir is not None:
            return place_for(output_dir)
        folder = self._numbered("save_state", "output_dir") / f"checkpoint_{self.project.iteration}"
        if folder.exists() and not _is_of(folder, stamp):
            raise ValueError(
                f"the checkpoint folder {folder} exists already. Continue it with accelerator.load_state(), which "
                "also continues the numbering, give ProjectConfiguration(iteration=...) a free number, or use another "
                "project_dir."
            )
        return folder

    def tidy(self) -> None:
        """Delete what killed processes left, and the oldest numbered checkpoints beyond `total_limit`.

        The newest checkpoint is complete by now.
        """
        place = self._numbered("save_state", "output_dir")
        delete_dead([*place.glob(".checkpoint_*.tmp-*"), *place.glob(".checkpoint_*.old-*")])
        limit = self.project.total_limit
        for _, folder in [] if limit is None else self._all()[:-limit]:
            delete_whole(folder)
            for waiting in aside(folder, "rank*"):
                waiting.unlink(missing_ok=True)

    def count_on(self, folder: Path) -> None:
        """Let the numbering continue behind `folder`, if it is a numbered one of this project."""
        said = _NAME.fullmatch(folder.name)
        project = self.project
        if not (said and project.automatic_checkpoint_naming):
            return
        if folder.resolve().parent == self._numbered("load_state", "input_dir").resolve():
            project.iteration = int(said[1]) + 1

    def choose(self, input_dir: str | os.PathLike[str] | None) -> Choice:
        """The checkpoint in `input_dir`; without one, the newest numbered checkpoint that is whole.

        Raises:
            FileNotFoundError: there is no checkpoint.
            CheckpointCorrupt: there is none that is whole.
            ValueError: no folder was given, and checkpoints are not numbered.
        """
        if input_dir is not None:
            return _judge(place_of(input_dir))
        place = self._numbered("load_state", "input_dir")
        damaged: list[CheckpointCorrupt] = []
        for _, folder in reversed(self._all()):
            try:
                choice = _judge(folder)
            except CheckpointCorrupt as error:
                damaged.append(error)
            except FileNotFoundError as error:  # an empty folder, as a killed save of Accelerate leaves
                damaged.append(CheckpointCorrupt(str(error), str(folder)))
            else:
                return Choice(choice.folder, choice.manifest, [*map(str, damaged), *choice.passed_over])
        if not damaged:
            raise FileNotFoundError(f"there is no checkpoint in {place}: save_state() was never called there")
        raise CheckpointCorrupt(
            f"none of the {len(damaged)} checkpoint(s) in {place} is whole:\n  " + "\n  ".join(map(str, damaged)),
            damaged[0].file,
            damaged[0].expected,
            damaged[0].got,
        )

    def _numbered(self, call: str, argument: str) -> Path:
        project = self.project
        if not project.automatic_checkpoint_naming or project.project_dir is None:
            raise ValueError(
                f"{call} needs a folder: give it {argument}, or make the Accelerator with project_config="
                "ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)"
            )
        return Path(project.project_dir) / "checkpoints"

    def _all(self) -> list[tuple[int, Path]]:
        """Numbered checkpoints, the oldest first."""
        place = self._numbered("load_state", "input_dir")
        found = [(_NAME.fullmatch(path.name), path) for path in place.glob("checkpoint_*")]
        return sorted((int(said[1]), path) for said, path in found if said)


class Timeline(Shelf):
    """The checkpoints that a training makes by itself: named by their step, in the order in which they were written.

    A run that begins anew in the folder of another has smaller steps than that one, and the newer checkpoints.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        super().__init__(ProjectConfiguration(total_limit=keep))
        self.folder = folder

    def folder_for(self, step: int) -> Path:
        return self.folder / f"checkpoint_{step}"

    def is_empty(self) -> bool:
        return not self._all()

    def choose_from(self, place: Path) -> Choice:
        """The checkpoint `place`, or the newest whole one in the folder `place`.

        Raises:
            FileNotFoundError, CheckpointCorrupt: see `choose`.
        """
        if (place / MANIFEST).exists() or (place.is_dir() and is_foreign(place)):
            return self.choose(place)
        return Timeline(place).choose(None)

    def _numbered(self, call: str, argument: str) -> Path:
        return self.folder

    def _all(self) -> list[tuple[int, Path]]:
        return sorted(super()._all(), key=lambda item: (_saved_at(item[1]), item[0]))


def _saved_at(folder: Path) -> float:
    try:
        return Manifest.read(folder).saved_at
    except (CheckpointCorrupt, TypeError):
        return 0.0


def _is_of(folder: Path, stamp: str) -> bool:
    """Whether rank 0 has committed this very save already: then the folder's existence is no surprise."""
    try:
        return Manifest.read(folder).stamp == stamp
    except CheckpointCorrupt:
        return False


def _judge(folder: Path) -> Choice:
    """`folder`, if it is whole; else what a killed process left complete beside it.

    Raises:
        FileNotFoundError, CheckpointCorrupt: neither is there.
    """
    try:
        return Choice(folder, _verified(folder))
    except (FileNotFoundError, CheckpointCorrupt) as error:
        for complete in complete_leftovers(folder)[:1]:
            return Choice(complete, Manifest.read(complete), [f"{error}; {complete.name} is whole"])
        raise


def _verified(folder: Path) -> Manifest | None:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint {folder}: no such folder")
    if is_foreign(folder):
        return None
    if not (folder / MANIFEST).exists() and not any(folder.iterdir()):
        raise FileNotFoundError(f"there is no checkpoint in {folder}: the folder is empty")
    manifest = Manifest.read(folder)
    manifest.verify(folder)
    return manifest
