"""`nbaccel.map`: a function over many items, in ranks that are started again one by one. Runs in the kernel.

The files of a map, and who works on which items, are in `nbaccel.features.map`; the worker of a rank is named by a
string here. This file checks the call, plans and starts the ranks, shows them, and says how it ended. No answer depends
on this process: wherever it is killed, the same call goes on in another one.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from operator import index
from textwrap import shorten
from typing import Any

from nbaccel.base.events import Listener
from nbaccel.base.hardware import Survey
from nbaccel.base.notices import briefly
from nbaccel.base.quantities import duration, plural, rate, seconds_of
from nbaccel.base.settings import STOP, RunSettings
from nbaccel.base.short_tracebacks import without_our_frames
from nbaccel.base.world import World
from nbaccel.display.run_view import RunView
from nbaccel.errors import CannotSave, CannotSend, LaunchRefused, NestedLaunch
from nbaccel.features.background.background_run import (
    Background,
    BackgroundRun,
    background_here,
    why_not_in_the_background,
)
from nbaccel.features.map import Answers, MapJob
from nbaccel.features.map.item_count import ItemCount
from nbaccel.features.map.later_answers import FinishedMap, LaterAnswers
from nbaccel.features.map.map_job import as_items
from nbaccel.launching.api import keep_run, planned, show_run
from nbaccel.launching.diagnosis import PostMortem
from nbaccel.launching.inline import ends_its_group, post_mortem_here, run_inline
from nbaccel.launching.ipc.spec import LaunchSpec, load_named
from nbaccel.launching.launcher import Launcher, default_launcher
from nbaccel.launching.processes.interaction import Pollable
from nbaccel.launching.processes.supervisor import RunObservers
from nbaccel.launching.run import Run, seen
from nbaccel.launching.tasks.function_task import FunctionTask
from nbaccel.namespace.names import codes_of, names_read, says_first_card, with_their_own
from nbaccel.namespace.payload import Payload, pack
from nbaccel.options.run_options import RunOptions
from nbaccel.output.screens import ConsoleScreen, shell_here

__all__ = ["MapTask", "map"]

_WORKER = "nbaccel.features.map.rank_setup:map_in_rank"
_SETUP = "nbaccel.train.setup:setup_rank"
_DRAWN_SEEDS = 1_000_000
_LONGEST_WHY = 160
_MOST_ROUNDS = 3
"""Number of times that ranks are started for items that are missing at the join, since a disk has lost them."""


@without_our_frames
def map(  # the name of the same thing; it is left out of `from nbaccel import *`
    function: Callable[..., Any],
    items: Iterable[Any],
    *,
    setup: Callable[[Any], Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    num_processes: int | None = None,
    devices: str | None = None,
    cpu: bool = False,
    batch_size: int | None = None,
    key: Any = None,
    overwrite: bool = False,
    tries: int = 3,
    retry_failed: bool = False,
    time_limit_s: float | None = None,
    hang_timeout_s: float | None = None,
    background: bool = False,
) -> Answers:
    """Call a function with all items, some at a time, on all GPUs.

    The ranks claim items as they become free, long ones first. A rank that runs out of memory continues with fewer
    items at once; a rank that dies is started again.

    With `out` each answer is written to the disk soon after it is computed. After a stop, a crash, a kill or the end of
    a session the same line continues, and a second notebook with the same line takes part. The function may run twice
    for an item; the first answer counts. The content of `out` belongs to these items, to `key`, and to the source of
    `function` and `setup`, with the helpers and constants of the notebook or of their file that they read. Changes of
    weights, data and other files are not seen: put their name or version into `key`.

    Args:
        function: ``function(items)``, or ``function(state, items)`` with `setup`. It gets a list and returns a list of
            as many answers: numbers, texts, lists, dicts, arrays or tensors.
        items: A list, or anything with a length and indices. Items in memory are compared one by one with those of an
            earlier call, of a data set about 32. A generator is read once by one rank, and again at the end to compare.
        setup: ``setup(accelerator)``, called once in each process; returns `state`, such as a model on
            ``accelerator.device``. There is no process group: a collective ends the run when a rank has died.
        out: "answers.jsonl", or "answers.parquet" for a folder of Parquet files. None keeps the answers in memory.
        num_processes, devices, cpu: As for `launch`; by default one rank for each GPU, or one.
        batch_size: The largest number of items in one call. None chooses it by time and memory.
        key: What else the answers depend on: a text, a number, None, or a list, tuple or dict of these.
        overwrite: Drop the answers in `out` if they belong to other items, another function or another key, were
            changed, or come from elsewhere. They stay until all new answers exist. Answers of this same call are kept;
            to compute them again, change `key` or delete the file.
        tries: How often an item is tried alone before its answer is a `Failed`.
        retry_failed: Try items again that failed in an earlier run, for example after the function was mended. Other
            answers stay.
        time_limit_s: Stop after this number of seconds. The answers so far stay.
        hang_timeout_s: A call of the function that takes more seconds counts as the death of its process. An item that
            does so `tries` times alone, three times at most, is a `Failed`.
        background: Return once the processes have been started.

    Returns:
        The answers in the order of the items. With `background` a `LaterAnswers`: its length, an item, a loop and
        `wait()` wait for the end, and an interrupt ends only this waiting. `stop()` ends the map, and `is_over` says
        whether it has ended. The commands of ``%%accelerate --bg`` reach it.

    Raises:
        Exception: The error of `setup`; or of `function`, if it fails alike with the first items of all ranks.
        KeyboardInterrupt: The map was stopped before each item had its answer. Calls that run are waited for, unless
            there is a second interrupt. The message says what is done.
        TimeoutError: `time_limit_s` was over. The message says what is done.
        CannotContinue: `out` has answers to something else.
        CannotSave: The disk is full, or `out` cannot be written.
        RankDied: A rank died four times without finishing an item in between.
        LaunchRefused: No rank was started. The message says why.

    Example:
        >>> def load(accelerator):
        ...     return pipeline("text-generation", model="gpt2", device=accelerator.device)
        >>> answers = nbaccel.map(
        ...     lambda pipe, texts: pipe(texts), prompts, setup=load, out="answers.jsonl", key="gpt2"
        ... )  # doctest: +SKIP
        >>> answers.failed  # doctest: +SKIP
        []
    """
    _refuse_in_ranks()
    _check_call(function, setup)
    options = RunOptions(
        num_processes=None if num_processes is None else index(num_processes),
        devices=devices,
        cpu=cpu or None,
        timeout=None if time_limit_s is None else seconds_of(time_limit_s),
    )
    limit_s = None if hang_timeout_s is None else seconds_of(hang_timeout_s)
    place = background_here() if background else None
    if place is not None:
        place.make_room(for_another=True)
    if overwrite or retry_failed:
        with default_launcher().turn():
            pass  # it is refused beside a run in the background: here, where no file has been changed yet
    items = as_items(items)
    job = MapJob.open(
        items, function, setup, out=out, key=key, overwrite=overwrite, retry_failed=retry_failed, tries=tries,
        batch_size=batch_size, is_watched=True,
    )  # fmt: skip
    with ExitStack() as closing:
        closing.enter_context(_closed_after(job))
        task = MapTask(job, items, function, setup, limit_s)
        if job.is_finished:
            answers = job.answers()
            failed = f", {_failed(answers)}" if answers.failed else ""
            words = f"{_are(len(answers))} in {job.out} already{failed}: no rank was started"
            if overwrite:
                words += (
                    "; overwrite=True drops only answers to something else: another key=, or no file, does it again"
                )
            ConsoleScreen().write("stdout", f"{words}\n")
            return LaterAnswers(FinishedMap(answers, words), job.out) if background else answers
        run = MapRun(job, options, task)
        try:
            if background:
                return _leave(run, place, closing)
            run.show()
            run.go(default_launcher())
            return run.conclude()
        finally:
            del run  # as in `MapRun.conclude`


class MapTask(FunctionTask):
    """The work of one rank of a map; in ranks that are no copies of the notebook it is a plain `FunctionTask`."""

    def __init__(
        self,
        job: MapJob,
        items: Any,
        function: Callable[..., Any],
        setup: Callable[..., Any] | None,
        hang_timeout_s: float | None = None,
    ) -> None:
        super().__init__(load_named(_WORKER), (job, items, function, setup, hang_timeout_s))
        self.hang_timeout_s = hang_timeout_s
        self.users = [function] if setup is None else [function, setup]
        self.title = f"map({_name(function)}, {_describe_total(job.total)})"

    @property
    def first_card(self) -> str:  # type: ignore[override]
        """Return the words by which the user's functions name the first GPU that they see; empty if they have none."""
        main = vars(sys.modules["__main__"])
        return next(filter(None, (says_first_card(list(codes_of(each)), main) for each in self.users)), "")

    def values_to_send(self) -> dict[str, Any]:
        main = vars(sys.modules["__main__"])
        codes = [code for each in self.users for code in codes_of(each)]
        read = {name: main[name] for name in sorted(with_their_own(names_read(codes), main)) if name in main}
        return read | {"function": self.users[0], "setup": self.users[-1], "items": self.args[1]}

    def pack(self) -> Payload:
        job: MapJob = self.args[0]
        if job.is_stream:
            raise CannotSend(
                "items is a stream, which only forked ranks can read, and these start from a clean process: pass "
                "list(items), or restart the kernel and call map before the notebook uses CUDA",
                {"items": "a stream cannot be sent"},
            )
        try:
            return super().pack()
        except CannotSend as error:
            raise self._unsent(error) from error

    def _unsent(self, error: CannotSend) -> CannotSend:
        """Return the error with the argument of the call that cannot be sent."""
        _, items, function, setup, _ = self.args
        for name, value in {"function": function, "setup": setup, "items": items}.items():
            try:
                os.close(pack({name: value}).fd)
            except CannotSend as found:
                return CannotSend(
                    f"map cannot send {name} to ranks that start from a clean process: {found.names[name]}. Let setup "
                    "make such objects in the rank, or call map before the notebook uses CUDA: then ranks are forked",
                    found.names,
                )
        return error


# --- before a run ------------------------------------------------------------------------------------------------


def _refuse_in_ranks() -> None:
    world = World.from_env()
    if world.launch_id or world.is_distributed:
        raise NestedLaunch(
            f"nbaccel.map starts ranks of its own, and this is {world.place}: call "
            "accelerator.map(function, items, ...) here, in all ranks"
        )


def _check_call(function: Any, setup: Any) -> None:
    if not callable(function):
        raise TypeError(
            f"the first argument of map is a function, got {type(function).__name__}: nbaccel.map(function, items)"
        )
    if setup is not None and not callable(setup):
        raise TypeError(
            f"setup is a function that gets an accelerator, got {type(setup).__name__}: pass the function, without "
            "calling it"
        )


@contextmanager
def _closed_after(job: MapJob) -> Iterator[None]:
    """Let go of a map after the block; files of answers that the caller wants in memory go also at a kill."""
    folder, guard = str(job.folder), default_launcher().resources.guard if job.out is None else None
    if guard is not None:
        guard(folder)
    try:
        yield
    finally:
        job.close()
        if guard is not None:
            guard(f"-{folder}")


# --- the run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _End:
    """The end of one run of ranks.

    Args:
        word: "done", "failed" or "stopped".
        error: The exception that the call raises.
        limit_s: The time limit of the call; 0 for none.
    """

    run: Run
    post_mortem: PostMortem | None
    word: str
    limit_s: float = 0.0


class MapRun:
    """The run of a map, planned in the main thread; `show` and `go` do it. See also `BackgroundWork`.

    Attributes:
        out: The file of answers; None for answers in memory.
        closing: Lets go of the job at the end of `go`, where the caller has left that to the run.
        shown: The view of the run.
        error, end: Its exception, and its end in one word; valid after `go`.
    """

    ending = "finishes the calls under way"
    has_left_something = False  # its answers are in the object that the call returned
    left: Sequence[str] = ()

    def __init__(self, job: MapJob, options: RunOptions, task: MapTask) -> None:
        self.name = task.title
        self.out = job.out
        self.closing = ExitStack()
        self.error: BaseException | None = None
        self.end = ""
        self.shown: RunView
        self._job = job
        self._options = options
        self._task = task
        self._launcher = default_launcher()
        self._answers: Answers | None = None
        self._view: dict[str, Any] = {}
        self._plan()

    def _plan(self) -> None:
        """Decide on ranks and devices. They do not need each other; each draws its own random numbers."""
        self.survey = Survey.take(looks_for_gpus=not self._options.cpu)
        spec = planned(self._options, self._task, self.survey).spec(self._task, _SETUP)
        seed = random.SystemRandom().randrange(_DRAWN_SEEDS)  # drawing it must not change the notebook's numbers
        settings = RunSettings(independent=True, seed=seed).over(spec.settings)
        self.spec = replace(spec, settings=settings, oom=STOP).ending(restarts_ranks=True)

    def show(self, **view: Any) -> None:
        """Begin to show the run.

        Args:
            **view: Where, see `show_run`.
        """
        self._view = view
        self.shown = show_run(self._launcher, self.spec.devices, self.survey, self.name, **view)
        self.shown.history.items = ItemCount(self._job.total, self._job.done())
        if self._job.news:
            self.shown.write("stdout", f"{self._job.out}: {self._job.news}\n")

    def go(
        self,
        host: Launcher,
        *,
        listeners: Sequence[Listener] = (),
        beside: Sequence[Pollable] = (),
        occupied: str = "",
    ) -> None:
        """Run ranks until each item has an answer or an error, most often once. The run's own error is kept.

        Raises:
            LaunchRefused, CannotSend, CannotFork: Nothing was started.
        """
        with self.closing:
            for number in range(_MOST_ROUNDS):
                if number:
                    self._plan()
                    self.show(**self._view)
                if self.spec.start.method == "inline":
                    end = _run_here(self._job, self.spec, self._task, host, self.shown)
                else:
                    observers = RunObservers(self.shown, listeners=[self.shown, *listeners], beside=beside)
                    end = _run_in_ranks(self._job, self.spec, self._task, host, observers, self.shown, occupied)
                _say_end(self._job, end, host, self.shown)
                self.error, self.end = end.run.error, end.word
                if self.error is not None:
                    return
                if self._job.is_finished:
                    self._answers = self._job.answers()
                    return
            raise LaunchRefused(
                f"{self._job.folder} loses answers that were written: is its disk healthy? The same line goes on."
            )

    def show_end(self) -> None:
        """Do nothing: the end of each run of ranks was shown."""

    def conclude(self) -> Answers:
        """Return the answers.

        Raises:
            The error of the run.
        """
        error = self.error
        if error is not None:
            try:
                raise error
            finally:
                del self, error  # else this frame, the error and what its frames hold would keep each other
        assert self._answers is not None, "the run has ended well"
        return self._answers

    def conclude_later(self) -> Answers:
        """Do the same where no line of the user has made the call: a stop is shown as one sentence."""
        if self.error is not None and self.end == "stopped":
            briefly(self.error)
        return self.conclude()


def _leave(run: MapRun, place: Background | None, closing: ExitStack) -> LaterAnswers:
    """Start a map in the background; return the answers to come. Where it cannot go on there, wait for its end.

    Args:
        place: Where the notebook shows the map; None in a script.
        closing: Handed to the run.
    """
    launcher = default_launcher()
    if why := why_not_in_the_background(run.spec.start.method, shell_here(), run.survey.platform):
        ConsoleScreen().write("stdout", f"background=True: {why}, so this call waits for its end\n")
        run.show()
        run.go(launcher)
        return LaterAnswers(FinishedMap(run.conclude(), f"{run.name} has ended ({run.end})"), run.out)
    if place is None:
        run.show()
        run.closing = closing.pop_all()
        current = BackgroundRun(run, run.conclude_later, "wait()", "stop()")
        current.start(launcher, [], [])
        if current.was_interrupted:
            current.conclude()
    else:
        where = place.place()
        run.show(frames=where.frames, screen=where.screen)
        run.closing = closing.pop_all()
        current = place.begin(run, run.conclude_later, launcher, [], where.beside)
    return LaterAnswers(current, run.out)


def _run_in_ranks(
    job: MapJob,
    spec: LaunchSpec,
    task: MapTask,
    launcher: Launcher,
    observers: RunObservers,
    shown: RunView,
    occupied: str,
) -> _End:
    run, ended = launcher.run(spec, observers, occupied)
    with closing(ended):
        seen(run, shown)
        word = "done" if run.error is None else "failed"
        if (ended.is_interrupted or ended.is_timed_out) and not _is_finished(job):
            word = "stopped"
            run.error = ended.raised or (KeyboardInterrupt() if ended.is_interrupted else TimeoutError())
        if ended.is_own_limit:
            run.stopped = ended.at_the_limit(run.history, run.checkpoint)
        post_mortem = PostMortem.of(task.title, word, run.error, ended)
    return _End(run, post_mortem, word, spec.end.timeout_s or 0.0)


def _run_here(job: MapJob, spec: LaunchSpec, task: MapTask, launcher: Launcher, shown: RunView) -> _End:
    """Work on the map in this process, where no other can be started; no time limit reaches it."""
    error: BaseException | None = None
    post_mortem: PostMortem | None = None
    limits = {"time_limit_s": spec.end.timeout_s, "hang_timeout_s": task.hang_timeout_s}
    if given := next((name for name, limit in limits.items() if limit is not None), ""):
        raise LaunchRefused(
            f"{given} can stop ranks only, and this map would run in the notebook's own process "
            f"({spec.start.reason}): leave {given} out"
        )
    with launcher.turn():
        try:
            with ends_its_group(launcher):
                run_inline(spec, [shown])
        except (Exception, KeyboardInterrupt) as failure:
            error = failure
            post_mortem = post_mortem_here(task.title, failure, task)
    if isinstance(error, KeyboardInterrupt) and _is_finished(job):
        error = post_mortem = None
    word = "done" if error is None else "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    run = Run([None], shown.history, error, spec.start.method, spec.start.reason, "", shown.elapsed_s)
    return _End(run, post_mortem, word)


def _is_finished(job: MapJob) -> bool:
    """Return whether a map that was stopped had nothing left to do: then the stop came too late, and is none."""
    try:
        return job.finish()
    except (OSError, CannotSave):  # as it was not joined by the ranks
        return False


# --- how it ended ------------------------------------------------------------------------------------------------


def _say_end(job: MapJob, end: _End, launcher: Launcher, shown: RunView) -> None:
    """Show how a run ended, and complete the text of an error that only says that it was stopped."""
    seconds, error, items = end.run.seconds, end.run.error, shown.history.items
    sentence = ""
    if error is None and job.is_finished:
        sentence = _finished(job.answers(), seconds, 0 if items is None else items.before)
    elif error is not None:
        kept = _what_stays(job)
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        if end.word == "stopped":
            is_late = isinstance(error, TimeoutError)
            why = f"at its time limit, {duration(end.limit_s)}" if is_late else "by an interrupt"
            error.args = (f"stopped {why}: {kept}",)
        else:
            job.discard()
        sentence = f"{end.word} after {duration(seconds)}, {shorten(why, _LONGEST_WHY, placeholder=' …')}: {kept}"
    shown.end(end.word, seconds, error, None, sentence)
    keep_run(end.run, end.post_mortem, shown, launcher)


def _finished(answers: Answers, seconds: float, before: int) -> str:
    """Return the last line of a map: "1,000 items in 42 s (23.8/s), 3 failed (answers.failed)".

    Args:
        before: Items that were finished before this call.
    """
    done = len(answers) - before
    pace = f" ({rate(done / seconds, 'items').split()[0]}/s)" if done > 0 and seconds > 0 else ""
    earlier = f", {before:,} of them before" if before else ""
    failed = f", {_failed(answers)}" if answers.failed else ""
    return f"{plural(len(answers), 'item')} in {duration(seconds)}{pace}{earlier}{failed}"


def _failed(answers: Answers) -> str:
    return f"{len(answers.failed):,} failed (answers.failed)"


def _what_stays(job: MapJob) -> str:
    """Return what is done of a map that is not finished, and how it goes on."""
    done = job.done()
    if not done:
        return "no item is done"
    of = f"{done:,} of {_describe_total(job.total)}" if job.total is not None else plural(done, "item")
    are = "is" if done == 1 else "are"
    if job.out is None:
        return f'{of} {are} done and not kept; with out="answers.jsonl" the same line would go on'
    return f"{of} {are} in {job.folder.name}; the same line goes on"


def _are(count: int) -> str:
    return f"{plural(count, 'item')} {'is' if count == 1 else 'are'}"


def _describe_total(total: int | None) -> str:
    return "a stream" if total is None else plural(total, "item")


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else str(name)
