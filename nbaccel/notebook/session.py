"""Session: runs the cells of one notebook in ranks, from the flags to the results. Runs in the kernel.

The extension owns one per shell. It stores the configuration of the notebook, the cell that initialised CUDA, how the
last run went, and whether ranks are persistent (`stay`); it holds no variable of the user's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from nbaccel.base.errors import CheckFailed, LaunchRefused, RunStopped
from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import plural
from nbaccel.base.world import is_notebook_kernel
from nbaccel.display.live_panel import Views
from nbaccel.display.run_view import PanelSink, RunView
from nbaccel.features.sweep.finished_runs import FinishedRuns
from nbaccel.features.sweep.slots import choose_slots
from nbaccel.features.sweep.sweep import FOLDER, configurations, line_on_copies, own_bytes, refuse_a_full_host
from nbaccel.features.sweep.sweep_cell import SweptCell, lists_of, values_to_sweep
from nbaccel.features.sweep.sweep_runs import counted
from nbaccel.features.sweep.sweeping import Sweeping
from nbaccel.launching.diagnosis import PostMortem
from nbaccel.launching.gpu_trouble import before_a_run, holder_name
from nbaccel.launching.inline import post_mortem_here, run_inline
from nbaccel.launching.ipc.spec import LaunchSpec, Results
from nbaccel.launching.kernel_models import CudaMemory, ModelsOnHost, held_here, kernel_freed
from nbaccel.launching.launcher import Launcher, default_launcher, refuse_nested_launch
from nbaccel.launching.plan import LaunchPlan, draws_as_here
from nbaccel.launching.preflight import ProcessState
from nbaccel.launching.run import Run, RunOrigin
from nbaccel.launching.runs import Runs
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.launching.tasks.cell_task import RESULT, CellTask
from nbaccel.namespace.names import made_before_read
from nbaccel.namespace.threads import threads_held_by
from nbaccel.namespace.wrappers import plain, take_off_forward
from nbaccel.notebook.background import Background, CellPlace, CellScreen, why_not_in_the_background
from nbaccel.notebook.cell_run import (
    CellRun,
    DisplayData,
    Host,
    how_a_cell_ended,
    interrupts_in_one_line,
    raise_if_missing,
    with_reasons,
)
from nbaccel.notebook.cell_source import read_cell
from nbaccel.notebook.memory_report import RankMemory
from nbaccel.notebook.persistent_session import PersistentSession, of_the_start
from nbaccel.notebook.shell_hooks import CudaWatch
from nbaccel.notebook.shortages import refuse_what_cannot_fit, shortages
from nbaccel.notebook.stop_control import FormerButton, StopControl, steered
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
from nbaccel.output.screens import ConsoleScreen, JupyterScreen

__all__ = ["LastRun", "Session"]

SETUP = "nbaccel.train.setup:setup_rank"
"""Setup that gives every rank its process group and, unless the notebook has the name, `accelerator`."""

_ACCELERATOR = "accelerator"

_MOST_THREADS = 3
"""Number of lines about threads of the notebook before a run."""

_MAY_HAVE_CHANGED = "ranks of a second start would see a notebook that has changed since; without --bg"


@dataclass(frozen=True, slots=True)
class LastRun:
    """The end of the last run: "Cell In[5]", "stopped"."""

    cell: str
    end: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.cell} {self.end} after {self.seconds:.1f} s"


class Session:
    """Runs cells of one notebook.

    launcher: None for this process's.  setup: what every rank does before the cell, None for nothing.
    survey: examines the machine.  cuda: the watch that exists since the extension was loaded.
    """

    def __init__(
        self,
        shell: Any,
        launcher: Launcher | None = None,
        setup: str | None = SETUP,
        survey: Callable[[], Survey] = Survey.take,
        cuda: CudaWatch | None = None,
    ) -> None:
        self.shell = shell
        self.survey = survey
        self.configuration = Configuration()
        self.cuda = cuda or CudaWatch()
        self.last_run: LastRun | None = None
        self.last_plan: LaunchPlan | None = None  # the plan of ranks that were started for a cell
        self.rank_memory = RankMemory()
        self.background = Background(self.say, self._place)
        self._views = Views()
        self._former_button = FormerButton(getattr(shell, "kernel", None))
        self._launcher = launcher
        self._setup = setup
        self._told: set[str] = set()
        self.stay = PersistentSession(
            shell.user_ns, lambda: self.launcher, lambda: self.survey(), self.cuda.cell_of, setup, self.say
        )

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

    def run(self, asked: RunOptions, body: str, typed: str = "") -> Any:
        """Run a cell's body in ranks and bring its results back; return the value of its last expression.

        typed: the flags as they were typed.

        Raises:
            LaunchRefused, UsageError, SyntaxError: nothing was started.
            The error of the first rank that failed; KeyboardInterrupt, TimeoutError: the run was stopped;
            ResultsMissing: it ended well, but a name of `--out` did not come. Values that came are in the notebook.
        """
        if asked.sweep:
            return self._sweep(asked, body, typed)
        if asked.check:
            return self._check(asked, body)
        if asked.speed:
            return self._speed(asked, body)
        with interrupts_in_one_line():
            host, plan, source, task, spec = self._plan(asked, body)
            origin = self._origin(plan, typed)
            if plan.options.bg:
                if not (why := why_not_in_the_background(plan.start.method, self.shell, self.survey().platform)):
                    return self._leave(host, plan, source, task, spec, origin)
                self.say(f"--bg: {why}, so this cell waits for its run")
        if plan.start.method == "inline":
            return self._run_inline(spec, source.name, task, self._show(plan, source, spec, PanelSink()), origin)
        with steered(self.shell, self._former_button) as (frames, beside):
            shown = self._show(plan, source, spec, frames)
            run = CellRun(plan, source, task, spec, shown, self._told, self.launcher.remember, origin)
            self.rank_memory.begin(source.name)
            freed = kernel_freed(self._movable(plan), self.say) if plan.options.free_kernel else nullcontext()
            try:
                with interrupts_in_one_line(), freed:
                    run.go(host, listeners=[self.rank_memory], beside=beside)
            finally:
                if run.is_over:  # also after an interrupt while models were moved back, raised after this
                    value = self._conclude_and_show(run)
            return value

    def _plan(self, asked: RunOptions, body: str) -> tuple[Host, LaunchPlan, CellSource, CellTask, LaunchSpec]:
        """Decide on host, plan and task of a cell; refuse what cannot work, and print the notes before a run."""
        options, source, news_of_the_source = self._read(asked, body)
        if asked.keep and not self.stay.is_on:
            self.stay.start(of_the_start(options))
        survey = self.survey()
        host, plan, task = self._choose_host(asked, options, source, survey)
        options.shown_ranks(plan.devices.num_processes)  # refuses a rank that does not exist, before any output
        needed = self._needed(task, source) if host is self.launcher else {}
        cells = self.shell.history_manager.input_hist_raw[:-1]  # the last one is running
        is_asked_for = plan.options.free_kernel or (host is self.launcher and plan.devices.gpus)
        aside = self._movable(plan) if is_asked_for else ModelsOnHost({}, CudaMemory(()))
        carried = refuse_what_cannot_fit(plan, needed, survey, cells, aside)
        if host is self.launcher:
            self.last_plan = plan
        self.say(str(plan) if host is self.launcher else f"in {host}")
        if news_of_the_source:
            self.say(news_of_the_source)
        if host is self.launcher:
            self._say_what_is_short(plan, source, needed, carried, survey, aside)
        return host, plan, source, task, plan.spec(task, self._setup, wants_results=task.leaves_all or bool(task.out))

    def _read(self, asked: RunOptions, body: str) -> tuple[RunOptions, CellSource, str]:
        """Return the options of a cell and its source, and a line about the checkpoint that it continues from."""
        refuse_nested_launch()
        options = asked.over(self.configured())
        refuse_contradictions(options)
        refuse_wrong_places(options)
        options, news_of_the_source = without_a_missing_source(options)
        refuse_without_input(options, self.shell)
        self._keep_runs(options)
        self.background.make_room(for_another=bool(options.bg))
        source = read_cell(self.shell, body)
        self._check_names(options, body)
        return options, source, news_of_the_source

    def _choose_host(
        self, asked: RunOptions, options: RunOptions, source: CellSource, survey: Survey
    ) -> tuple[Host, LaunchPlan, CellTask]:
        """Return the host of a cell, its plan and its task: persistent ranks, or else new ranks."""
        if self.stay.is_on:
            return self.stay.place(asked, options, source)
        if asked.only is not None:
            raise LaunchRefused(
                f"--only {asked.only} names ranks that stay, and none do: %accelerate start, or leave it out."
            )
        task = CellTask(source, self.shell.user_ns, options.names_back, options.inputs or (), debugged=options.pdb)
        if draws_as_here(options, task):
            task.draw_as_here()
        here = ProcessState.now()
        return (
            self.launcher,
            LaunchPlan.of_cell(options, task, survey, here, self.cuda.cell_of(here.why_forks_fail)),
            task,
        )

    def _origin(self, plan: LaunchPlan, typed: str) -> RunOrigin:
        """Return the flags of a run, and its seed, as `nbaccel.runs` keeps them."""
        choices = {name: text_of(value) for name, value in chosen(self.configuration.parser, plan.options).items()}
        return RunOrigin(" ".join(typed.split()), choices, plan.settings.seed)

    def _movable(self, plan: LaunchPlan) -> ModelsOnHost:
        """Return what the notebook could move away from the GPUs of a run."""
        return ModelsOnHost(self.shell.user_ns, CudaMemory({gpu.index for gpu in plan.devices.gpus}))

    def say(self, line: str) -> None:
        """Print one line of the project in the cell's output."""
        ConsoleScreen().write("stdout", f"{line}\n")

    def _needed(self, task: CellTask, source: CellSource) -> dict[str, Any]:
        """Return the names that the cell reads from the notebook, with their present values."""
        made = made_before_read(source.code)
        return {name: value for name, value in task.values_to_send().items() if name not in made}

    def _say_what_is_short(
        self,
        plan: LaunchPlan,
        source: CellSource,
        needed: Mapping[str, Any],
        carried: Sequence[str],
        survey: Survey,
        aside: ModelsOnHost,
    ) -> None:
        """Name the things that the ranks of the cell will lack or have little of."""
        if plan.start.method == "fork":
            for name, thread in list(threads_held_by(needed).items())[:_MOST_THREADS]:
                self.say(f"{name} works by a thread of the notebook ({thread}), which ranks lack: make it in this cell")
        holdings = held_here(self.shell.user_ns)
        freed_on = aside.bytes_on if plan.options.free_kernel else lambda device: 0
        for line in [
            *before_a_run(plan.devices.gpus, freed_on),
            *carried,
            *shortages(plan, source.code, needed, survey, holdings, aside),
        ]:
            self.say(line)

    def start_zygote(self) -> None:
        """Start a clean process for the first cell that needs one; return while it is still loading torch."""
        self.launcher.resources.zygote()

    def close(self) -> None:
        """End everything that runs for this notebook."""
        self.background.close()
        self.stay.close()
        self._former_button.close()

    def _check_names(self, options: RunOptions, body: str) -> None:
        """Refuse names that can only be mistakes, before anything starts."""
        known = self.shell.user_ns.keys() | self.stay.names
        mentioned = set(re.findall(r"[^\W\d]\w*", body))
        _refuse_unknown("--out", options.names_back, known | mentioned, "neither the notebook nor the cell has")
        _refuse_unknown("--in", options.inputs, known, "the notebook has not")

    def _show(
        self, plan: LaunchPlan, source: CellSource, spec: LaunchSpec, frames: PanelSink, screen: Screen | None = None
    ) -> RunView:
        return self._views.show(
            self.shell,
            spec.world_size,
            plan.facts(source.name),
            self.survey().platform,
            is_plain=bool(plan.options.plain),
            frames=frames,
            screen=screen,
        )

    # --- in the background -------------------------------------------------------------------------------------

    def _place(self) -> CellPlace:
        """Return where a run in the background is shown: in the cell that runs now, also after its end."""
        # Clicks come between cells, as all messages do.
        button = StopControl(None, set(), "Stop: %accelerate stop", self._former_button)
        return CellPlace(CellScreen(self.shell.kernel), button, button)

    def _leave(
        self,
        host: Host,
        plan: LaunchPlan,
        source: CellSource,
        task: CellTask,
        spec: LaunchSpec,
        origin: RunOrigin,
    ) -> None:
        """Start the run and let the cell end."""
        place = self._place()
        shown = self._show(plan, source, spec, place.frames, place.screen)
        spec = replace(spec, no_restart=_MAY_HAVE_CHANGED)
        run = CellRun(plan, source, task, spec, shown, self._told, self.launcher.remember, origin)
        self.rank_memory.begin(source.name)
        self.background.begin(run, lambda: self._conclude(run), host, [self.rank_memory], [place.beside])

    # --- one run for each of several values --------------------------------------------------------------------

    def _sweep(self, asked: RunOptions, body: str, typed: str) -> None:
        """Run a cell once for each combination of the values of `--sweep`; the notebook gets lists.

        Raises:
            LaunchRefused, UsageError, SyntaxError: nothing was started.
            KeyboardInterrupt: it was interrupted; the lists have what there is.
        """
        with interrupts_in_one_line():
            options, sweeping, notes = self._plan_sweep(asked, body)
            sweeping.origin = replace(self._origin(sweeping.plans[0], typed), seed=options.seed)
        out = options.names_back or ()
        with steered(self.shell, self._former_button) as (frames, beside), interrupts_in_one_line():
            try:
                sweeping.run(
                    self.launcher,
                    self.shell,
                    notes=notes,
                    is_plain=bool(options.plain),
                    frames=frames,
                    beside=beside,
                )
            finally:
                if (runs := sweeping.runs) is not None:
                    self.shell.user_ns.update(lists_of(runs, sweeping.left, out))
                    self.last_run = LastRun(sweeping.work.name, counted(runs), sweeping.seconds)
                    assert isinstance(sweeping.work, SweptCell)
                    for line in sweeping.work.lines(runs, sweeping.left):
                        self.say(line)

    def _plan_sweep(self, asked: RunOptions, body: str) -> tuple[RunOptions, Sweeping, Sequence[str]]:
        """Decide on slots and plans of a sweep; refuse what cannot work, and print the notes before it."""
        options, source, _ = self._read(asked, body)
        if self.stay.is_on:
            raise LaunchRefused("ranks stay in this notebook, and a sweep needs its own: %accelerate stop ends them.")
        configs = configurations(values_to_sweep(options.sweep or (), self.shell.user_ns))
        first_seed = configs[0].get("seed", options.seed or 0)
        options = replace(options, seed=first_seed)
        survey = self.survey()
        ranks = asked.world_size
        chosen = choose_slots(
            options.slots,
            options.gpus_per_run or ranks or 1,
            options.devices,
            bool(options.cpu),
            survey,
            ranks=ranks,
            most=len(configs),
            name_of=holder_name,
        )
        work = SweptCell(source, self.shell.user_ns, options, configs, self._setup, how_a_cell_ended)
        here, task = ProcessState.now(), work.task(configs[0])
        assert isinstance(task, CellTask)
        since = self.cuda.cell_of(here.why_forks_fail)
        each = replace(options, num_processes=chosen.slots[0].devices.num_processes)
        plans = [
            LaunchPlan.of_cell(replace(each, devices=slot.asked), task, survey, here, since) for slot in chosen.slots
        ]
        if plans[0].start.method == "inline":
            raise LaunchRefused(
                f"a sweep needs processes of its own, and here none can start: {plans[0].start.reason}."
            )
        work.plan = plans[0]
        needed, aside = self._needed(task, source), ModelsOnHost({}, CudaMemory(()))
        cells = self.shell.history_manager.input_hist_raw[:-1]
        carried = refuse_what_cannot_fit(plans[0], needed, survey, cells, aside)
        refuse_a_full_host(plans[0], len(plans), survey)
        copies = line_on_copies(plans[0], len(plans), task, survey, own_bytes())
        self.last_plan = plans[0]
        seeds = "seeds as swept" if "seed" in configs[0] else f"seed {first_seed}"
        how = str(plans[0]).replace(f"seed {first_seed}", seeds, 1)
        self.say(f"{plural(len(configs), 'run')}, {len(plans)} at a time, each: {how}")
        self._say_what_is_short(plans[0], source, needed, carried, survey, aside)
        finished = FinishedRuns(FOLDER)
        sweeping = Sweeping(
            work, configs, chosen.slots, plans, survey, finished, options.checkpoint_dir, options.plot or ()
        )
        return options, sweeping, [*work.notes(), *chosen.notes, *filter(None, [copies])]

    # --- a dry run ---------------------------------------------------------------------------------------------

    def _check(self, asked: RunOptions, body: str) -> None:
        """Try a cell in a dry run, and show what that says of the whole run; the notebook stays as it is.

        Raises:
            LaunchRefused, UsageError, SyntaxError: nothing was started.  KeyboardInterrupt: it was interrupted.
            CheckFailed: with `--strict`, if the cell would not end well.
        """
        from nbaccel.features.check.check import CellCheck  # dry runs are an eighth of what a first cell would load

        with interrupts_in_one_line():
            plan, task = self._plan_to_throw_away(asked, body, "a check")
            check = CellCheck(self.launcher, plan, task, self._setup, self.survey().platform, self.say)
            report = check.run()
        JupyterScreen(self.shell).publish({"kind": "display", "data": report.bundle()})
        if report.has_red and plan.options.strict:
            raise CheckFailed(f"the check of {task.source.name} found what would not end well: see its red lines.")

    def _speed(self, asked: RunOptions, body: str) -> None:
        """Try which changes make a cell faster, and show the lines to paste; the notebook stays as it is.

        Raises: see `CellSpeed.run`.
        """
        from nbaccel.features.speed.cell_speed import CellSpeed  # as in `_check`

        with interrupts_in_one_line():
            plan, task = self._plan_to_throw_away(asked, body, "a trial")
            CellSpeed(self.shell, self.launcher, plan, task, self._setup, self.survey(), self.say).run()

    def _plan_to_throw_away(self, asked: RunOptions, body: str, what: str) -> tuple[LaunchPlan, CellTask]:
        """Return plan and task of a cell whose ranks are discarded.  what: the purpose, for messages."""
        if self.stay.is_on:
            raise LaunchRefused(f"ranks stay in this notebook, and {what} needs its own: %accelerate stop ends them.")
        _, plan, _, task, _ = self._plan(asked, body)
        if plan.start.method == "inline":
            raise LaunchRefused(
                f"{what} needs processes that it can throw away, and here none can start: {plan.start.reason}."
            )
        return plan, task

    def remembered(self) -> Runs:
        """Return the runs of this notebook, with those that `keep-runs` has kept from other kernels.

        Raises:
            UsageError, LaunchRefused: the choices of nbaccel.toml are wrong, or the file of runs cannot be used.
        """
        self._keep_runs(self.configuration.options)
        return self.launcher.runs

    def _keep_runs(self, options: RunOptions) -> None:
        """Keep the runs from now on in the file that `options` name, if any, and read it the first time.

        Raises:
            LaunchRefused: it cannot be read or written.
        """
        try:
            notice = self.launcher.runs.keep_in(options.keep_runs)
        except OSError as error:
            raise LaunchRefused(
                f"keep-runs: {options.keep_runs} cannot be used ({error.strerror}); name another file, or leave it out."
            ) from None
        if notice:
            self.say(notice)

    # --- after the run -----------------------------------------------------------------------------------------

    def show_last(self) -> None:
        """Show panel and picture of the last run in the cell that runs now, and print how it ended."""
        current, run = self.background.current, self.launcher.last_run
        if current is not None and not current.is_over:
            self.say(f"{current}: %accelerate attach shows it")
        if run is None:
            return self.say("this kernel has not run anything in ranks yet")
        if is_notebook_kernel():
            screen = JupyterScreen(self.shell)
            if run.history.has_curves:
                screen.publish({"kind": "display", "data": {"text/plain": run.text, "text/html": run.panel}})
            data, metadata = run.shown()
            screen.publish({"kind": "display", "data": data, "metadata": metadata})
        self.say(f"{run.facts.title}: {run.in_a_line()}")

    def _conclude(self, run: CellRun) -> Any:
        """Conclude a run that is over: bring its values back, raise its error, and record how it went."""
        self.last_run = LastRun(run.source.name, run.end, run.seconds)
        try:
            return run.conclude(self.shell.user_ns, self.say)
        finally:
            if run.outcome.ended.stays:
                self.stay.after(run.error)

    def _conclude_and_show(self, run: CellRun) -> Any:
        try:
            return self._conclude(run)
        finally:
            # Last, because it takes a moment that an interrupt may end: everything else is in the notebook.
            run.show_end()

    def _run_inline(self, spec: LaunchSpec, title: str, task: CellTask, shown: RunView, origin: RunOrigin) -> Any:
        """Run the cell in the notebook's own process."""
        leaving = self._as_written if task.leaves_all else self._only_out_changes
        error: BaseException | None = None
        post_mortem: PostMortem | None = None
        stopped, value = "", None
        try:
            with shown.until_its_end(), leaving(task):
                try:
                    run_inline(spec, [shown])
                except (Exception, KeyboardInterrupt) as failure:
                    post_mortem = post_mortem_here(title, failure, task)
                    raise
            results = task.results_here()
            value = results.values.get(RESULT)
            raise_if_missing(results.missing, task.out)
        except RunStopped as stop:
            stopped = str(stop)
            self.say(stopped)
            results = task.results_here()
            if results.missing:
                self.say(f"not brought back: {with_reasons(results.missing)}")
        except BaseException as failure:
            error = failure
            raise
        finally:
            start = spec.start
            run = Run([value], shown.history, error, start.method, start.reason, "", shown.seconds, stopped=stopped)
            run.facts, run.state, run.origin = shown.facts, shown.state, origin
            self.launcher.remember(run.light(), post_mortem)
            del run, error
        return _value_of(results)

    @contextmanager
    def _as_written(self, task: CellTask) -> Iterator[None]:
        """Keep the cell's names, without the wrappers that training has put around their objects."""
        namespace = self.shell.user_ns
        before = dict(namespace)
        try:
            yield
        finally:
            for name, value in list(namespace.items()):
                if before.get(name) is not value:
                    namespace[name] = plain(value)
                take_off_forward(plain(value))
            if _ACCELERATOR not in before and _ACCELERATOR not in task.names_mentioned():
                namespace.pop(_ACCELERATOR, None)

    @contextmanager
    def _only_out_changes(self, task: CellTask) -> Iterator[None]:
        """Restore names that `--out` does not list."""
        namespace = self.shell.user_ns
        before = dict(namespace)
        try:
            yield
        finally:
            after = task.results_here().values
            before |= {name: after[name] for name in task.out if name in after}
            for name in namespace.keys() - before.keys():
                del namespace[name]
            namespace.update(before)


def _refuse_unknown(flag: str, names: Collection[str] | None, known: Collection[str], who_has_not: str) -> None:
    for name in names or ():
        if name in known:
            continue
        near = difflib.get_close_matches(name, [other for other in known if not other.startswith("_")], n=1)
        raise LaunchRefused(
            f"{flag} {name}: {who_has_not} a variable of that name"
            f"{f' (did you mean {near[0]}?)' if near else ''}; nothing was started. Correct it or leave it out."
        )


def _value_of(results: Results) -> Any:
    """Return the last expression's value if it is small data, else an object with its display."""
    shown = results.facts.get("result")
    if shown is None or RESULT in results.values:
        return results.values.get(RESULT)
    return DisplayData(shown["data"], shown["metadata"])
