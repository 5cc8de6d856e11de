"""A cell as it was asked for, and as it was planned. Values; made in the kernel."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from nbaccel.errors import FeatureMissing
from nbaccel.features import feature
from nbaccel.launching.ipc.spec import LaunchSpec
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.run import Run, RunOrigin
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.options.run_options import RunOptions

__all__ = ["AskedCell", "CellPlan", "Host", "task_class"]


class Host(Protocol):
    """Runs a spec by ranks: a `Launcher`, or persistent ranks."""

    def run(self, spec: LaunchSpec, watching: RunObservers, occupied: str = "") -> tuple[Run, RankResults]:
        """Run the spec, see `Launcher.run`."""


def task_class(options: RunOptions) -> type[CellTask]:
    """Return the class of a cell's task; that of a cell which saves itself is a feature, if it is there."""
    if options.checkpoint_every is not None or options.resume is not None:
        with suppress(FeatureMissing):
            saving: type[CellTask] = feature("a cell that saves itself")
            return saving
    return CellTask


@dataclass(frozen=True, slots=True)
class AskedCell:
    """A cell, as the magic got it.

    Args:
        options: What its flags say.
        typed: These flags, as they were typed.
    """

    options: RunOptions
    body: str
    typed: str = ""


@dataclass(frozen=True, slots=True)
class CellPlan:
    """A cell that may run: where, how, and as what. Nothing has begun.

    Args:
        host: The launcher, or ranks that stay.
        origin: What `nbaccel.runs` keeps of its flags.
        heading: A first line that was not printed yet, since the ranks' own first line may complete it.
    """

    host: Host
    plan: LaunchPlan
    source: CellSource
    task: CellTask
    spec: LaunchSpec
    origin: RunOrigin
    heading: str = ""
