"""Tracking: sends what a program logs to its trackers. Runs in ranks.

`Trackers` owns the trackers of one process: it makes those that are named, passes rows on in their order, and closes
them. Only rank 0 has any, except those that require every rank. It does not know what a tracker does with its rows.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import NoneType
from typing import Any

from nbaccel.base.events import Opened, emit
from nbaccel.base.settings import RunSettings
from nbaccel.base.tracking import BlankTracker, GeneralTracker, without_none
from nbaccel.base.values import frozen
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.process_control import ProcessControl
from nbaccel.train.named_trackers import LoggerType, find_tracker, tracker_names
from nbaccel.train.step.readings import Reading, is_plain

__all__ = ["LogWith", "Trackers", "TrackingPlan"]

LogWith = str | GeneralTracker | Sequence[str | GeneralTracker] | None

_ROWS_IN_FLIGHT = 64
"""Rows that may wait for their device; then the oldest is waited for. A row is some bytes of pinned memory."""


@frozen
class TrackingPlan:
    """Arguments of `init_trackers`."""

    project_name: str
    config: Mapping[str, Any]
    init_kwargs: Mapping[str, Mapping[str, Any]]
    logging_dir: str | os.PathLike[str] | None


@frozen
class _Row:
    """One call of `log`.

    Args:
        given_step: The step that the program gave, if it did.
    """

    reading: Reading
    step: int
    given_step: int | None
    log_kwargs: Mapping[str, Mapping[str, Any]]

    def hand_over(self, trackers: Iterable[GeneralTracker]) -> None:
        _hand_over(self.reading.values(), self.step, self.given_step, self.log_kwargs, trackers)


class Trackers:
    """The trackers of one process, and the rows that they have not received yet.

    Args:
        log_with: Names and objects.

    Raises:
        ValueError: A name that is not registered.
        NotImplementedError: An object that is no tracker, or has no name.
    """

    def __init__(self, log_with: LogWith = None) -> None:
        self.choose(log_with)
        self._plan: TrackingPlan | None = None
        self._opened: list[GeneralTracker] = []
        self._rows: deque[_Row] = deque()
        self._pid = 0  # of the process that opened them

    def choose(self, log_with: LogWith) -> None:
        """Choose the trackers to open at the next `open`."""
        several = [log_with] if isinstance(log_with, str | GeneralTracker) else log_with or ()
        self.chosen: list[str | GeneralTracker] = list(dict.fromkeys(map(_accepted, several)))

    def adopt(self, trackers: Sequence[GeneralTracker]) -> None:
        """Use `trackers`, which are open, instead of the present ones; they are closed like these."""
        if self._pid != os.getpid():
            atexit.register(self.finish)
        self._opened, self._pid = list(trackers), os.getpid()

    @property
    def are_used(self) -> bool:
        """True if `init_trackers` was called, in this process or in one that it was forked or unpickled from.

        Also true if the program has set trackers of its own.
        """
        return self._plan is not None or bool(self._opened)

    def open(self, plan: TrackingPlan, is_main_process: bool) -> None:
        """Make and start the trackers. Those of an earlier plan are finished first. In a dry run none is started."""
        self.finish()
        # Every rank makes them, so that what is missing is the same error on all of them; rank 0 opens them.
        made = [tracker for one in self.chosen for tracker in _make(one, plan)]
        self._plan = plan
        self._pid = os.getpid()
        atexit.register(self.finish)
        if RunSettings.from_env().dry_run:  # nobody is told of it
            self._opened = [BlankTracker.in_place_of(tracker) for tracker in made]
            return
        for tracker in made:
            if is_main_process or not tracker.main_process_only:
                tracker.start()
                self._opened.append(tracker)
                emit(Opened(_described(tracker, plan)))
                if plan.config:
                    tracker.store_init_configuration(dict(plan.config))

    def begin(
        self,
        project_name: str,
        config: Mapping[str, Any],
        init_kwargs: Mapping[str, Mapping[str, Any]],
        logging_dir: str | os.PathLike[str] | None,
        is_main_process: bool,
    ) -> None:
        """Open the trackers by the arguments of `init_trackers`."""
        self.open(TrackingPlan(project_name, config, init_kwargs, logging_dir), is_main_process)

    @property
    def is_foreign(self) -> bool:
        """True if another process opened them: one that this was forked or unpickled from."""
        return self._pid != os.getpid()

    def open_here(self, is_main_process: bool) -> None:
        """Open the trackers again, by the same plan, in a process that was forked or unpickled since."""
        plan = self._plan
        if plan is not None:
            self._forget()
            self.open(plan, is_main_process)

    def opened(self, is_main_process: bool) -> list[GeneralTracker]:
        """Return the trackers of this process."""
        if self.is_foreign:
            self.open_here(is_main_process)
        return list(self._opened)

    def log(
        self,
        values: Mapping[str, Any],
        step: int,
        given_step: int | None,
        log_kwargs: Mapping[str, Mapping[str, Any]],
        process: ProcessControl,
    ) -> None:
        """Pass a row on to the trackers of this process.

        They get it, and all rows before it, as soon as their numbers have arrived: at once where they are plain.

        Args:
            given_step: The step that the program gave, if it did.
        """
        if not self.are_used:
            return
        if self.is_foreign:
            self.open_here(process.is_main_process)
        rows = self._rows
        if not rows and is_plain(values):
            _hand_over(values, step, given_step, log_kwargs, self._opened)
        elif self._opened:
            rows.append(_Row(Reading(values), step, given_step, log_kwargs))
            while rows and (rows[0].reading.has_arrived or len(rows) > _ROWS_IN_FLIGHT):
                rows.popleft().hand_over(self._opened)

    def log_as_it_is(
        self,
        values: Any,
        step: int | None,
        log_kwargs: Mapping[str, Mapping[str, Any]],
        trackers: Sequence[GeneralTracker],
    ) -> None:
        """Pass an object that is no mapping on to `trackers`, which are open."""
        if not trackers:
            warn_user(f"accelerator.log takes numbers by name, log({{'loss': loss}}): this {type(values).__name__} "
                      "is shown nowhere.")  # fmt: skip
        for tracker in trackers:
            tracker.log(values, step=step, **log_kwargs.get(tracker.name, {}))

    def get(self, name: str, trackers: Sequence[GeneralTracker], unwrap: bool) -> Any:
        """Return the one called `name` among `trackers`, which are open; with `unwrap` its library's object.

        Raises:
            ValueError: There is none.
        """
        opened = {tracker.name: tracker for tracker in trackers}
        if name not in opened:
            there = f"open are {', '.join(map(repr, opened))}" if opened else "none is open: call init_trackers first"
            raise ValueError(f"there is no tracker {name!r}; {there}. It must be named in Accelerator(log_with=…) too.")
        return opened[name].tracker if unwrap else opened[name]

    def finish(self) -> None:
        """Wait for the pending rows, and close every tracker. Trackers of another process are left to it."""
        opened, rows, is_mine = self._opened, self._rows, self._pid == os.getpid()
        self._forget()
        with ExitStack() as closing:
            for tracker in opened if is_mine else ():
                closing.callback(tracker.finish)
            for row in rows if is_mine else ():
                row.hand_over(opened)

    def _forget(self) -> None:
        atexit.unregister(self.finish)
        self._plan = None
        self._opened = []
        self._rows = deque()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open trackers: another process opens its own."""
        return {**self.__dict__, "_opened": [], "_rows": deque(), "_pid": 0}


def _hand_over(
    values: Mapping[str, Any],
    step: int,
    given_step: int | None,
    log_kwargs: Mapping[str, Mapping[str, Any]],
    trackers: Iterable[GeneralTracker],
) -> None:
    kept = without_none(values) if NoneType in map(type, values.values()) else values
    for tracker in trackers:
        own_step = given_step if tracker.numbers_steps else step
        tracker.log(dict(kept), step=own_step, **log_kwargs.get(tracker.name, {}))


def _described(tracker: GeneralTracker, plan: TrackingPlan) -> str:
    """Return where a person finds what `tracker` has kept."""
    name = getattr(tracker.tracker, "name", None)  # of a run of wandb, of a file
    found = f" {name}" if isinstance(name, str) else ""
    place = f" in {os.fspath(plan.logging_dir)}" if tracker.requires_logging_directory and plan.logging_dir else ""
    return f"{tracker.name} run {plan.project_name}{found}{place}"


def _accepted(one: Any) -> str | GeneralTracker:
    if isinstance(one, str):
        if one != LoggerType.ALL:
            find_tracker(one)
        return str(one)
    if not isinstance(one, GeneralTracker):
        raise NotImplementedError(
            f"log_with takes names and objects on nbaccel.tracking.GeneralTracker, got {type(one).__name__}"
        )
    if not hasattr(type(one), "name"):
        raise NotImplementedError(
            f'{type(one).__name__} has no `name`: write name = "…" in the class, get_tracker finds it by that'
        )
    return one


def _make(one: str | GeneralTracker, plan: TrackingPlan) -> list[GeneralTracker]:
    """Return the trackers for the entry `one` of ``log_with``.

    Raises:
        ModuleNotFoundError, ValueError: The tracker's package or folder is missing.
    """
    if one == LoggerType.ALL:
        kinds = [(name, find_tracker(name)) for name in tracker_names()]
        usable = [(name, kind) for name, kind in kinds if kind.is_available() and _has_its_folder(kind, plan)]
        return [_built(name, kind, plan) for name, kind in usable]
    if isinstance(one, str):
        kind = find_tracker(one)
        if not kind.is_available():
            raise ModuleNotFoundError(
                f"log_with={one!r} needs the package {kind.package}, which is not installed in this Python:\n"
                f"    pip install {kind.pip_name or repr(f'nbaccel[{one}]')}",
                name=kind.package,
            )
        _refuse_without_folder(one, kind, plan)
        return [_built(one, kind, plan)]
    _refuse_without_folder(one.name, one, plan)
    return [one]


def _has_its_folder(tracker: GeneralTracker | type[GeneralTracker], plan: TrackingPlan) -> bool:
    return plan.logging_dir is not None or not tracker.requires_logging_directory


def _refuse_without_folder(name: str, tracker: GeneralTracker | type[GeneralTracker], plan: TrackingPlan) -> None:
    if not _has_its_folder(tracker, plan):
        raise ValueError(
            f"the tracker {name!r} writes files and was given no folder: "
            f'Accelerator(log_with={name!r}, project_dir="runs")'
        )


def _built(name: str, kind: type[GeneralTracker], plan: TrackingPlan) -> GeneralTracker:
    built: Any = kind
    tracker: GeneralTracker = built(plan.project_name, plan.logging_dir, **plan.init_kwargs.get(name, {}))
    return tracker
