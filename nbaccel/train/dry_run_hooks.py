"""Make prepared loaders, collectives and checkpoints tell a dry run what they do. Runs in ranks, in a dry run only.

A prepared loader reads ahead of its loop, and may be one of several ranks that read in turns. So it announces its
passes itself, and says how many batches a round has; the last batch that it gives is marked as the last one of the
epoch, as the accumulation and `gather_for_metrics` need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from nbaccel.dry_run.loader_cuts import LoaderCuts, OnePass
from nbaccel.dry_run.saved_files import SavedFiles
from nbaccel.dry_run.step_times import StepTimes
from nbaccel.train.checkpoint import manager, writer
from nbaccel.train.data import loader as prepared_loader
from nbaccel.train.data.dispatch import DispatchSource
from nbaccel.train.data.loader import PreparedLoader
from nbaccel.train.data.sources import Source, StreamSource
from nbaccel.train.distributed.transport import Transport

__all__ = ["DryRunHooks"]

_COLLECTIVES = ("all_gather", "read_all", "all_reduce", "start_sum", "finish_sums", "broadcast", "barrier")


class DryRunHooks:
    """Hooks in this package's own loaders, collectives and checkpoints, between `begin` and `end`."""

    def __init__(self, cuts: LoaderCuts, times: StepTimes, saves: SavedFiles) -> None:
        self._cuts = cuts
        self._times = times
        self._saves = saves
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Install the hooks. `times` has begun: it takes those on collectives away when it ends."""
        self._replace(PreparedLoader, "_iterate", self._iterate)
        self._replace(prepared_loader, "place", self._place)
        self._replace(manager.Checkpoints, "save", self._save)
        self._replace(writer.Save, "write", self._write)
        for name in _COLLECTIVES:
            self._times.measure(Transport, name, "communication")

    def end(self) -> None:
        """Take the hooks away."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Call `ours` instead of a function, with that function before its arguments."""
        real = getattr(owner, name)

        @functools.wraps(real)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            return ours(real, *args, **kwargs)

        setattr(owner, name, hooked)
        self._undo.append(lambda: setattr(owner, name, real))

    # -- loaders

    def _iterate(
        self, real: Callable[..., Any], loader: PreparedLoader, *args: Any, **kwargs: Any
    ) -> Generator[Any, None, None]:
        batches = real(loader, *args, **kwargs)
        return self._announce(loader, batches) if self._cuts.minds else batches

    def _announce(self, loader: PreparedLoader, batches: Any) -> Generator[Any, None, None]:
        cuts = self._cuts
        length = None
        with suppress(TypeError):
            length = len(loader)
        try:
            with cuts.announced(loader, length, _stride_of(loader._source)) as this:
                while True:
                    with cuts.reading_for(this), cuts.waiting(this):
                        batch = next(batches, batches)  # which it never yields
                    if batch is batches:
                        return
                    cuts.hand_out(this)
                    yield batch
        finally:
            batches.close()

    def _place(
        self, real: Callable[..., Any], batches: Iterator[tuple[Any, bool]], device: torch.device | None
    ) -> Iterator[tuple[Any, bool]]:
        this = self._cuts.reader
        if this is None:
            return real(batches, device)
        placed = real(self._marked(this, batches), device)
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

    # -- checkpoints

    def _save(self, real: Callable[..., Path], *args: Any, **kwargs: Any) -> Path:
        self._loops = self._saves.loops()
        with self._saves.waiting("checkpoint"):
            return real(*args, **kwargs)

    def _write(self, real: Callable[..., list[str]], save: writer.Save, *args: Any, **kwargs: Any) -> list[str]:
        with self._saves.saving("checkpoint", str(save.target), lambda: _folder_bytes(save.target), self._loops):
            return real(save, *args, **kwargs)


def _stride_of(source: Source) -> int:
    """Return how many batches are read for one of the loop; indices are dealt before anything is read."""
    return source.stride if isinstance(source, StreamSource | DispatchSource) else 1


def _folder_bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
