"""Session: one notebook's cells in ranks, from the flags to the variables that come back. Runs in the kernel.

The extension owns one per shell. It remembers what the notebook configured, which cell initialised CUDA, and how the
last run went; it holds no process and no variable of the user's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nbaccel.errors import LaunchRefused, ResultsMissing
from nbaccel.hardware import Survey
from nbaccel.intervals import said
from nbaccel.launch.here import ProcessState
from nbaccel.launch.inline import run_inline
from nbaccel.launch.launcher import Launcher, Outcome, default_launcher, refuse_nested_launch
from nbaccel.launch.rank.cell import RESULT, CellSource, CellTask
from nbaccel.launch.screen.audience import Audience
from nbaccel.launch.screen.router import ConsoleScreen
from nbaccel.launch.spec import LaunchSpec, Results
from nbaccel.notebook.configuration import Configuration
from nbaccel.notebook.cuda_watch import CudaWatch
from nbaccel.notebook.memory import RankMemory
from nbaccel.notebook.options import Options
from nbaccel.notebook.plan import Plan
from nbaccel.notebook.results import install
from nbaccel.notebook.source import read_cell
from nbaccel.notebook.why import PostMortem

__all__ = ["LastRun", "Session", "briefly"]

SETUP = "nbaccel.train.setup:setup_rank"
"""Gives every rank its process group and, unless the notebook has the name, `accelerator`."""


@dataclass(frozen=True, slots=True)
class LastRun:
    """How the last run went: "Cell In[5]", "stopped"."""

    cell: str
    end: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.cell} {self.end} after {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class _Shown:
    """Stands for a last expression whose value stayed in the rank: shows what the rank's notebook would have."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return dict(self.data), dict(self.metadata)

    def __repr__(self) -> str:
        return str(self.data.get("text/plain", "..."))


class Session:
    """Runs cells of one notebook.

    launcher: None for this process's.  setup: what every rank does before the cell, None for nothing.
    survey: looks at the machine.
    """

    def __init__(
        self,
        shell: Any,
        launcher: Launcher | None = None,
        setup: str | None = SETUP,
        survey: Callable[[], Survey] = Survey.take,
    ) -> None:
        self.shell = shell
        self.survey = survey
        self.configuration = Configuration()
        self.cuda = CudaWatch()
        self.last_run: LastRun | None = None
        self.rank_memory = RankMemory()
        self.post_mortem: PostMortem | None = None
        self._audience = Audience()
        self._launcher = launcher
        self._setup = setup

    @property
    def launcher(self) -> Launcher:
        return self._launcher or default_launcher()

    def configured(self) -> Options:
        """What the notebook has chosen; says what nbaccel.toml brought, the first time.

        Raises:
            UsageError: nbaccel.toml cannot be followed.
        """
        options = self.configuration.options
        if news := self.configuration.news():
            self.say(news)
        return options

    def run(self, asked: Options, body: str) -> Any:
        """Run a cell's body in ranks and bring back what was asked for; the value of its last expression.

        Raises:
            LaunchRefused, UsageError, SyntaxError: nothing was started.
            The error of the first rank that failed; KeyboardInterrupt, TimeoutError: the run was stopped;
            ResultsMissing: it ended well, but a name of `--out` did not come. Whatever came is in the notebook.
        """
        refuse_nested_launch()
        options = asked.over(self.configured())
        source = read_cell(self.shell, body)
        task = CellTask(source, self.shell.user_ns, options.out or (), options.inputs or ())
        self._check_names(options, body)
        survey = self.survey()
        plan = Plan.of(options, task, survey, ProcessState.now(), self.cuda.first_cell)
        shown_ranks = options.shown_ranks(plan.devices.num_processes)
        self.say(str(plan))
        spec = plan.spec(task, self._setup)
        if plan.start.method == "inline":
            return self._run_inline(spec, task)
        shown = self._audience.show(
            self.shell, spec.world_size, plan.facts(source.name), survey.platform, is_plain=bool(options.plain)
        )
        self.rank_memory.begin(source.name)
        self.post_mortem = None
        outcome = self.launcher.run(spec, shown, shown_ranks=shown_ranks, listeners=[shown, self.rank_memory])
        error, end = _how_it_ended(outcome, plan)
        self.post_mortem = None if error is None else PostMortem.of(source.name, end, error, outcome.ended)
        try:
            return self._conclude(outcome, plan, source, task, error, end)
        finally:
            outcome.close()
            # Last, because it takes a moment that an impatient interrupt may end: all else is in the notebook by now.
            shown.end(end, outcome.ended.seconds, error, outcome.ended.first_failed)

    def say(self, line: str) -> None:
        """One line of ours in the cell's output."""
        ConsoleScreen().write("stdout", f"{line}\n")

    def start_zygote(self) -> None:
        """Have a clean process ready for the first cell that needs one; returns while it is still loading torch."""
        self.launcher.keeper.zygote()

    def _check_names(self, options: Options, body: str) -> None:
        """Refuse names that can only be mistakes, before anything starts."""
        known = self.shell.user_ns.keys()
        mentioned = set(re.findall(r"[^\W\d]\w*", body))
        _refuse_unknown("--out", options.out, known | mentioned, "neither the notebook nor the cell has")
        _refuse_unknown("--in", options.inputs, known, "the notebook has not")

    # --- after the run -----------------------------------------------------------------------------------------

    def _conclude(
        self, outcome: Outcome, plan: Plan, source: CellSource, task: CellTask, error: BaseException | None, end: str
    ) -> Any:
        """Values into the notebook, what there is to say about them, and then the run's error, if it had one."""
        ended = outcome.ended
        report = ended.reports[0]
        self.last_run = LastRun(source.name, end, ended.seconds)
        if ended.is_timed_out and error is None:
            self.say(_at_the_limit(plan, ended.steps))
        if outcome.start.method != plan.start.method:
            self.say(f"started by {outcome.start.method} after all: {outcome.start.reason}")
        values = _values_of(outcome)
        result = values.pop(RESULT, None)
        facts = {} if report is None else report.facts
        missing = dict.fromkeys(task.out, "rank 0 had ended") if report is None else report.missing
        self._install(values, facts.get("sizes", {}), "" if error is None else f" from the {end} run")
        if error is not None:
            if missing:
                self.say(f"not brought back: {_with_reasons(missing)}")
            raise error
        if not_asked := facts.get("not_asked"):
            self.say(f"not brought back: {', '.join(not_asked)}; add {_them(not_asked)} to --out")
        if not ended.is_timed_out:  # a run that was planned to end somewhere may not have got to the name
            _raise_if_missing(missing, task.out)
        elif missing:
            self.say(f"not brought back: {_with_reasons(missing)}")
        shown = facts.get("result")
        return result if result is not None or shown is None else _Shown(shown["data"], shown["metadata"])

    def _install(self, values: Mapping[str, Any], sizes: Mapping[str, int], whence: str) -> None:
        arrivals = install(values, self.shell.user_ns, sizes)
        if arrivals:
            self.say(f"brought back{whence}: {', '.join(map(str, arrivals))}")

    def _run_inline(self, spec: LaunchSpec, task: CellTask) -> Any:
        """The cell in the notebook's own process. Names that `--out` does not list are as before afterwards."""
        with self._only_out_changes(task):
            run_inline(spec, check=True)
        results = task.results(0)
        _raise_if_missing(results.missing, task.out)
        return _value_of(results)

    @contextmanager
    def _only_out_changes(self, task: CellTask) -> Iterator[None]:
        namespace = self.shell.user_ns
        before = dict(namespace)
        try:
            yield
        finally:
            after = task.results(0).values
            before |= {name: after[name] for name in task.out if name in after}
            for name in namespace.keys() - before.keys():
                del namespace[name]
            namespace.update(before)


def briefly(error: BaseException) -> BaseException:
    """Let a notebook show `error` as one sentence: our own frames explain nothing to its reader."""
    if not hasattr(error, "_render_traceback_"):
        text = f"{type(error).__name__}: {error}"
        error._render_traceback_ = lambda: text.splitlines()  # type: ignore[attr-defined]
    return error


def _how_it_ended(outcome: Outcome, plan: Plan) -> tuple[BaseException | None, str]:
    """What the cell raises, and the run's end in one word."""
    ended = outcome.ended
    limit = plan.options.limit
    if ended.is_timed_out and limit is not None:
        if limit.ends_well:
            return None, "stopped"
        text = f"the run was stopped at its time limit of {limit.seconds:g} s ({limit.flag})."
        return briefly(TimeoutError(text)), "stopped"
    has_stopped = any(report is not None and report.status == "stopped" for report in ended.reports)
    # Peers of a rank that failed are interrupted too: they say nothing about how the run ended.
    if ended.is_interrupted or (has_stopped and ended.first_failed is None):
        steps = "" if ended.steps is None else f"; every rank had done {ended.steps} steps"
        return briefly(KeyboardInterrupt(f"the run was interrupted after {ended.seconds:.1f} s{steps}.")), "stopped"
    return outcome.error, "done" if outcome.error is None else "failed"


def _at_the_limit(plan: Plan, steps: int | None) -> str:
    options = plan.options
    done = "" if steps is None else f" after {steps} steps"
    saves = "; --resume goes on from its checkpoint" if options.checkpoint_every else ""
    return f"stopped{done} at the time limit of {said(options.time_limit or 0.0)}{saves}"


def _values_of(outcome: Outcome) -> dict[str, Any]:
    try:
        return outcome.values()
    except Exception as error:  # whatever a foreign class does when it is rebuilt
        raise ResultsMissing(
            "rank 0 sent its results, but they cannot be rebuilt in the notebook "
            f"({type(error).__name__}: {error}): import what they need in a cell before this one.",
            dict.fromkeys(outcome.task.out, str(error)) if isinstance(outcome.task, CellTask) else {},
        ) from error


def _refuse_unknown(flag: str, names: Collection[str] | None, known: Collection[str], who_has_not: str) -> None:
    for name in names or ():
        if name in known:
            continue
        near = difflib.get_close_matches(name, [other for other in known if not other.startswith("_")], n=1)
        raise LaunchRefused(
            f"{flag} {name}: {who_has_not} a variable of that name"
            f"{f' (did you mean {near[0]}?)' if near else ''}; nothing was started. Correct it or leave it out."
        )


def _raise_if_missing(missing: Mapping[str, str], out: Collection[str]) -> None:
    if not missing:
        return
    raise ResultsMissing(
        f"{len(missing)} of the {len(out)} names of --out did not come back: {_with_reasons(missing)}. "
        "Assign it in the cell on rank 0 as tensors, arrays, modules or plain data, or leave it out of --out.",
        dict(missing),
    )


def _value_of(results: Results) -> Any:
    """The last expression's value if it is small data, else something that shows it."""
    shown = results.facts.get("result")
    if shown is None or RESULT in results.values:
        return results.values.get(RESULT)
    return _Shown(shown["data"], shown["metadata"])


def _with_reasons(missing: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({reason})" for name, reason in missing.items())


def _them(names: Collection[str]) -> str:
    return "it" if len(names) == 1 else "them"
