"""Loops one after the other in the same ranks, each watched by itself: launching takes longer than a loop does.

What one loop leaves in a process must change nothing of the next one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
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

__all__ = ["SOME", "End", "in_groups", "in_ranks", "watched"]

End = Values | str
"""What a loop ends with, or the error that it ends in."""

_IN_A_GROUP = 20

SOME = {loop.name for loop in LOOPS[1::4]} | {"gan_with_r1", "grad_scaler_with_an_overflow"}
"""Some 40 loops of all kinds, which `loops` has in an order by kind."""

_TIMEOUT_S = 600.0


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
    if start == "fork":
        ranks = run_ranks(world_size, _each, names, runs, timeout_s=_TIMEOUT_S)
    else:
        with closing(Launcher()) as launcher, pytest.MonkeyPatch.context() as patched:
            patched.setattr(api, "default_launcher", lambda: launcher)
            ranks = api.launch(
                _each, world_size, args=(names, runs), cpu=True, start_method=start, independent=True
            ).values
    return {name: [ends[name] for ends in ranks] for name in names}


def _each(names: Sequence[str], runs: Sequence[Callable[[Loop], Values]]) -> dict[str, list[End]]:
    torch.set_num_threads(1)
    return {loop.name: [*_ends(loop, runs)] for loop in LOOPS if loop.name in names}


def _ends(loop: Loop, runs: Sequence[Callable[[Loop], Values]]) -> Iterator[End]:
    """Yield the end of each run, up to the first that fails."""
    for run in runs:
        try:
            yield run(loop)
        except Exception as error:
            yield f"{type(error).__module__}.{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
            return
        finally:
            gc.collect()
