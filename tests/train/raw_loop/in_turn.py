"""Loops one after the other in the same ranks, each watched by itself: launching takes longer than a loop does.

What one loop leaves in a process must change nothing of the next one. A rank in which a loop ends in an error waits for
its peers, which have to end it, too: where they still wait for that rank, it ends all of them.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from nbaccel.base.settings import RunSettings
from nbaccel.base.world import World
from nbaccel.launching import api
from nbaccel.launching.launcher import Launcher
from nbaccel.testing import run_ranks
from nbaccel.train.raw_loop.loop import RawLoopTraining
from nbaccel.train.raw_loop.single_rank import SingleRankWatch
from nbaccel.train.setup import loop_changes
from train.raw_loop.loops import LOOPS, Loop, Values

__all__ = ["MOST_APART_S", "SOME", "End", "in_groups", "in_ranks", "watched"]

End = Values | str
"""What a loop ends with, or the error that it ends in."""

_IN_A_GROUP = 20

SOME = {loop.name for loop in LOOPS[1::4]} | {"gan_with_r1", "grad_scaler_with_an_overflow"}
"""Some 40 loops of all kinds, which `loops` has in an order by kind."""

_TIMEOUT_S = 600.0

MOST_APART_S = 60.0
"""That ranks may end a loop one after the other; the first one was refused, or another error has ended it."""


@contextmanager
def watched(settings: RunSettings) -> Iterator[None]:
    """Watch what the block trains in this rank, as flags ask."""
    world, changes = World.from_env(), loop_changes(settings)
    watch = RawLoopTraining(world, settings, changes) if world.is_distributed else SingleRankWatch(changes)
    watch.begin(None)
    try:
        yield
        watch.end()
    finally:
        watch.stop()


def in_groups(loops: Iterable[Loop]) -> list[list[str]]:
    """Return the loops' names, as many together as one launch runs."""
    names = [loop.name for loop in loops]
    count = max(1, round(len(names) / _IN_A_GROUP))
    return [names[place::count] for place in range(count)]


def in_ranks(start: str, world_size: int, names: Sequence[str], *runs: Callable[[Loop], Values]) -> dict[str, Any]:
    """Return, for each loop, what each of `runs` ends with in each rank, up to an error: ``ends[name][rank][run]``."""
    with tempfile.TemporaryDirectory() as folder:
        if start == "fork":
            ranks = run_ranks(world_size, _each, names, runs, folder, timeout_s=_TIMEOUT_S)
        else:
            with closing(Launcher()) as launcher, pytest.MonkeyPatch.context() as patched:
                patched.setattr(api, "default_launcher", lambda: launcher)
                ranks = api.launch(
                    _each, world_size, args=(names, runs, folder), cpu=True, start_method=start, independent=True
                ).values
    return {name: [ends[name] for ends in ranks] for name in names}


def _each(names: Sequence[str], runs: Sequence[Callable[[Loop], Values]], folder: str) -> dict[str, list[End]]:
    torch.set_num_threads(1)
    return {loop.name: [*_ends(loop, runs, Path(folder))] for loop in LOOPS if loop.name in names}


def _ends(loop: Loop, runs: Sequence[Callable[[Loop], Values]], folder: Path) -> Iterator[End]:
    """Yield the end of each run, up to the first that fails."""
    world = World.from_env()
    for place, run in enumerate(runs):
        ended = [folder / f"{loop.name}-{place}-{rank}" for rank in range(world.world_size)]
        try:
            end: End = run(loop)
            ended[world.rank].touch()
        except Exception as error:
            ended[world.rank].touch()
            _wait_for(ended, f"{world.place} alone has ended {loop.name}", error)
            end = f"{type(error).__module__}.{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
        finally:
            gc.collect()
        yield end
        if isinstance(end, str):
            return


def _wait_for(ended: Sequence[Path], what: str, error: Exception) -> None:
    """Wait until all ranks have ended a loop.

    Raises:
        RuntimeError: Others have not: they may wait for this one, and would meet it in the next loop.
    """
    deadline = time.monotonic() + MOST_APART_S
    while not all(path.exists() for path in ended):
        if time.monotonic() > deadline:
            raise RuntimeError(what) from error
        time.sleep(0.01)
