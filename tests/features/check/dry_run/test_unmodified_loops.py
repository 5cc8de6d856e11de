"""Training loops as strangers write them run through in a dry run, in two ranks: none fails that does not fail anyway.

Their sources are not rewritten here, so `present` says that a loop of the program has moved each time it is asked.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from pathlib import Path

import pytest

from features.check.dry_run.test_dry_run_hooks import DryRun
from nbaccel.base.settings import RunSettings
from nbaccel.errors import NotPrepared
from nbaccel.testing import run_ranks
from nbaccel.train.distributed.partial_state import current_world
from nbaccel.train.raw_loop.loop import RawLoopTraining
from train.raw_loop.loops import LOOPS, Loop


def ran(folder: Path, loop: Loop) -> list[int] | str:
    """Return how many batches each pass has given, none where it starts again; or the error that refuses the loop."""
    training = RawLoopTraining(current_world(), RunSettings())
    training.begin({})
    run = DryRun(folder, begins_whole=True)
    rounds = itertools.count()
    run.log.present = lambda: (next(rounds),)  # type: ignore[method-assign]
    try:
        with run, contextlib.redirect_stdout(io.StringIO()):
            loop.run()
            training.end()
    except NotPrepared as error:
        training.stop()
        return [] if error.is_of_parts else str(error)  # a launched run starts again with whole batches
    return [len(batches) for batches in run.log.batches]


@pytest.mark.sample(6)
@pytest.mark.parametrize("loop", [loop for loop in LOOPS if not loop.is_slow], ids=lambda loop: loop.name)
def test_a_loop_runs_through(loop: Loop, tmp_path: Path) -> None:
    first, second = run_ranks(2, ran, tmp_path, loop)
    if isinstance(first, str):
        assert loop.may_refuse, first
    else:
        assert first == second
