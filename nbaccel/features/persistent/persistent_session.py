"""Persistent ranks of one notebook, and the flags that concern them. Runs in the kernel.

`%accelerate start` starts the ranks, or `--keep` in a cell; `%accelerate stop` ends them. Until then, cells run in
these ranks (`PersistentRun`), which are `PersistentWorkers`; the choices for their start (number, devices, seed) cannot
be changed by a cell.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

from IPython.core.error import UsageError

from nbaccel.base.hardware import Survey
from nbaccel.base.notices import is_users
from nbaccel.base.quantities import amount, listed
from nbaccel.errors import FeatureMissing, LaunchRefused, ResultsMissing
from nbaccel.features import feature
from nbaccel.features.persistent.namespace_tasks import InitTask, Pull, Push
from nbaccel.features.persistent.persistent_start import start_persistent
from nbaccel.features.persistent.persistent_workers import PersistentWorkers
from nbaccel.launching.diagnosis import list_of_ranks
from nbaccel.launching.earlier_models import models_in
from nbaccel.launching.gpu_trouble import before_a_run
from nbaccel.launching.ipc.shared_namespace import SharedNamespace
from nbaccel.launching.ipc.spec import LaunchSpec, Task
from nbaccel.launching.ipc.user_code import reloader
from nbaccel.launching.launcher import Launcher, refuse_nested_launch
from nbaccel.launching.made_in_cells import refuse_what_stays_here
from nbaccel.launching.plan import LaunchPlan, draws_as_here
from nbaccel.launching.preflight import ProcessState
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.run import Run
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.namespace.install import install
from nbaccel.notebook.cell_plan import task_class
from nbaccel.options.run_options import AUTO, RunOptions, expanded
from nbaccel.output.screens import ConsoleScreen

__all__ = [
    "PersistentRun",
    "PersistentSession",
    "clock",
    "of_the_start",
]


class EditedModules:
    """Modules of the user's whose files change while ranks stay that have imported them.

    Modules of packages that are installed are left out.
    """

    def __init__(self) -> None:
        self._times = dict(self._now())

    def found(self) -> list[str]:
        """Return the names of those that were edited since, or since they were imported here; each edit once."""
        before, self._times = self._times, dict(self._now())
        return [name for name, changed in self._times.items() if before.get(name, changed) != changed]

    @staticmethod
    def _now() -> Iterator[tuple[str, int]]:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if type(file) is str and is_users(file):
                with suppress(OSError):
                    yield name, os.stat(file).st_mtime_ns


class PersistentSession:
    """The persistent ranks of one notebook, if there are any.

    Args:
        names: The names of the notebook.
        launcher, survey: Functions that return what a start needs.
        say: A function that prints one line for the user.
        cell_of: A function that returns the cell that a reason why forks fail comes from.
    """

    def __init__(
        self,
        names: dict[str, Any],
        launcher: Callable[[], Launcher],
        survey: Callable[[], Survey],
        cell_of: Callable[[str | None], str | None],
        setup: str | None,
        say: Callable[[str], None],
    ) -> None:
        self._notebook = names
        self._launcher = launcher
        self._survey = survey
        self._cell_of = cell_of
        self._setup = setup
        self._say = say
        self._persistent: PersistentWorkers | None = None
        self._plan: LaunchPlan | None = None
        self._options = RunOptions()
        self._edited = EditedModules()
        self._reloads = False
        self._pid = os.getpid()

    @property
    def is_on(self) -> bool:
        """Return whether there are persistent ranks.

        A rank that was forked meanwhile holds a copy of this object, and has none.
        """
        return self._persistent is not None and self._persistent.is_open and os.getpid() == self._pid

    @property
    def persistent(self) -> PersistentWorkers:
        """Return the ranks.

        Raises:
            UsageError: There are none.
        """
        if self._persistent is None or not self.is_on:
            raise UsageError("no ranks stay: %accelerate start makes some, and so does --keep in a cell.")
        return self._persistent

    @property
    def names(self) -> frozenset[str]:
        """Return the names that rank 0 has; none without persistent ranks."""
        return self.persistent.names(0) if self.is_on else frozenset()

    # --- begin and end -----------------------------------------------------------------------------------------

    def start(self, options: RunOptions) -> None:
        """Start persistent ranks.

        Raises:
            LaunchRefused: There are some already; or the flags are those of a cell, or not possible here.
        """
        refuse_nested_launch()
        if self.is_on:
            if options == self._options:  # the cell was run again
                return self._say(f"there are {PersistentRun(self.persistent, '')} already")
            raise LaunchRefused(
                f"there are {PersistentRun(self.persistent, '')} already, with other flags; %accelerate stop ends them."
            )
        _refuse_flags_of_a_cell(options)
        task = InitTask(SharedNamespace(self._notebook))
        here = ProcessState.now()
        plan = LaunchPlan.of_cell(options, task, self._survey(), here, self._cell_of(here.why_forks_fail))
        if plan.start.method == "inline":
            raise LaunchRefused(
                "ranks that stay are processes of their own, and here one would run in the notebook "
                f"({plan.start.reason}), where names stay anyway: leave %accelerate start out."
            )
        self._say(str(plan))
        for line in before_a_run(plan.devices.gpus):
            self._say(line)
        self._edited, self._reloads = EditedModules(), reloader() is not None
        spec = plan.spec(task, self._setup).ending(stays=True)
        with suppress(FeatureMissing):  # loaded before it is needed: after a failure ranks import nothing
            feature("groups of ranks that stay")
        self._persistent = start_persistent(self._launcher(), spec, ConsoleScreen())
        self._plan, self._options = replace(plan, start=self._persistent.spec.start), options
        if plan.start.method != self._persistent.spec.start.method:
            self._say(
                f"started by {self._persistent.spec.start.method} after all: {self._persistent.spec.start.reason}"
            )
        self._say(f"{PersistentRun(self._persistent, '')}; their memory is held until %accelerate stop")

    def start_for_cell(self, options: RunOptions) -> None:
        """Start persistent ranks with those options of a cell that belong to a start."""
        self.start(of_the_start(options))

    def restart(self) -> None:
        """End the ranks, and start others with the same flags.

        Raises:
            UsageError: There were none.
        """
        refuse_nested_launch()
        if self._persistent is None:
            raise UsageError("no ranks stay, and none did: %accelerate start makes some.")
        lost = self._lost()
        self._persistent.close(RunObservers(ConsoleScreen()))
        if lost:
            self._say(lost)
        self.start(self._options)

    def stop(self) -> None:
        """End the ranks.

        Raises:
            UsageError: There are none.
        """
        size, lost = self.persistent.spec.world_size, self._lost()
        self.persistent.close(RunObservers(ConsoleScreen()))
        self._say(f"{_number_of_ranks(size)} ended; nothing is held any more{lost and f'; {lost}'}")

    def _lost(self) -> str:
        """Return what ends with the ranks, since nobody has pulled it; empty if nothing does."""
        unpulled = [] if self._persistent is None else [text for text, _ in self._persistent.home.unpulled.values()]
        return f"gone with them, as nobody had pulled it: {listed(unpulled)}" if unpulled else ""

    def close(self) -> None:
        """End the ranks at once and without a message, if there are any."""
        if self._persistent is not None and self.is_on:
            self._persistent.abandon()

    # --- cells -------------------------------------------------------------------------------------------------

    def place(
        self, asked: RunOptions, options: RunOptions, source: CellSource
    ) -> tuple[PersistentRun, LaunchPlan, CellTask]:
        """Return the persistent ranks for a cell, its plan and its task.

        Args:
            asked: The options of the cell's own line.
            options: The same, completed by the notebook's configuration.

        Raises:
            LaunchRefused: It cannot run there.
        """
        persistent, plan = self.persistent, self._plan
        assert plan is not None
        _refuse_another_start(asked, plan)
        persistent_run = PersistentRun(persistent, source.name, self._excluded_ranks(asked.only))
        if options.pdb in persistent_run.excluded_ranks:
            raise LaunchRefused(f"--pdb {options.pdb}: that rank takes no part in this cell, --only {asked.only} does.")
        if trouble := persistent.trouble:
            raise LaunchRefused(f"{trouble}; {self._ways_out()}.")
        task = task_class(options)(
            source,
            self._notebook,
            options.names_back,
            options.inputs or (),
            home=persistent.home,
            result_rank=min(persistent_run.ranks),
            debugged=options.pdb,
        )
        for name in persistent.home.outdated(sorted(task.names_read())):
            self._say(
                f"{name} was defined anew since the ranks got it, and they have the old one: %accelerate push {name}"
            )
        for name in [] if plan.start.method == "fork" and self._reloads else self._edited.found():
            self._say(f"{name} was edited since the ranks imported it, and they have the old one: %accelerate restart")
        if task.first_card and len(plan.devices.gpus) > 1 and not plan.own_devices:
            self._say(
                f"{task.first_card} is rank 0's GPU, and the ranks that stay see all of them: in the others write "
                "device = accelerator.device"
            )
        of_the_cell = replace(options, **{name: getattr(plan.options, name) for name in _OF_THE_START})
        settings = plan.settings
        if draws_as_here(of_the_cell, task):
            task.draw_as_here()
            settings = replace(settings, seed=None)
        models = models_in(task.values_to_send(), self._notebook) if plan.start.method == "zygote" else ()
        plan = replace(plan, options=of_the_cell, own=asked, settings=settings, stays=True, models=models)
        return persistent_run, plan, task

    def after(self, error: BaseException | None) -> None:
        """Print the state of the ranks, if a cell has affected them."""
        if not self.is_on:
            self._say("none of the ranks that stayed is left: %accelerate restart starts others with the same flags")
        elif not self.persistent.alive:
            self.persistent.abandon()
            self.after(error)
        elif trouble := self.persistent.trouble:
            self._say(f"{trouble}; {self._ways_out()}")
        elif error is not None:
            news = f"; {self.persistent.news}" if self.persistent.news else ""
            self._say(f"the ranks live on, with what they have{news}")

    def _excluded_ranks(self, only: str | None) -> list[int]:
        size = self.persistent.spec.world_size
        ranks = set(range(size)) if only is None else set(expanded(only))
        if max(ranks) >= size:
            raise LaunchRefused(
                f"--only {only}: {_number_of_ranks(size)} {'stays' if size == 1 else 'stay'}, "
                f"{'0 alone' if size == 1 else f'0-{size - 1}'}; name some of these."
            )
        return [rank for rank in range(size) if rank not in ranks]

    def _ways_out(self) -> str:
        return (
            "so no further cell runs in them: %accelerate pull NAMES still brings variables of "
            f"{list_of_ranks(self.persistent.alive)} back, %accelerate restart begins anew"
        )

    # --- names -------------------------------------------------------------------------------------------------

    def push(self, names: Sequence[str]) -> None:
        """Give all ranks the notebook's values.

        Raises:
            CannotSend: One of them cannot be sent, and none was sent.
        """
        persistent = self.persistent
        if trouble := persistent.trouble:
            raise LaunchRefused(f"{trouble}; {self._ways_out()}.")
        plan = self._plan
        if plan is not None and plan.start.method == "zygote":
            pushed = models_in({name: self._notebook[name] for name in names}, self._notebook)
            stay = [model for model in pushed if model.stays_here]
            refuse_what_stays_here(stay, persistent.spec.world_size, [""], "a cell of the ranks")
        push = Push(persistent.home, names)
        self._do(push, "%accelerate push").close()
        push.has_arrived()
        self._say(f"sent to {_number_of_ranks(persistent.spec.world_size)}: {', '.join(names)}")

    def pull(self, names: Sequence[str], rank: int = 0) -> None:
        """Bring one rank's values into the notebook, by the rules of `--out`.

        Raises:
            LaunchRefused: The rank is gone.
            ResultsMissing: The rank does not have the name, or cannot send it; values that came are in the notebook.
        """
        persistent, size = self.persistent, self.persistent.spec.world_size
        if rank not in persistent.alive:
            what = persistent.trouble if rank < size else f"{_number_of_ranks(size)} {'stays' if size == 1 else 'stay'}"
            raise LaunchRefused(f"rank {rank} has nothing to bring back: {what}.")
        others = [other for other in range(size) if other != rank]
        pull = Pull(persistent.home, names, rank)
        ended = self._do(pull, "%accelerate pull", others)
        report = ended.reports[rank]
        try:
            if ended.needs_rows(rank) and set(others) & set(persistent.alive):
                with closing(self._do(pull, "%accelerate pull", [rank])) as rest:
                    ended.join(rest)
                    values = ended.values()
            else:
                values = ended.values()
            arrivals = install(values, self._notebook, report.facts.get("sizes", {}) if report else {})
        finally:
            ended.close()
        for name in values:
            persistent.home.unpulled.pop(name, None)
        if arrivals:
            self._say(f"brought back: {', '.join(map(str, arrivals))}")
        if report is not None and report.missing:
            reasons = ", ".join(f"{name} ({reason})" for name, reason in report.missing.items())
            raise ResultsMissing(f"not brought back from rank {rank}: {reasons}.", report.missing)

    def _do(self, task: Task, title: str, excluded_ranks: Collection[int] = ()) -> RankResults:
        """Run a task that is no cell; it succeeds or raises."""
        watching = RunObservers(ConsoleScreen())
        run, ended = self.persistent.run(task, watching, title=title, excluded_ranks=excluded_ranks)
        error = ended.raised or (KeyboardInterrupt() if ended.is_interrupted else run.error)
        if error is not None:
            ended.close()
            self.after(error)
            raise error
        return ended

    # --- words -------------------------------------------------------------------------------------------------

    def status(self) -> str:
        """Return the persistent ranks, their start, devices and memory, in words; empty if there are none."""
        if not self.is_on:
            return ""
        persistent, plan = self.persistent, self._plan
        assert plan is not None
        holds = ", ".join(f"rank {rank} {held}" for rank, held in self.held().items())
        who = f"in ranks that stay since {clock(persistent.since)}: {plan.devices}"
        status = f"{who}, and until %accelerate stop they hold: {holds}"
        return f"{status}; {persistent.trouble}; {self._ways_out()}" if persistent.trouble else status

    def held(self) -> dict[int, str]:
        """Return the memory of each living rank, in words; memory that is shared with the notebook does not count."""
        gpus = self._survey().gpus
        held = {}
        for rank, pid in self.persistent.pids.items():
            on_gpus = [
                f"{amount(count)} on cuda:{gpu.index}"
                for gpu in gpus
                for holder, count in gpu.processes
                if holder == pid and count
            ]
            held[rank] = ", ".join([f"{amount(_private_bytes(pid))} on the host", *on_gpus])
        return held


def _private_bytes(pid: int) -> int:
    """Return the bytes that would be free if the process ended; a fork shares the rest with the notebook."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except psutil.Error:  # it has ended meanwhile
        return 0


@dataclass(frozen=True, slots=True)
class PersistentRun:
    """The persistent ranks of one cell: all of them, or some. It runs a spec as a `Launcher` would.

    Args:
        title: The cell in words.
        excluded_ranks: Ranks that take no part.
    """

    persistent: PersistentWorkers
    title: str
    excluded_ranks: Collection[int] = ()

    @property
    def ranks(self) -> list[int]:
        return [rank for rank in range(self.persistent.spec.world_size) if rank not in self.excluded_ranks]

    def run(self, spec: LaunchSpec, watching: RunObservers, occupied: str = "") -> tuple[Run, RankResults]:
        """Run the spec, see `PersistentWorkers.run`."""
        return self.persistent.run(
            spec.task,
            watching,
            title=self.title,
            excluded_ranks=self.excluded_ranks,
            timeout_s=spec.end.timeout_s,
            hang_timeout_s=spec.end.hang_timeout_s,
            occupied=occupied,
        )

    def __str__(self) -> str:
        """Return the line that is printed before the run."""
        size = self.persistent.spec.world_size
        who = f"{list_of_ranks(self.ranks)} of {size}" if self.excluded_ranks else _number_of_ranks(size)
        return f"{who} that {'stays' if len(self.ranks) == 1 else 'stay'} since {clock(self.persistent.since)}"


def clock(at: float) -> str:
    """Format a time of `time.time` as the time of day."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def _number_of_ranks(count: int) -> str:
    """Format a number of ranks.

    Example:
        >>> _number_of_ranks(1), _number_of_ranks(2)
        ('1 rank', '2 ranks')
    """
    return f"{count} rank{'s' * (count > 1)}"


_OF_THE_START = {
    "num_processes": "-n",
    "mixed_precision": "-p",
    "accumulate": "-a",
    "devices": "-d",
    "cpu": "--cpu",
    "start": "--start",
    "seed": "--seed",
    "debug": "--debug",
    "independent": "--independent",
    "strict": "--strict",
    "batches": "--batches",
    "strategy": "--strategy",
    "oom": "--oom",
    "checkpoint_every": "--checkpoint-every",
    "checkpoint_dir": "--checkpoint-dir",
    "keep_checkpoints": "--keep-checkpoints",
    "resume": "--resume",
}
"""Flags of settings that a rank gets once, before its first cell."""


def of_the_start(options: RunOptions) -> RunOptions:
    """Return the options without those that apply to single cells only."""
    return RunOptions(**{name: getattr(options, name) for name in _OF_THE_START})


def _refuse_flags_of_a_cell(options: RunOptions) -> None:
    """Refuse flags of a cell in a start.

    Raises:
        LaunchRefused: A start was given what only a cell can have.
    """
    for name in (field.name for field in fields(options)):
        if name not in _OF_THE_START and getattr(options, name) is not None:
            flag = "--in" if name == "inputs" else f"--{name.replace('_', '-')}"
            raise LaunchRefused(f"{flag} belongs to a cell, not to the start: write it behind %%accelerate.")


def _refuse_another_start(asked: RunOptions, plan: LaunchPlan) -> None:
    """Refuse flags of a cell that differ from the start of its ranks.

    Args:
        asked: The options of the cell's own line.
        plan: The plan of the persistent ranks.

    Raises:
        LaunchRefused: A cell cannot have that from ranks that were started otherwise.
    """
    for name, flag in _OF_THE_START.items():
        wanted, has = getattr(asked, name), _chosen(name, plan)
        if wanted in (None, AUTO, has):
            continue
        text = flag if wanted is True else f"{flag} {wanted}"
        raise LaunchRefused(
            f"{text} belongs to the start of the ranks, and those that stay were started with "
            f"{'another choice' if has is None else f'{flag} {has}'}: leave it out, or begin anew with "
            f"%accelerate stop and %accelerate start {text}."
        )


def _chosen(name: str, plan: LaunchPlan) -> Any:
    """Return the value with which the ranks were started."""
    settled = {
        "num_processes": plan.devices.num_processes,
        "mixed_precision": plan.settings.mixed_precision,
        "accumulate": plan.settings.gradient_accumulation_steps,
        "start": plan.start.method,
        "seed": plan.settings.seed,
        "cpu": True if not plan.devices.gpus else None,
        "strategy": plan.strategy,
    }
    return settled.get(name, getattr(plan.options, name))
