"""Makes trackers that every rank of a raw loop opens write one run, by rank 0. Runs in ranks; imports no tracker.

In other ranks `wandb.init` makes no run (mode "disabled": logged values are dropped), and a `SummaryWriter` of
TensorBoard writes nothing if rank 0 has one for the same folder. A run of each rank is intended if `wandb.init` names a
group or shares a run, if the writers' folders differ, and with `--independent`. Not covered: names such as `from wandb
import init` of the notebook, trackers of other libraries.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from nbaccel.launch.rank.loaded import when_loaded
from nbaccel.launch.wire.event_files import silence
from nbaccel.world import World

__all__ = ["write_one_run"]

_LONGEST_WAIT_S = 60.0
"""Seconds to wait until rank 0 makes its writer: it may begin a run of wandb before, which other ranks do not."""

_POLL_S = 0.005


def write_one_run(world: World, store_path: str) -> None:
    """Let this rank's trackers be rank 0's run. Called once per process.

    store_path: a path that is the same in all ranks of the run, in a folder of the run's own.
    """
    folders = f"{store_path}.boards"
    actions: dict[str, Callable[[Any], None]] = {
        "torch.utils.tensorboard.writer": partial(_write_by_rank_0, world, folders)
    }
    if not world.is_main_process:
        actions["wandb"] = partial(_disable_wandb, world)
    when_loaded(actions)


def _disable_wandb(world: World, module: Any) -> None:
    makes = module.init
    is_told = world.rank != 1  # one rank says it

    @functools.wraps(makes)
    def init(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_told
        if _is_meant(kwargs):
            return makes(*args, **kwargs)
        if not is_told and kwargs.get("mode", os.environ.get("WANDB_MODE")) != "disabled":
            is_told = True
            warnings.warn(
                f"wandb.init makes one run, by rank 0 of {world.world_size}; what other ranks log goes nowhere. A run "
                "of each rank: wandb.init(group=...), or %%accelerate --independent.",
                stacklevel=2,
            )
        return makes(*args, **{**kwargs, "mode": "disabled"})

    module.init = init


def _is_meant(options: dict[str, Any]) -> bool:
    """Return whether `wandb.init` with these options is one of several that belong together."""
    settings = options.get("settings") or {}
    settings = settings if isinstance(settings, dict) else vars(settings)
    groups = (options.get("group"), settings.get("run_group"), os.environ.get("WANDB_RUN_GROUP"))
    modes = (options.get("mode"), settings.get("mode"), os.environ.get("WANDB_MODE"))
    return any(groups) or "shared" in modes


def _write_by_rank_0(world: World, folders: str, module: Any) -> None:
    """Make rank 0 list its writers' folders, and the other ranks read the list.  folders: the list's file."""
    kind = module.SummaryWriter
    makes = kind.__init__
    count = 0

    @functools.wraps(makes)
    def make(writer: Any, log_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        nonlocal count
        count += 1
        line = f"{log_dir if log_dir is None else os.path.abspath(log_dir)}|{kwargs.get('comment', '')}\n"
        if world.is_main_process:
            with suppress(OSError), open(folders, "a") as file:
                file.write(line)
        elif _has_line(folders, line, count):
            silence(writer, str(log_dir or ""))
        makes(writer, log_dir, *args, **kwargs)

    kind.__init__ = make


def _has_line(path: str, line: str, count: int) -> bool:
    """Return whether rank 0 has a writer for that folder. Wait until it has made `count` of them, as this rank has."""
    until = time.monotonic() + _LONGEST_WAIT_S
    while True:
        lines: list[str] = []
        with suppress(OSError), open(path) as file:
            lines = file.readlines()
        if line in lines:
            return True
        if len(lines) >= count or time.monotonic() > until:
            return False
        time.sleep(_POLL_S)  # ended by rank 0's line, or by the limit
