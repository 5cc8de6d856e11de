"""Make prepared loaders, collectives and checkpoints tell a dry run what they do. Runs in ranks, in a dry run only.

A prepared loader reads ahead of its loop, and may be one of several ranks that read in turns. So it announces its
passes itself, and says how many batches a round has; the last batch that it gives is marked as the last one of the
epoch, as the accumulation and `gather_for_metrics` need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nbaccel.base.settings import EACH, RunSettings
from nbaccel.features.check.dry_run.batch_choice import count_rows
from nbaccel.features.check.dry_run.decisions import SharedDecisions
from nbaccel.features.check.dry_run.function_hooks import FunctionHooks
from nbaccel.features.check.dry_run.loader_cuts import LoaderCuts
from nbaccel.features.check.dry_run.loop_log import LoopLog
from nbaccel.features.check.dry_run.memory_peaks import MemoryPeaks
from nbaccel.features.check.dry_run.one_pass import OnePass
from nbaccel.features.check.dry_run.rank_records import SAVES
from nbaccel.features.check.dry_run.redirection import Redirection
from nbaccel.features.check.dry_run.saved_files import SavedFiles
from nbaccel.features.check.dry_run.step_times import StepTimes
from nbaccel.train.checkpoint import manager, saving
from nbaccel.train.checkpoint.directory import CheckpointDirectory
from nbaccel.train.data import loader as prepared_loader
from nbaccel.train.data.dispatch import DispatchSource
from nbaccel.train.data.loader import PreparedLoader
from nbaccel.train.data.sources import Source, StreamSource
from nbaccel.train.distributed.callers import users_frames
from nbaccel.train.distributed.partial_state import current_world
from nbaccel.train.distributed.process_control import ProcessControl
from nbaccel.train.distributed.transport import Transport
from nbaccel.train.raw_loop.loaders import asked

__all__ = ["DryRunHooks", "DryRunParts"]

_COLLECTIVES = (
    "all_gather",
    "read_all",
    "read_numbers",
    "all_reduce",
    "start_sum",
    "finish_sums",
    "broadcast",
    "barrier",
)


class DryRunParts:
    """Cuts of loaders, and records of times, peaks and saves, of one rank; they last from `begin` to `end`.

    Begin them after `RawLoopTraining`, if there is one.

    Args:
        log: The log of the loops.
        write: Appends a record.
        folder: An empty one that all ranks see, for what they decide alike.
    """

    def __init__(self, log: LoopLog, write: Callable[[Mapping[str, Any]], None], folder: Path) -> None:
        settings, world = RunSettings.from_env(), current_world()
        is_joint = world.is_distributed and not settings.independent
        trains_raw = is_joint and not settings.strict
        has_own_batches = trains_raw and settings.batches == EACH
        self.times = StepTimes(write, log.note_step)
        self.peaks = MemoryPeaks(write)
        saves = Redirection(str(folder.with_name(SAVES)))
        self.saves = SavedFiles(write, log.open_parts, self.times.part, saves.original)
        self.cuts = LoaderCuts(
            log,
            write,
            SharedDecisions(folder, world.rank, world.world_size if is_joint else 1),
            [self.times, self.peaks],
            self.times.part,
            stride=world.world_size if has_own_batches else 1,
            begins_whole=trains_raw and not has_own_batches,
            before_draw=_before_draw,
        )
        self._hooks = DryRunHooks(self.cuts, self.times, self.saves, write)

    def begin(self) -> None:
        """Begin with all parts."""
        for part in (self.times, self.peaks, self.saves, self.cuts, self._hooks):
            part.begin()

    def end(self) -> None:
        """Take all hooks away, and write the records of the whole time."""
        for part in (self._hooks, self.cuts, self.saves, self.peaks, self.times):
            part.end()


class DryRunHooks:
    """Hooks in this package's own loaders, collectives and checkpoints, between `begin` and `end`."""

    def __init__(
        self, cuts: LoaderCuts, times: StepTimes, saves: SavedFiles, write: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._cuts = cuts
        self._times = times
        self._saves = saves
        self._write_record = write
        self._loops: list[int] = []  # of the last checkpoint
        self._keeps: int | None = None
        self._replaced = FunctionHooks()

    def begin(self) -> None:
        """Install the hooks. `times` has begun: it takes those on collectives away when it ends."""
        self._replaced.wrap(PreparedLoader, "_iterate", self._iterate)
        self._replaced.wrap(prepared_loader, "place", self._place)
        self._replaced.wrap(ProcessControl, "gather", self._gather)
        self._replaced.wrap(manager.Checkpoints, "save", self._save)
        self._replaced.wrap(saving.Save, "write", self._write)
        for name in _COLLECTIVES:
            self._times.measure(Transport, name, "communication")

    def end(self) -> None:
        """Take the hooks away."""
        self._replaced.undo()

    # -- loaders

    def _iterate(
        self, real: Callable[..., Any], loader: PreparedLoader, *args: Any, **kwargs: Any
    ) -> Generator[Any, None, None]:
        batches: Generator[Any, None, None] = real(loader, *args, **kwargs)
        return self._cuts.announce(loader, batches, _stride_of(loader._source)) if self._cuts.minds else batches

    def _place(
        self, real: Callable[..., Any], batches: Iterator[tuple[Any, bool]], device: torch.device | None
    ) -> Iterator[tuple[Any, bool]]:
        this = self._cuts.reader
        placed: Iterator[tuple[Any, bool]] = real(batches if this is None else self._marked(this, batches), device)
        return placed if device is None or device.type == "cpu" else self._moved(placed)

    def _marked(self, this: OnePass, batches: Iterator[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
        """Yield the batches, the last one that is given marked as the last one."""
        taken = 0
        while True:
            with self._cuts.part("loader"):
                following = next(batches, None)
            if following is None:
                return
            taken += 1
            batch, is_last = following
            yield batch, is_last or (this.chosen is not None and taken >= this.length)

    def _moved(self, placed: Iterator[tuple[Any, bool]]) -> Iterator[tuple[Any, bool]]:
        while True:
            with self._cuts.part("host to device"):
                following = next(placed, None)
            if following is None:
                return
            yield following

    # -- gathers

    def _gather(self, real: Callable[..., Any], process: ProcessControl, tensor: Any) -> Any:
        """Record a gather of an evaluation that counts samples twice: those that fill up a loader's last round.

        A training may average its loss over repeated samples, so gathers of it are not recorded.
        """
        joined = real(process, tensor)
        if not torch.is_grad_enabled():
            last, rows = process._last_round(), count_rows(joined)
            if rows and rows == last.held and last.real is not None and last.real < rows:
                frame = next(iter(users_frames(1)), None)
                place = {} if frame is None else {"file": frame.f_code.co_filename, "line": frame.f_lineno}
                self._write_record({"kind": "gather", "rows": rows, "repeated": rows - last.real, **place})
        return joined

    # -- checkpoints

    def _save(
        self,
        real: Callable[..., Path],
        checkpoints: manager.Checkpoints,
        target: Path,
        moment: Any,
        blocking: bool,
        directory: CheckpointDirectory | None,
    ) -> Path:
        self._loops = self._saves.loops()
        self._keeps = None if directory is None else directory.project.total_limit
        with self._saves.waiting():
            return real(checkpoints, target, moment, blocking, directory)

    def _write(self, real: Callable[..., list[str]], save: saving.Save, *args: Any, **kwargs: Any) -> list[str]:
        size = functools.partial(_folder_bytes, save.target)
        with self._saves.saving(str(save.target), size, self._loops, self._keeps):
            return real(save, *args, **kwargs)


def _before_draw() -> None:
    """Prepare for a draw that all ranks make alike, by what torch's loaders call; do nothing where that is nobody."""
    if (passes := asked()) is not None:
        passes.before()


def _stride_of(source: Source) -> int:
    """Return how many batches are read for one of the loop; indices are dealt before anything is read."""
    return source.stride if isinstance(source, StreamSource | DispatchSource) else 1


def _folder_bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
