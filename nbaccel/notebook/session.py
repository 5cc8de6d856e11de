"""Session: runs the cells of one notebook in ranks, from the flags to the results. Runs in the kernel.

The extension owns one per shell. It stores the configuration of the notebook, the cell that initialised CUDA, how the
last run went, and whether ranks are persistent (`stay`); it holds no variable of the user's.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbaccel.base.events import LoopKind
from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import duration
from nbaccel.display.run_view import PanelSink, RunView
from nbaccel.display.views import Views
from nbaccel.errors import FeatureMissing, LaunchRefused
from nbaccel.features import feature
from nbaccel.launching.ended_runs import EndedRuns
from nbaccel.launching.launcher import Launcher, default_launcher, refuse_nested_launch
from nbaccel.launching.plan import LaunchPlan, draws_as_here
from nbaccel.launching.preflight import ProcessState
from nbaccel.launching.run import RunOrigin
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import CellTask
from nbaccel.namespace.names import made_before_read
from nbaccel.namespace.threads import threads_held_by
from nbaccel.notebook.cell_plan import AskedCell, CellPlan, Host, task_class
from nbaccel.notebook.cell_run import (
    CellRun,
)
from nbaccel.notebook.cell_source import read_cell
from nbaccel.notebook.rank_counts import RankCounts
from nbaccel.notebook.rank_memory import RankMemory
from nbaccel.notebook.shell_hooks import CudaWatch, FailedCells
from nbaccel.notebook.shortages import shortages
from nbaccel.notebook.validation import (
    refuse_contradictions,
    refuse_without_input,
    refuse_wrong_places,
    without_a_missing_source,
)
from nbaccel.options.configuration import Configuration
from nbaccel.options.parsing import chosen, text_of
from nbaccel.options.run_options import RunOptions
from nbaccel.output.painter import Screen
from nbaccel.output.screens import ConsoleScreen

if TYPE_CHECKING:
    from nbaccel.features.background.background_run import Background, BackgroundRun
    from nbaccel.features.persistent.persistent_session import PersistentSession
    from nbaccel.launching.kernel_holdings import Unmoved

__all__ = ["LastRun", "Session"]

SETUP = "nbaccel.train.setup:setup_rank"
"""Setup that gives every rank its process group and, unless the notebook has the name, `accelerator`."""

_ACCELERATOR = "accelerator"

_MOST_THREADS = 3
"""Number of lines about threads of the notebook before a run."""


@dataclass(frozen=True, slots=True)
class LastRun:
    """The end of the last run: "Cell In[5]", "stopped"."""

    cell: str
    end: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.cell} {self.end} after {duration(self.seconds)}"


class Session:
    """Runs cells of one notebook.

    Args:
        launcher: The launcher; None for that of this process.
        setup: What every rank does before the cell, None for nothing.
        survey: A function that examines the machine.
        cuda: The watch that exists since the extension was loaded.
        failed_cells: The cells that have ended with an error since then.
    """

    def __init__(
        self,
        shell: Any,
        launcher: Launcher | None = None,
        setup: str | None = SETUP,
        survey: Callable[[], Survey] = Survey.take,
        cuda: CudaWatch | None = None,
        failed_cells: FailedCells | None = None,
    ) -> None:
        self.shell = shell
        self.survey = survey
        self.configuration = Configuration()
        self.cuda = cuda or CudaWatch()
        self.failed_cells = failed_cells or FailedCells()
        self.last_run: LastRun | None = None
        self.last_plan: LaunchPlan | None = None  # the plan of ranks that were started for a cell
        self.rank_memory = RankMemory()
        self.views = Views()
        self._rank_counts = RankCounts()
        self._launcher = launcher
        self.setup = setup
        self.told: set[str] = set()

    @functools.cached_property
    def stay(self) -> PersistentSession:
        """The ranks that stay; made when somebody asks for them."""
        stay: PersistentSession = feature("ranks that stay")(
            self.shell.user_ns, lambda: self.launcher, lambda: self.survey(), self.cuda.cell_of, self.setup, self.say
        )
        return stay

    @property
    def has_ranks(self) -> bool:
        """Return whether ranks stay."""
        return "stay" in vars(self) and self.stay.is_on

    @functools.cached_property
    def background(self) -> Background:
        """The run in the background; made when somebody asks for it."""
        background: Background = feature("a run in the background")(
            self.say, lambda: feature("the place of a run in the background")(self)
        )
        return background

    @property
    def left_run(self) -> BackgroundRun | None:
        """Return the run in the background, until its results have been brought back; None without one."""
        return self.background.current if "background" in vars(self) else None

    def make_room(self, *, for_another: bool = False) -> None:
        """Check that ranks can be used now, in the background too if `for_another`.

        Raises:
            LaunchRefused: A run in the background goes on, or has left results that `for_another` would displace.
        """
        if self.left_run is not None:
            self.background.make_room(for_another=for_another)

    @property
    def launcher(self) -> Launcher:
        return self._launcher or default_launcher()

    def configured(self) -> RunOptions:
        """Return the notebook's choices; print those of nbaccel.toml the first time.

        Raises:
            UsageError: nbaccel.toml is wrong.
        """
        options = self.configuration.options
        if news := self.configuration.news():
            self.say(news)
        return options

    def plan(self, cell: AskedCell) -> CellPlan:
        """Decide on host, plan and task of a cell; refuse what cannot work, and print the notes before a run."""
        asked = cell.options
        options, source, news_of_the_source = self.read(cell)
        if asked.keep and not self.has_ranks:
            self.stay.start_for_cell(options)
        survey = self.survey()
        host, plan, task = self._choose_host(asked, options, source, survey)
        options.shown_ranks(plan.devices.num_processes)  # refuses a rank that does not exist, before any output
        is_new = host is self.launcher
        needed = self.needed(task, source) if is_new else {}
        is_asked_for = plan.options.free_kernel or (is_new and plan.devices.gpus)
        aside = self.movable(plan) if is_asked_for else None
        carried = self.copied_models(plan, needed, survey, aside)
        if is_new:
            self.last_plan = plan
        first, *others = str(plan).splitlines() if is_new else [f"in {host}"]
        others += [news_of_the_source] if news_of_the_source else []
        if is_new:
            others += self.what_is_short(plan, source, needed, carried, survey, aside)
        heading = "" if others or plan.start.method == "inline" else first
        for line in [] if heading else [first, *others]:
            self.say(line)
        spec = plan.spec(task, self.setup, wants_results=task.leaves_all or bool(task.out))
        return CellPlan(host, plan, source, task, spec, self.origin(plan, cell.typed), heading)

    def read(self, cell: AskedCell) -> tuple[RunOptions, CellSource, str]:
        """Return the options of a cell and its source, and a line about the checkpoint that it continues from."""
        refuse_nested_launch()
        options = cell.options.over(self.configured())
        refuse_contradictions(options)
        refuse_wrong_places(options)
        options, news_of_the_source = without_a_missing_source(options)
        refuse_without_input(options.pdb, self.shell)
        self._keep_runs(options.keep_runs)
        self.make_room(for_another=bool(options.bg))
        source = read_cell(self.shell, cell.body)
        self._check_names(options, cell.body)
        return options, source, news_of_the_source

    def _choose_host(
        self, asked: RunOptions, options: RunOptions, source: CellSource, survey: Survey
    ) -> tuple[Host, LaunchPlan, CellTask]:
        """Return the host of a cell, its plan and its task: persistent ranks, or else new ranks."""
        if self.has_ranks:
            return self.stay.place(asked, options, source)
        if asked.only is not None:
            raise LaunchRefused(
                f"--only {asked.only} names ranks that stay, and none do: %accelerate start, or leave it out."
            )
        task = task_class(options)(
            source, self.shell.user_ns, options.names_back, options.inputs or (), debugged=options.pdb
        )
        if draws_as_here(options, task):
            task.draw_as_here()
        here = ProcessState.now()
        return (
            self.launcher,
            LaunchPlan.of_cell(options, task, survey, here, self.cuda.cell_of(here.why_forks_fail), asked),
            task,
        )

    def origin(self, plan: LaunchPlan, typed: str) -> RunOrigin:
        """Return the flags of a run, and its seed, as `nbaccel.runs` keeps them."""
        choices = {name: text_of(value) for name, value in chosen(self.configuration.parser, plan.options).items()}
        return RunOrigin(" ".join(typed.split()), choices, plan.settings.seed)

    def movable(self, plan: LaunchPlan) -> Unmoved:
        """Return what the notebook could move away from the GPUs of a run."""
        from nbaccel.launching.kernel_holdings import movable

        numbers = {gpu.index for gpu in plan.devices.gpus}
        return movable(self.shell.user_ns, numbers, is_asked_for=bool(plan.options.free_kernel))

    def say(self, line: str) -> None:
        """Print one line of the project in the cell's output."""
        ConsoleScreen().write("stdout", f"{line}\n")

    @property
    def earlier_cells(self) -> Sequence[str]:
        """The sources of the notebook's cells so far, without the one that is running."""
        cells: Sequence[str] = self.shell.history_manager.input_hist_raw[:-1]
        return cells

    def needed(self, task: CellTask, source: CellSource) -> dict[str, Any]:
        """Return the names that the cell reads from the notebook, with their present values."""
        made = made_before_read(source.code)
        return {name: value for name, value in task.values_to_send().items() if name not in made}

    def what_is_short(
        self,
        plan: LaunchPlan,
        source: CellSource,
        needed: Mapping[str, Any],
        carried: Sequence[str],
        survey: Survey,
        aside: Unmoved | None = None,
    ) -> list[str]:
        """Return a line for each thing that the ranks of the cell will lack or have little of."""
        lines = []
        if plan.start.method == "fork":
            for name, thread in list(threads_held_by(needed).items())[:_MOST_THREADS]:
                lines.append(
                    f"{name} works by a thread of the notebook ({thread}), which ranks lack: make it in this cell"
                )
        troubles: Sequence[str] = ()
        held: Iterator[str] = iter(())
        if plan.devices.gpus:
            from nbaccel.launching.gpu_trouble import before_a_run
            from nbaccel.launching.kernel_holdings import Unmoved, held_here
            from nbaccel.notebook.device_shortages import devices_held

            aside = aside or Unmoved()
            freed_on = aside.bytes_on if plan.options.free_kernel else lambda device: 0
            troubles = before_a_run(plan.devices.gpus, freed_on)
            if plan.start.method != "inline":
                held = devices_held(plan, held_here(self.shell.user_ns), aside)
        return [*lines, *troubles, *carried, *held, *shortages(plan, source.code, needed, survey)]

    def copied_models(
        self, plan: LaunchPlan, needed: Mapping[str, Any], survey: Survey, aside: Unmoved | None = None
    ) -> list[str]:
        """Return a line for each model on a device that is copied to the ranks of a cell.

        Raises:
            LaunchRefused: One cannot leave the notebook, or there is no room for what has to be copied.
        """
        if not plan.models and plan.start.method != "zygote":
            return []
        from nbaccel.launching.kernel_holdings import Unmoved
        from nbaccel.notebook.device_shortages import refuse_what_cannot_fit

        return refuse_what_cannot_fit(plan, needed, survey, self.earlier_cells, aside or Unmoved())

    def start_zygote(self) -> None:
        """Start a clean process for the first cell that needs one; return while it is still loading torch."""
        with suppress(FeatureMissing):  # a cell that needs it says so
            self.launcher.resources.zygote()

    def close(self) -> None:
        """End everything that runs for this notebook."""
        if "background" in vars(self):
            self.background.close()
        if "stay" in vars(self):
            self.stay.close()
        self.views.close()

    def _check_names(self, options: RunOptions, body: str) -> None:
        """Refuse names that can only be mistakes, before anything starts."""
        known = self.shell.user_ns.keys() | (self.stay.names if self.has_ranks else set())
        mentioned = set(re.findall(r"[^\W\d]\w*", body))
        _refuse_unknown("--out", options.names_back, known | mentioned, "neither the notebook nor the cell has")
        _refuse_unknown("--in", options.inputs, known, "the notebook has not")

    def show(self, cell: CellPlan, frames: PanelSink, screen: Screen | None = None) -> RunView:
        """Return the view of a cell's run."""
        view = self.views.show(
            self.shell,
            cell.spec.world_size,
            cell.plan.facts(cell.source.name),
            self.survey().platform,
            is_plain=bool(cell.plan.options.plain),
            frames=frames,
            screen=screen,
        )
        view.head(cell.heading)
        return view

    def begin(self, cell: CellPlan, shown: RunView) -> CellRun:
        """Return the run of a planned cell; nothing has begun."""
        self.rank_memory.begin(cell.source.name)
        return CellRun(cell, shown, self.told, self.launcher.remember)

    def remembered(self) -> EndedRuns:
        """Return the runs of this notebook, with those that `keep-runs` has kept from other kernels.

        Raises:
            UsageError, LaunchRefused: The choices of nbaccel.toml are wrong, or the file of runs cannot be used.
        """
        self._keep_runs(self.configuration.options.keep_runs)
        return self.launcher.ended_runs

    def _keep_runs(self, path: str | None) -> None:
        """Keep the runs from now on in the file `path`, which is read the first time; in none if it is None.

        Raises:
            LaunchRefused: It cannot be read or written.
        """
        ended = self.launcher.ended_runs
        if path is None:
            ended.file = None
        elif notice := feature("keep-runs")(ended, path):
            self.say(notice)

    # --- after the run -----------------------------------------------------------------------------------------

    def conclude(self, run: CellRun) -> Any:
        """Conclude a run that is over: bring its values back, raise its error, and record how it went."""
        self.last_run = LastRun(run.cell.source.name, run.end, run.kept.seconds)
        try:
            return run.conclude(self.shell.user_ns, self.say)
        finally:
            if run.ended.stays:
                self.stay.after(run.error)

    def conclude_and_show(self, run: CellRun) -> Any:
        """Conclude a run, then draw what stays of it."""
        try:
            return self.conclude(run)
        finally:
            # Last, because it takes a moment that an interrupt may end: everything else is in the notebook.
            run.show_end()
            if line := self._faster_number_of_ranks(run) or self._much_exchange(run):
                self.say(line)

    def _faster_number_of_ranks(self, run: CellRun) -> str:
        """Return a line if this kernel has done the same work faster in another number of ranks.

        Only unmodified loops are compared: in a prepared one an epoch of more ranks has fewer steps.
        """
        history = run.kept.history
        is_unmodified = history.mode is not None and history.mode.kind == LoopKind.UNMODIFIED
        if run.end != "done" or run.ended.stays or not is_unmodified or not history.steps or history.resumed:
            return ""
        choices = {
            name: text for name, text in run.kept.origin.choices.items() if name not in ("num-processes", "seed")
        }
        work = run.cell.source.code.strip(), history.steps, tuple(sorted(choices.items()))
        return self._rank_counts.note(work, run.cell.spec.world_size, run.kept.seconds, run.cell.source.name)

    def _much_exchange(self, run: CellRun) -> str:
        """Return a line if the ranks of a loop that we train have mostly exchanged and waited, once in a notebook."""
        history = run.kept.history
        is_ours = history.mode is not None and history.mode.kind in (LoopKind.UNMODIFIED, LoopKind.PREPARED)
        return self._rank_counts.note_exchange(history.exchange_share) if run.end == "done" and is_ours else ""


def _refuse_unknown(flag: str, names: Collection[str] | None, known: Collection[str], who_has_not: str) -> None:
    for name in names or ():
        if name in known:
            continue
        near = difflib.get_close_matches(name, [other for other in known if not other.startswith("_")], n=1)
        raise LaunchRefused(
            f"{flag} {name}: {who_has_not} a variable of that name"
            f"{f' (did you mean {near[0]}?)' if near else ''}; nothing was started. Correct it or leave it out."
        )
