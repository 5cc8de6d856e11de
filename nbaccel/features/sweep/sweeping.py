"""Sweeping: one function or cell for each of several configurations, some side by side. Runs in the kernel.

Each configuration runs in ranks of its own, in a `SweepSlot`, as soon as one is free: own rendezvous, devices,
control page, log and folder. A failure, a shortage of memory or a hang ends that run alone. All are watched by the
calling thread, see `processes/run_coroutine.py`. `sweep.py` has the public function; cells come here, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from nbaccel.base.hardware import Survey
from nbaccel.base.quantities import duration, plural
from nbaccel.base.settings import RunSettings
from nbaccel.display.history import History
from nbaccel.display.run_view import PanelSink, RunView, failure_in_a_line
from nbaccel.display.summary import RunFacts, RunState
from nbaccel.errors import LaunchRefused
from nbaccel.features.sweep.finished_runs import FinishedRuns, as_key, as_one_of_a_sweep, describe_configuration
from nbaccel.features.sweep.queued_runs import InterruptRelay, side_by_side
from nbaccel.features.sweep.shared_files import SharedFiles
from nbaccel.features.sweep.slots import SweepSlot
from nbaccel.features.sweep.sweep_runs import SweepRuns, counted
from nbaccel.features.sweep.sweep_table import SweepRow, SweepTable, SweepView, view_of
from nbaccel.launching.diagnosis import PostMortem
from nbaccel.launching.gpu_trouble import before_a_run
from nbaccel.launching.ipc.spec import LaunchSpec, Task
from nbaccel.launching.launcher import Launcher
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.preflight import ProcessState, threads_per_rank
from nbaccel.launching.processes.interaction import Pollable
from nbaccel.launching.processes.rank_results import RankResults
from nbaccel.launching.processes.run_coroutine import RunCoroutine
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.run import NO_ORIGIN, Run, RunOrigin, seen
from nbaccel.output.screens import SilentScreen

__all__ = [
    "SweepWork",
    "Sweeping",
]

_CHECKPOINTS = "checkpoints"
_LOOK_S = 2.0
_MOST_LINES = 3
"""Number of lines on files that several runs write."""


class SweepWork(Protocol):
    """The thing that a sweep runs: a function, or a cell.

    Attributes:
        name: It in words, for the title.
        source: A hash of what it does; empty if no run is to be found again.
        setup: See `LaunchSpec`.
    """

    name: str
    source: str
    setup: str | None

    def task(self, config: Mapping[str, Any]) -> Task:
        """Return the work of the ranks of one run."""

    def seed_of(self, config: Mapping[str, Any]) -> int | None:
        """Return the seed of a run; None if it is not seeded."""

    def results(self, ended: RankResults) -> tuple[list[Any], dict[str, Any]]:
        """Return the values of a run by rank, and what it has left by name."""

    def end(self, run: Run, ended: RankResults) -> tuple[BaseException | None, str]:
        """Return the error of a run, and its end in one word."""


class _Ticking(Pollable):
    """Lets the view of a sweep show what is due, and says which files its runs write side by side.

    Args:
        example: A swept name, for the advice.
    """

    def __init__(self, view: SweepView, files: SharedFiles, example: str) -> None:
        self._view = view
        self._files = files
        self._example = example
        self._looks_at = 0.0
        self._lines = 0

    def due_in(self, now: float) -> float | None:
        return self._view.due_in(now)

    def tick(self, now: float, interrupt: Callable[[], None]) -> None:
        self._view.tick(now)
        if now >= self._looks_at:
            self._looks_at = now + _LOOK_S
            self.look()

    def look(self) -> None:
        """Say that two runs have written the same files, if they have since the last call."""
        found = list(self._files.found())
        if not found or self._lines == _MOST_LINES:
            return
        self._lines += 1
        path, one, other = found[0]
        path = os.path.relpath(path)
        more = f" and {plural(len(found) - 1, 'more file')}" if len(found) > 1 else ""
        stem, suffix = os.path.splitext(path.lstrip("./").partition(os.sep)[0])
        self._view.say(
            f"runs {one} and {other} both write {path}{more}, side by side: what one of them reads may be the other's, "
            f'and is not kept. Put a swept value into the name, as in f"{stem}-{{{self._example}}}'
            f'{suffix}", or let one run go at a time: 1 slot'
        )


_WRITTEN_FILES = "nbaccel.features.sweep.written_files:WrittenFiles"


class Sweeping:
    """One sweep, from its first run to its last.

    Args:
        configs: The values of each run.
        slots: Where runs go, with the plan of a run at each.
        finished: What earlier sweeps have done, and the folders of the runs.
        checkpoint_dir: The folder in which each run has one for its checkpoints; None for the run's own.
        plots: Names of the curves to draw.
        origin: The choices for the sweep.

    Attributes:
        runs: The result, also of a sweep that was interrupted; None before its end.
        seconds: Its duration.
        left: What each run has left by name; also of a failed one.
        files: Those that the runs write.
    """

    def __init__(
        self,
        work: SweepWork,
        configs: Sequence[dict[str, Any]],
        slots: Sequence[SweepSlot],
        plans: Sequence[LaunchPlan],
        survey: Survey,
        finished: FinishedRuns,
        checkpoint_dir: str | None = None,
        plots: tuple[str, ...] = (),
        origin: RunOrigin = NO_ORIGIN,
    ) -> None:
        self.work = work
        self.configs = configs
        self.slots = slots
        self.plans = plans
        self.finished = finished
        self.title = f"sweep of {work.name}"
        self.runs: SweepRuns | None = None
        self.seconds = 0.0
        self.left: list[dict[str, Any]] = []
        self._survey = survey
        self._checkpoint_dir = checkpoint_dir
        self._plots = plots
        self.files = SharedFiles()
        self.origin = origin
        self._threads = threads_per_rank(
            survey.cpu_count, len(slots) * plans[0].devices.num_processes, ProcessState.now().threads
        )

    def run(
        self,
        launcher: Launcher,
        shell: Any,
        *,
        notes: Sequence[str] = (),
        is_plain: bool = False,
        frames: PanelSink | None = None,
        beside: Sequence[Pollable] = (),
    ) -> SweepRuns:
        """Do all runs that are not finished, and return all, in the order of the configurations.

        Args:
            notes: Lines to show first.
            is_plain, frames: See `Views.show`.
            beside: Checked meanwhile.

        Raises:
            KeyboardInterrupt: It was interrupted; the run that is remembered has what there is.
            NbaccelError: Nothing has run, since the first run could not be started.
        """
        queued = [_QueuedRun(self, number, config, launcher) for number, config in enumerate(self.configs)]
        for number, each in enumerate(queued):
            each.is_repeated = bool(each.key) and each.key in {other.key for other in queued[:number]}
        with launcher.turn():
            launcher.load(self.work.setup)
            rows = [each.row for each in queued]
            table = SweepTable(self.title, rows, time.monotonic())
            view = view_of(launcher.views, shell, table, self._survey.platform, is_plain=is_plain, frames=frames)
            for line in [*notes, *before_a_run([gpu for slot in self.slots for gpu in slot.devices.gpus])]:
                view.say(line)
            found = [each for each in queued if each.is_found]
            if found:
                view.say(
                    f"{len(found)} of {plural(len(queued), 'run')} finished earlier (same source, values and seed, in "
                    f"{self.finished.folder}), and not done again"
                )
            waiting = [each for each in queued if not each.is_found]
            for each in waiting:
                each.view, each.is_first = view, each is waiting[0]
            interrupts_so_far = 0
            try:
                ticking = _Ticking(view, self.files, next(iter(self.configs[0]), "run"))
                interrupts_so_far = side_by_side(waiting, len(self.slots), [ticking, *beside])
                ticking.look()
            except LaunchRefused:  # of the first: nothing has run, and nothing is shown
                raise
            except BaseException:
                self._conclude(queued, table, view, launcher)
                raise
            runs, seconds = self._conclude(queued, table, view, launcher)
            for line in self._last_lines(table, runs, seconds, with_failures=view.is_live):
                view.say(line)
        if interrupts_so_far:
            raise KeyboardInterrupt(
                f"the sweep was interrupted after {duration(seconds)}: {counted(runs)}. nbaccel.last_run.runs has "
                "them, and the same sweep does only what is missing"
            )
        return runs

    def _conclude(
        self, queued: Sequence[_QueuedRun], table: SweepTable, view: SweepView, launcher: Launcher
    ) -> tuple[SweepRuns, float]:
        self.runs = runs = SweepRuns([each.taken() for each in queued], self.title)
        self.left = [each.left for each in queued]
        self.seconds = seconds = time.monotonic() - table.began_at
        view.end()
        launcher.remember(self._as_one(runs, seconds), self._post_mortem(queued))
        return runs, seconds

    def spec_of(self, config: Mapping[str, Any], place: int, folder: Path) -> LaunchSpec:
        """Return the spec of the run of `config` at a slot."""
        plan = self.plans[place]
        name = folder.name
        checkpoints = folder / _CHECKPOINTS if self._checkpoint_dir is None else Path(self._checkpoint_dir) / name
        own = RunSettings(
            seed=self.work.seed_of(config),
            seeds_alike=True if plan.settings.seeds_alike else None,
            checkpoint_dir=str(checkpoints),
            project_dir=str(folder),
            swept_values=as_one_of_a_sweep(config) or folder.name,
        )
        spec = plan.spec(self.work.task(config), self.work.setup, wants_results=True)
        settings = own.over(plan.settings)
        return replace(
            spec, settings=settings, threads=self._threads, parts=((_WRITTEN_FILES, FinishedRuns.files_in(folder)),)
        )

    def key_of(self, config: Mapping[str, Any]) -> str:
        """Return the key by which a finished run is found; empty if there is none."""
        plan = self.plans[0]
        if not self.work.source:
            return ""
        seed = self.work.seed_of(config)
        return as_key(self.work.source, config, seed, plan.settings, plan.devices.num_processes)

    def facts_of(self, config: Mapping[str, Any], slot: SweepSlot | None) -> RunFacts:
        """Return the texts of one run beside its numbers."""
        names = () if slot is None else slot.devices.names()
        return RunFacts(describe_configuration(config) or self.title, self.title, names, self._plots)

    def _as_one(self, runs: SweepRuns, seconds: float) -> Run:
        """Return the sweep as one run, to be remembered: its value is the list of theirs."""
        start = self.plans[0].start
        errors = [run.error for run in runs if run.error is not None]
        values = [[run.value if run.values else None for run in runs]]
        whole = Run(values, History(1), None, start.method, start.reason, "", seconds, runs=list(runs))
        words = {run.state.word for run in runs if run.state is not None}
        word = "stopped" if "stopped" in words else "failed" if errors else "done"
        whole.origin = self.origin
        whole.facts, whole.state = RunFacts(self.title), RunState(word, f"{counted(runs)} in {duration(seconds)}")
        return whole.light()

    def _post_mortem(self, queued: Sequence[_QueuedRun]) -> PostMortem | None:
        return next((each.post_mortem for each in queued if each.post_mortem is not None), None)

    def _last_lines(self, table: SweepTable, runs: SweepRuns, seconds: float, with_failures: bool) -> Iterator[str]:
        """Yield the lines at the end.

        Args:
            with_failures: No line has said yet how each run ended.
        """
        side = f" on {plural(len(self.slots), 'slot')}" if len(self.slots) > 1 else ""
        yield f"{self.title}: {counted(runs)}{side}, {duration(seconds)}; what they printed: {self.finished.folder}"
        if with_failures:
            yield from table.failures()
        failed = [run.log_path for run in runs if run.state is not None and run.state.word == "failed" and run.log_path]
        if failed:
            yield f"the traceback of a failed run is at the end of its log, such as {failed[0]}"
        for words, why in self.finished.unkept[:1]:
            count = len(self.finished.unkept)
            yield f"{plural(count, 'run')} will be done again by the same sweep, as {words}: {why}"


class _QueuedRun:
    """One run of a sweep: it waits, goes on, and is over.

    Attributes:
        run: Its result; None before.
        left: What it has left by name.
        post_mortem: What is known of its end, if it failed.
        is_first: Nothing has run before it, so if it cannot be started, nothing can.
        key: By which it is found again; empty if it is not.
        is_repeated: An earlier run has the same values.
    """

    def __init__(self, sweeping: Sweeping, number: int, config: dict[str, Any], launcher: Launcher) -> None:
        self._sweeping = sweeping
        self._number = number
        self.config = config
        self._launcher = launcher
        self.key = sweeping.key_of(config)
        self.is_repeated = False
        self._relay = InterruptRelay()
        self.saves_itself = sweeping.plans[0].settings.checkpoint_every is not None
        self.post_mortem: PostMortem | None = None
        self.is_first = False
        self.view: SweepView | None = None
        facts = sweeping.facts_of(config, None)
        self.row = SweepRow(describe_configuration(config) or "one run", facts=facts)
        self._seed = sweeping.work.seed_of(config)
        self.run: Run | None = None
        self.left: dict[str, Any] = {}
        found = sweeping.finished.find(config, self.key) if self.key else None
        self.is_found = found is not None
        if found is not None:
            run, self.left = found
            self._take(run, "done")
            self.row.is_found = True

    def interrupt(self) -> None:
        """Ask the run to end at its step; the second time, at once."""
        self._relay.interrupt()

    def begin(self, place: int) -> RunCoroutine[None]:
        """Do the run at a slot, see `queued_runs.QueuedRun`."""
        sweeping, slot = self._sweeping, self._sweeping.slots[place]
        facts = sweeping.facts_of(self.config, slot)
        shown = RunView(SilentScreen(), slot.devices.num_processes, facts)
        row = self.row
        row.word, row.place, row.facts, row.history = "running", str(slot), facts, shown.history
        row.began_at = time.monotonic()
        run: Run | None = None
        try:
            has_key = bool(self.key) and not self.is_repeated
            folder = sweeping.finished.begin(self.config, self.key if has_key else f"{self._number}")
            sweeping.files.begin(self._number + 1, FinishedRuns.files_in(folder))
            spec = sweeping.spec_of(self.config, place, folder)
            watching = RunObservers(
                shown, notice=lambda line: None, listeners=[shown], beside=[self._relay], hears_signals=False
            )
            run, ended = yield from self._launcher.as_coroutine(spec, watching, FinishedRuns.log_in(folder))
        except LaunchRefused as refusal:
            if self.is_first:
                raise
            self._failed_to_start(refusal, shown)
        sweeping.files.end(self._number + 1)
        if run is not None:
            self._conclude(run, ended, shown)
        assert self.view is not None
        self.view.ended(self._number + 1)

    def _failed_to_start(self, error: Exception, shown: RunView) -> None:
        run = Run([None], shown.history, error, "", "", "", shown.elapsed_s)
        self._take(run, "failed")

    def _conclude(self, run: Run, ended: RankResults, shown: RunView) -> None:
        seen(run, shown)
        with closing(ended):
            run.error, word = self._sweeping.work.end(run, ended)
            run.values, self.left = self._sweeping.work.results(ended)
            is_alone = ended.failed_alike or len(ended.reports) == 1
            rank = None if is_alone else ended.first_failed
            self.post_mortem = PostMortem.of(self.row.title, word, run.error, ended)
        shown.end(word, run.seconds, run.error, rank)
        self._take(run, word, rank)
        finished = self._sweeping.finished
        if word == "done" and not self._sweeping.files.is_alone(self._number + 1):
            finished.unkept.append(
                (describe_configuration(run.config), "it wrote a file that a run beside it wrote, too")
            )
        elif word == "done" and not self.is_repeated:
            finished.keep(run, self.left, self.key)
        elif word == "failed" and run.error is not None:
            FinishedRuns.add_traceback(run.log_path, run.error)

    def _take(self, run: Run, word: str, rank: int | None = None) -> None:
        """Note the run as over.

        Args:
            rank: See `RunView.end`.
        """
        run.config = dict(self.config)
        run.origin = replace(self._sweeping.origin, flags=describe_configuration(self.config), seed=self._seed)
        run.facts = self.row.facts
        why = "" if run.error is None or word != "failed" else failure_in_a_line(run.error, rank)
        run.state = RunState.ended(word, run.seconds, run.history.steps, why)
        self.run, row = run, self.row
        row.word, row.history, row.seconds, row.why = word, run.history, run.seconds, why

    def taken(self) -> Run:
        """Return the run; of one that has not begun, or was cut off, that it was stopped."""
        if self.run is None:
            has_begun = self.row.word != "waiting"
            words = "was ended before its result came" if has_begun else "had not begun when the sweep was stopped"
            seconds = time.monotonic() - self.row.began_at if has_begun else 0.0
            run = Run([None], self.row.history, KeyboardInterrupt(f"this run {words}"), "", "", "", seconds)
            self._take(run, "stopped")
            if not has_begun:
                run.state = RunState("stopped", "not begun")
        assert self.run is not None
        return self.run
