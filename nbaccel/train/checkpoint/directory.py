"""Folder of checkpoints: choose names, what to load, and what to delete. Runs in ranks.

Rank 0 alone loads and deletes. A folder is loaded if its manifest is whole, and every file is as the manifest says
(`_complete_at`). Every rank asks for the next name, and rank 0's is used. The ranks have agreed on the number of the
first save and count on from there, so all expect the same name; a rank finds the folder to which it adds its random
states by the stamp of the save, also under another name. The user builds a `ProjectConfiguration`, which opens no file.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Self

from nbaccel.base.quantities import in_gb
from nbaccel.base.values import frozen
from nbaccel.errors import CheckpointCorrupt
from nbaccel.train.checkpoint.atomic_folder import (
    complete_leftovers,
    delete_dead,
    delete_whole,
    free_bytes,
    is_alive,
    place_for,
    place_of,
)
from nbaccel.train.checkpoint.manifest import MANIFEST, Lineage, Manifest, aside

__all__ = [
    "CheckpointDirectory",
    "Counted",
    "FoundCheckpoint",
    "ProjectConfiguration",
    "Timeline",
    "is_by_accelerate",
    "is_of",
]

_NAME = r"checkpoint_(\d+)"

_BY_ACCELERATE = (
    "optimizer.bin",
    "scheduler.bin",
    "pytorch_model.bin",
    "random_states_0.pkl",
    "pytorch_model_fsdp_0",
    "pytorch_model_fsdp.bin",
)
"""Files and folders by which a folder of Accelerate's is known."""

_STEP = r"checkpoint_(\d+)(?:_\d+)?"

_TAKEN = r"(?:checkpoint_(\d+)|\.checkpoint_(\d+)\.(?:tmp|old)-(\d+))"
"""Names that have a number, and the process: a leftover of a killed process gets its name back at the next save."""

_FEWEST = 3
"""Number of checkpoints that should fit on the disk where no limit was set."""

_LOOK_BACK = 100
"""Number of newest checkpoints that a rank searches for that of its own save: it may be that far behind rank 0."""


@frozen
class FoundCheckpoint:
    """A checkpoint to load.

    Args:
        manifest: None for a folder of Accelerate's, which has none.
        passed_over: The errors of newer checkpoints that are damaged.
    """

    folder: Path
    manifest: Manifest | None
    passed_over: list[str] = field(default_factory=list)


class CheckpointDirectory:
    """The checkpoints of one project.

    Attributes:
        latest: The checkpoint that this process has written or loaded last, if any.
        lineage: The lineage of the run that saves here.
    """

    def __init__(self, project: ProjectConfiguration) -> None:
        self.project = project
        self.latest: Path | None = None
        self._saves: Counter[str] = Counter()
        self._saves_of: tuple[int, int] | None = None
        self._has_told = self._has_weighed = False
        self.lineage = Lineage()

    @classmethod
    def chosen(
        cls,
        project: ProjectConfiguration | None,
        project_dir: str | os.PathLike[str] | None,
        otherwise: str | None = None,
    ) -> Self:
        """Return the checkpoints of `project`, in `project_dir` where that names no folder, else in `otherwise`."""
        project_dir = otherwise if project_dir is None else project_dir
        project = project or ProjectConfiguration(project_dir)
        if project_dir is not None and project.project_dir is None:
            project.set_directories(project_dir)
        return cls(project)

    def begin(self, lineage: Lineage) -> None:
        """Start saving for another run."""
        self.lineage = lineage
        self._has_told = False

    # -- names

    def label(self, moment: tuple[int, int], line: str) -> str:
        """Return a text that tells a numbered save from others of this run at the same `moment`, equal on all ranks.

        Args:
            line: The program's line. It distinguishes a save on the main process only from the next one, by all ranks.
        """
        if moment != self._saves_of:
            self._saves_of = moment
            self._saves.clear()
        self._saves[line] += 1
        return f"save {self._saves[line]} at {line}"

    def next_folder(self, output_dir: str | os.PathLike[str] | None, stamp: str, writes: bool = True) -> Path:
        """Return the folder of the next checkpoint: `output_dir`, or the next number in the project's folder.

        Args:
            writes: This rank makes it; the other ranks look for the folder that it has made of this save.

        Raises:
            ValueError: Neither was given, or a checkpoint with the number that was set by hand exists.
        """
        if output_dir is not None:
            return place_for(output_dir)
        number = self.project.iteration
        folder = self._numbered("save_state", "output_dir") / f"checkpoint_{number}"
        is_taken, is_counted = folder.exists(), isinstance(number, Counted)
        expected = folder.with_name(f"checkpoint_{self.free()}") if is_taken and is_counted else folder
        # Looked for last: what rank 0 commits after this has the expected name.
        if not writes and (committed := self.committed(stamp)) is not None:
            return committed
        if is_taken and not is_counted:
            raise ValueError(
                f"the checkpoint folder {folder} exists already, and iteration {number} was set by hand; {self.free()} "
                "is free. Where no number is set, save_state goes on behind the newest; accelerator.load_state() "
                "continues that one."
            )
        return expected

    def committed(self, stamp: str) -> Path | None:
        """Return the checkpoint that rank 0 has made of the save `stamp`, if it exists already."""
        found = (folder for _, folder in reversed(self._all()[-_LOOK_BACK:]) if is_of(folder, stamp))
        return next(found, None)

    def free(self) -> int | None:
        """Return the number after the newest existing one; None where checkpoints are not numbered."""
        if not self.project.automatic_checkpoint_naming or self.project.project_dir is None:
            return None
        place = self._numbered("save_state", "output_dir")
        names = (re.fullmatch(_TAKEN, name) for name in (os.listdir(place) if place.is_dir() else ()))
        taken = [int(said[1] or said[2]) for said in names if said and not (said[3] and is_alive(said[3]))]
        return 1 + max(taken, default=-1)

    def go_on_at(self, number: int | None) -> None:
        """Continue the numbering at `number`, unless one was set by hand."""
        if number is not None and isinstance(self.project.iteration, Counted):
            self.project.iteration = Counted(number)

    def count_on(self, folder: Path) -> None:
        """Continue the numbering after `folder`, the numbered checkpoint that was made last."""
        said = re.fullmatch(_NAME, folder.name)
        assert said is not None, folder
        self.project.iteration = Counted(int(said[1]) + 1)

    def news(self, folder: Path) -> str:
        """Return, once, a message that other runs have saved here before; otherwise an empty text.

        Args:
            folder: The checkpoint that is about to be made.
        """
        if self._has_told:
            return ""
        self._has_told = True
        others = [name for _, name in self._all() if name != folder and not self._is_own(name)]
        if not others:
            return ""
        return (
            f"{folder.parent} holds {len(others)} checkpoint(s) of earlier runs, left as they are; this run goes on "
            f"with {folder.name}"
        )

    def shortage(self, folder: Path, nbytes: int) -> str:
        """Return, once, a message that the disk has not enough space for the checkpoints to keep; else an empty text.

        Args:
            folder: The checkpoint that is about to be made.
            nbytes: Its size.
        """
        if self._has_weighed or not nbytes:
            return ""
        self._has_weighed = True
        limit = self.project.total_limit
        own = sum(1 for _, name in self._all() if self._is_own(name)) if limit is not None else 0
        wanted = _FEWEST if limit is None else max(1, limit + 1 - own)  # the oldest goes when the next is complete
        free = free_bytes(folder.parent)
        if free >= wanted * nbytes:
            return ""
        kept = "and none is deleted" if limit is None else f"and {limit} are kept while the next is written"
        return (
            f"a checkpoint takes {in_gb(nbytes)}, and {folder.parent} has {in_gb(free)} left: "
            f"room for {free // nbytes}, {kept}. Keep fewer (total_limit, --keep-checkpoints) or save to another disk."
        )

    # -- limits

    def tidy(self) -> None:
        """Delete leftovers of killed processes, and this run's oldest numbered checkpoints beyond `total_limit`.

        The newest checkpoint is complete by now.
        """
        place = self._numbered("save_state", "output_dir")
        delete_dead([*place.glob(".checkpoint_*.tmp-*"), *place.glob(".checkpoint_*.old-*")])
        limit = self.project.total_limit
        if limit is None:
            return
        own = [folder for _, folder in self._all() if self._is_own(folder)]
        for folder in own[:-limit]:
            delete_whole(folder)
            for waiting in aside(folder, "rank*"):
                waiting.unlink(missing_ok=True)
        from nbaccel.train.checkpoint.rng_files import drop_outdated

        drop_outdated(place, min((Manifest.read(folder).step for folder in own[-limit:]), default=0))

    def _is_own(self, folder: Path) -> bool:
        """Return whether `folder` is of this run, or of those that led to it; False for a damaged one."""
        try:
            return self.lineage.holds(Manifest.read(folder))
        except (CheckpointCorrupt, TypeError):
            return False

    # -- choice

    def choose(self, input_dir: str | os.PathLike[str] | None) -> FoundCheckpoint:
        """Return the checkpoint in `input_dir`; without one, the newest numbered checkpoint that is complete.

        Raises:
            FileNotFoundError: There is no checkpoint.
            CheckpointCorrupt: None is complete.
            ValueError: No folder was given, and checkpoints are not numbered.
        """
        if input_dir is not None:
            return _complete_at(place_of(input_dir))
        place = self._numbered("load_state", "input_dir")
        damaged: list[CheckpointCorrupt] = []
        for _, folder in reversed(self._all()):
            try:
                choice = _complete_at(folder)
            except CheckpointCorrupt as error:
                damaged.append(error)
            except FileNotFoundError as error:  # an empty folder, as a killed save of Accelerate leaves
                damaged.append(CheckpointCorrupt(str(error), str(folder)))
            else:
                return FoundCheckpoint(choice.folder, choice.manifest, [*map(str, damaged), *choice.passed_over])
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
        """Return the numbered checkpoints, the oldest first."""
        place = self._numbered("load_state", "input_dir")
        found = [(re.fullmatch(_NAME, path.name), path) for path in place.glob("checkpoint_*")]
        return sorted((int(said[1]), path) for said, path in found if said)


class Timeline(CheckpointDirectory):
    """The automatic checkpoints of a training: named by their step, in the order in which they were written.

    A run that starts again in the folder of another has smaller steps than that one, and the newer checkpoints. A name
    that another run has taken gets a number behind it: ``checkpoint_500_2``.
    """

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        super().__init__(ProjectConfiguration(total_limit=keep))
        self.folder = folder

    def folder_for(self, step: int) -> Path:
        """Return the folder for this run's checkpoint of `step`."""
        folder = self.folder / f"checkpoint_{step}"
        for again in count(2):
            if not folder.exists() or self._is_own(folder):
                return folder
            folder = self.folder / f"checkpoint_{step}_{again}"
        raise AssertionError("unreachable")

    def choose_from(self, place: Path) -> FoundCheckpoint:
        """Return the checkpoint `place`, or the newest complete one in the folder `place`.

        Raises:
            FileNotFoundError, CheckpointCorrupt: See `choose`.
        """
        if (place / MANIFEST).exists() or (place.is_dir() and is_by_accelerate(place)):
            return self.choose(place)
        return Timeline(place).choose(None)

    def _numbered(self, call: str, argument: str) -> Path:
        return self.folder

    def _all(self) -> list[tuple[int, Path]]:
        found = [(re.fullmatch(_STEP, path.name), path) for path in self.folder.glob("checkpoint_*")]
        steps = [(int(said[1]), path) for said, path in found if said]
        return sorted(steps, key=lambda item: (_saved_at(item[1]), item[0]))


def _saved_at(folder: Path) -> float:
    try:
        return Manifest.read(folder).saved_at
    except (CheckpointCorrupt, TypeError):
        return 0.0


def is_by_accelerate(folder: Path) -> bool:
    """Return whether `folder` looks like one that ``accelerate.Accelerator.save_state`` writes."""
    return not (folder / MANIFEST).exists() and any((folder / name).exists() for name in _BY_ACCELERATE)


def is_of(folder: Path, stamp: str) -> bool:
    """Return whether rank 0 has committed this very save already; then it is expected that the folder exists."""
    try:
        return Manifest.read(folder).stamp == stamp
    except CheckpointCorrupt:
        return False


def _complete_at(folder: Path) -> FoundCheckpoint:
    """Return `folder`, if it is complete; else a complete leftover of a killed process beside it.

    Raises:
        FileNotFoundError, CheckpointCorrupt: Neither exists.
    """
    try:
        return FoundCheckpoint(folder, _verified(folder))
    except (FileNotFoundError, CheckpointCorrupt) as error:
        for complete in complete_leftovers(folder)[:1]:
            return FoundCheckpoint(complete, Manifest.read(complete), [f"{error}; {complete.name} is whole"])
        raise


def _verified(folder: Path) -> Manifest | None:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint {folder}: no such folder")
    if is_by_accelerate(folder):
        return None
    if not (folder / MANIFEST).exists() and not any(folder.iterdir()):
        raise FileNotFoundError(f"there is no checkpoint in {folder}: the folder is empty")
    manifest = Manifest.read(folder)
    manifest.verify(folder)
    return manifest


class Counted(int):
    """A checkpoint number that was not set by hand: if it is taken, the next one will do as well."""


@dataclass(slots=True)
class ProjectConfiguration:
    """Folders of checkpoints and logs, and the names of checkpoints. The fields are Accelerate's.

    It is not frozen: programs written for Accelerate set `iteration` to continue a numbering.

    Args:
        project_dir: The project's folder.
        logging_dir: Where trackers write; by default the project's folder.
        automatic_checkpoint_naming: ``save_state()`` without a name writes
            ``<project_dir>/checkpoints/checkpoint_<n>``.
        total_limit: The number of these checkpoints that are kept. The oldest are deleted once a new one is complete.
            Checkpoints of this run count, and those that it continues after `load_state`; what another run has saved
            there stays.
        iteration: The number of the next checkpoint; each save increases it. By default numbers continue after the
            newest existing one. A number that is set is used, or refused if it exists.
        save_on_each_node: The first rank of each node writes, for nodes without a common file system.

    Example:
        >>> ProjectConfiguration("runs/1", automatic_checkpoint_naming=True).logging_dir
        'runs/1'
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = Counted(0)
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ValueError(f"total_limit must be at least 1 (checkpoints to keep), got {self.total_limit}")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's folder, and the logs' folder unless one is set.

        Args:
            project_dir: The project's folder.

        Example:
            >>> configuration = ProjectConfiguration()
            >>> configuration.set_directories("runs")
            >>> configuration.project_dir
            'runs'
        """
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
