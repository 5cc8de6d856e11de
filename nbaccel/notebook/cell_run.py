"""CellRun: one cell's run in ranks, in four parts that may be far apart in time. Runs in the kernel.

    CellRun(...)   in the main thread: everything is settled, nothing has begun
    go             in any thread: from the first rank to the end of the last one
    show_end       in any thread: what stays on the screen
    conclude       in the main thread: values into the notebook, and the run's error, if it had one

A cell in the foreground does them one after the other; for a cell in the background, other cells run between the last
two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbaccel.base.events import Listener
from nbaccel.base.notices import briefly
from nbaccel.base.quantities import duration
from nbaccel.display.run_view import RunView
from nbaccel.errors import NotPrepared, ResultsMissing
from nbaccel.launching.ipc.kernel_state import are_here, set_random_states
from nbaccel.launching.ipc.spec import load_named
from nbaccel.launching.plan import LaunchPlan
from nbaccel.launching.processes.interaction import Pollable
from nbaccel.launching.processes.rank_results import RankResults, Returned
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.run import Run, light_value, seen
from nbaccel.launching.tasks.cell_task import RANDOM, RESULT, CellTask
from nbaccel.notebook.cell_plan import CellPlan, Host
from nbaccel.notebook.left_by_cell import LeftByCell
from nbaccel.notebook.left_in_ranks import LeftInRanks

if TYPE_CHECKING:
    from nbaccel.launching.diagnosis import PostMortem

__all__ = [
    "CellRun",
    "DisplayData",
    "how_a_cell_ended",
    "interrupts_in_one_line",
    "raise_if_missing",
    "with_reasons",
]


_NAMED_VALUES = ("nbaccel.namespace.install:install", "nbaccel.notebook.not_brought_back:NotBroughtBack")
"""What brings back the values of a cell with `--out`; others do not load it."""


@dataclass(frozen=True, slots=True)
class DisplayData:
    """Replaces the value of a last expression that stayed in the rank: it has the display of the rank's value."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return dict(self.data), dict(self.metadata)

    def __repr__(self) -> str:
        return str(self.data.get("text/plain", "..."))


class CellRun:
    """The run of a planned cell.

    Args:
        shown: The view of the run.
        told: See `LeftByCell`.
        remember: Gets the run that becomes `nbaccel.last_run`, and its post-mortem, once the ranks have ended; its
            value comes with `conclude`.

    Attributes:
        error, end, seconds: Its exception, its end in one word, and the duration of all its attempts together; valid
            after `go`.
        ended: How its ranks ended, and what they sent.
    """

    def __init__(
        self,
        cell: CellPlan,
        shown: RunView,
        told: set[str],
        remember: Callable[[Run, PostMortem | None], None] = lambda run, post_mortem: None,
    ) -> None:
        self.cell = cell
        self.shown = shown
        self._told = told
        self.error: BaseException | None = None
        self.end = ""
        self._remember = remember
        self._kept: Run | None = None
        self._ended: RankResults | None = None
        if not cell.task.leaves_all:
            for name in _NAMED_VALUES:  # now: memory may be short when the run has ended
                load_named(name)

    @property
    def is_over(self) -> bool:
        """Return whether there is an outcome."""
        return bool(self.end)

    @property
    def ended(self) -> RankResults:
        assert self._ended is not None, "the run has not ended"
        return self._ended

    @property
    def kept(self) -> Run:
        """Return the record of the run, as `nbaccel.last_run` has it."""
        assert self._kept is not None, "the run has not ended"
        return self._kept

    def go(
        self, host: Host, *, listeners: Sequence[Listener] = (), beside: Sequence[Pollable] = (), occupied: str = ""
    ) -> None:
        """Run to the end, by `host`; no process of the run is left except persistent ranks.

        Args:
            occupied: See `Launcher.turn`.

        Raises:
            LaunchRefused: Nothing was started. The run's own error is not raised, but kept.
        """
        shown_ranks = self.cell.plan.options.shown_ranks(self.cell.spec.world_size)
        watching = RunObservers(self.shown, shown_ranks, self._say, [self.shown, *listeners], beside)
        with interrupts_in_one_line():
            try:
                run, self._ended = host.run(self.cell.spec, watching, occupied)
            finally:
                self.shown.write_heading()
        seen(run, self.shown)
        run.origin = self.cell.origin
        run.error, self.end = how_a_cell_ended(run, self._ended, self.cell.plan)
        self.error = run.error
        self._kept = run.light()
        self._remember(self._kept, self._post_mortem())

    def _post_mortem(self) -> PostMortem | None:
        if self.error is None:
            return None
        from nbaccel.launching.diagnosis import PostMortem

        return PostMortem.of(self.cell.source.name, self.end, self.error, self.ended)

    def _say(self, line: str) -> None:
        """Write a line about the run: in a notebook, what is red is an error."""
        self.shown.write("stdout", f"{line}\n")

    ending = "finishes its step"

    @property
    def name(self) -> str:
        return self.cell.source.name

    @property
    def has_left_something(self) -> bool:
        """Return whether names or changes wait for `conclude`; leftovers of loops do not count."""
        report = self.ended.reports[self.cell.task.result_rank]
        return bool(self.cell.task.out) or (report is not None and bool(report.facts.get("leaves")))

    @property
    def left(self) -> Sequence[str]:
        return ["what it left"] if self.cell.task.leaves_all and self.has_left_something else self.cell.task.out

    def show_end(self) -> None:
        rank = None if self.ended.failed_alike else self.ended.first_failed
        self.shown.end(self.end, self.kept.seconds, self.error, rank)
        self.kept.state = self.shown.state

    def conclude(self, namespace: dict[str, Any], say: Callable[[str], None]) -> Any:
        """Bring values into `namespace`, pass messages to `say`, and return the last expression's value; called once.

        Raises:
            The run's error, after all values that came are in the notebook.
            ResultsMissing: It ended well, but a name of `--out` did not come.
        """
        try:
            return self._conclude(namespace, say)
        finally:
            self.ended.close()

    def _conclude(self, namespace: dict[str, Any], say: Callable[[str], None]) -> Any:
        run, ended, error = self.kept, self.ended, self.error
        result_rank = self.cell.task.result_rank
        report = ended.reports[result_rank]
        if run.stopped:
            say(run.stopped)
        if run.start_method != self.cell.plan.start.method:
            say(f"started by {run.start_method} after all: {run.start_reason}")
        returned = _returned(ended)
        result = returned.values.pop(RESULT, None)
        run.values[result_rank] = light_value(result)
        if self.cell.task.random is not None and not are_here(self.cell.task.random):
            returned.values.pop(RANDOM, None)  # cells that ran meanwhile have drawn or seeded
        facts = {} if report is None else report.facts
        missing = (
            dict.fromkeys(self.cell.task.out, f"rank {result_rank} had ended") if report is None else report.missing
        )
        missing.pop(RESULT, None)  # its display is there
        left = LeftInRanks(ended.reports, result_rank, namespace)
        whence = "" if error is None else f" from the {self.end} run"
        if self.cell.task.leaves_all:
            self._leave_all(returned, facts, missing, left, namespace, say, whence)
            if error is not None:
                raise error
        else:
            self._leave_what_was_named(returned, facts, missing, left, namespace, say, whence)
        shown = facts.get("result")
        return result if result is not None or shown is None else DisplayData(shown["data"], shown["metadata"])

    def _leave_all(
        self,
        returned: Returned,
        facts: Mapping[str, Any],
        missing: Mapping[str, str],
        left: LeftInRanks,
        namespace: dict[str, Any],
        say: Callable[[str], None],
        whence: str,
    ) -> None:
        """Change the notebook as the same cell would have; if ranks trained separately, overwrite nothing.

        What was refused while the ranks had the same parameters was one training until then: it is not lost.
        """
        is_meant = bool(self.cell.plan.settings.independent)
        only_new = not is_meant and (bool(left.apart) or (isinstance(self.error, NotPrepared) and not left.is_alike))
        new = [name for name in returned.values if name not in namespace]
        doubt = "" if is_meant else left.not_one_training(new if only_new else returned.values)
        arrived = LeftByCell(
            returned, facts, missing, self.cell.task, self._told, from_gpus=bool(self.cell.plan.devices.gpus)
        )
        try:
            arrived.enter(only_new=only_new)
        finally:
            if line := arrived.line(whence):
                say(line)
            if doubt:
                say(doubt)

    def _leave_what_was_named(
        self,
        returned: Returned,
        facts: Mapping[str, Any],
        missing: Mapping[str, str],
        left: LeftInRanks,
        namespace: dict[str, Any],
        say: Callable[[str], None],
        whence: str,
    ) -> None:
        """Bring back the names in `--out`, and report on the rest."""
        from nbaccel.namespace.install import install  # loaded before the run, as are all of `_NAMED_VALUES`
        from nbaccel.notebook.not_brought_back import NotBroughtBack

        values, error, ended = returned.values, self.error, self.ended
        if (states := values.pop(RANDOM, None)) is not None:
            set_random_states(states)
        _ = left.trained  # before anything comes
        if arrivals := install(values, namespace, facts.get("sizes", {})):
            say(f"brought back{whence}: {', '.join(map(str, arrivals))}")
        for name, parts in facts.get("lacks", {}).items():
            say(f"{name} came without {', '.join(dict.fromkeys(parts))}")
        if not self.cell.plan.settings.independent and (doubt := left.not_one_training(values)):
            say(doubt)
        if error is not None:
            if missing:
                say(f"not brought back: {with_reasons(missing)}")
            raise error
        if self.cell.plan.options.out != ():  # a user who writes `--out none` knows
            for line in NotBroughtBack(left).lines(values):
                say(line)
        if self.cell.task.home is not None:
            kept, line = NotBroughtBack(left).kept(values, self.cell.task.home.unpulled)
            earlier = self.cell.task.home.unpulled
            self.cell.task.home.unpulled = {name: entry for name, entry in earlier.items() if name not in kept} | kept
            if line:
                say(line)
        if not ended.is_timed_out:  # a run with a planned end may not have reached the name
            raise_if_missing(missing, self.cell.task.out)
        elif missing:
            say(f"not brought back: {with_reasons(missing)}")


@contextmanager
def interrupts_in_one_line() -> Iterator[None]:
    """Make a notebook show an interrupt of the block, in which no code of the cell runs, as one sentence.

    IPython cannot show its place: in Python 3.11 a generator that is interrupted before its first line has none.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise briefly(KeyboardInterrupt(str(interrupt) or "interrupted while no rank was running.")) from None


def how_a_cell_ended(run: Run, ended: RankResults, plan: LaunchPlan) -> tuple[BaseException | None, str]:
    """Return the exception that the cell raises, and the run's end in one word; note the limit that ended it well."""
    limit = plan.options.limit
    if ended.raised is not None:
        return ended.raised, "stopped"
    if ended.is_timed_out and (ended.is_own_limit or limit is None or limit.ends_well):
        limit_s = plan.options.time_limit or 0.0
        run.stopped = ended.at_the_limit(
            run.history, run.checkpoint, limit_s, "--resume", "--checkpoint-every does at a limit too"
        )
        return None, "stopped"
    if ended.is_timed_out and limit is not None:
        text = f"the run was stopped at its time limit of {duration(limit.seconds)} ({limit.flag})."
        return briefly(TimeoutError(text)), "stopped"
    has_stopped = any(report is not None and report.status == "stopped" for report in ended.reports)
    # Peers of a failed rank are interrupted too: their state does not show how the run ended.
    if ended.is_interrupted or (has_stopped and ended.first_failed is None):
        done = None if ended.steps is None else max(0, ended.steps - run.history.first_step)
        steps = "" if done is None else f"; every rank had done {done} steps"
        saved = f". Its training is saved in {run.checkpoint}: --resume goes on from there" if run.checkpoint else ""
        return briefly(
            KeyboardInterrupt(f"the run was interrupted after {duration(run.seconds)}{steps}{saved}.")
        ), "stopped"
    return run.error, "done" if run.error is None else "failed"


def _returned(ended: RankResults) -> Returned:
    try:
        return ended.returned()
    except Exception as error:  # a user's class may raise anything when it is rebuilt
        raise ResultsMissing(
            f"rank {ended.task.result_rank} sent its results, but they cannot be rebuilt in the notebook "
            f"({type(error).__name__}: {error}): import what they need in a cell before this one.",
            dict.fromkeys(ended.task.out, str(error)) if isinstance(ended.task, CellTask) else {},
        ) from error


def raise_if_missing(missing: Mapping[str, str], out: Collection[str]) -> None:
    if not missing:
        return
    raise ResultsMissing(
        f"{len(missing)} of the {len(out)} names of --out did not come back: {with_reasons(missing)}. "
        "Assign it in the cell on rank 0 as tensors, arrays, modules or plain data, or leave it out of --out.",
        dict(missing),
    )


def with_reasons(missing: Mapping[str, str]) -> str:
    """Format names with their reasons; names with the same one stand together.

    Example:
        >>> with_reasons({"a": "a lock", "b": "its rank had ended", "c": "its rank had ended"})
        'a (a lock), b and c (its rank had ended)'
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in missing.items():
        by_reason.setdefault(reason, []).append(name)
    return ", ".join(f"{_in_a_row(names)} ({reason})" for reason, names in by_reason.items())


def _in_a_row(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
