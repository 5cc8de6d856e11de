"""Runs that wait for a place: several at once, watched by one thread. Runs in the kernel; starts nothing itself.

`side_by_side` waits for several `RunCoroutine`s at once, begins waiting ones as places become free, and passes
interrupts on to all. So all ranks are forked while no other thread of the kernel works on a run: a lock that such a
thread held at that moment would stay locked in the rank.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Protocol

from nbaccel.launching.processes.interaction import Interrupts, Pollable, stopped_before_termination
from nbaccel.launching.processes.run_coroutine import RunCoroutine, Wait

__all__ = ["InterruptRelay", "QueuedRun", "side_by_side"]


class InterruptRelay(Pollable):
    """Passes requests to end a run on to its ranks; those made before the ranks exist come as soon as they do.

    Example:
        >>> relay, interrupts_so_far = InterruptRelay(), []
        >>> relay.interrupt()
        >>> relay.tick(0.0, lambda: interrupts_so_far.append("stop"))
        >>> relay.interrupt()
        >>> interrupts_so_far
        ['stop', 'stop']
    """

    def __init__(self) -> None:
        self._early = 0
        self._interrupt: Callable[[], None] | None = None

    def interrupt(self) -> None:
        """Ask the run to end at its step; the second time, at once."""
        if self._interrupt is None:
            self._early += 1
        else:
            self._interrupt()

    def tick(self, now: float, interrupt: Callable[[], None]) -> None:
        self._interrupt = interrupt
        for _ in range(self._early):
            interrupt()
        self._early = 0


class QueuedRun(Protocol):
    """One of several runs that wait for a place."""

    @property
    def saves_itself(self) -> bool:
        """Return whether the run saves its training when it is asked to end."""

    def begin(self, place: int) -> RunCoroutine[None]:
        """Return the run, which begins at place `place`, 0 or more, when it is resumed for the first time.

        An error that ends this run alone is its own affair; one that it raises ends all runs.
        """

    def interrupt(self) -> None:
        """Ask the run to end at its step; the second time, at once."""


class _Running:
    """A run at its place, and the moment by which it has to be resumed."""

    def __init__(self, run: QueuedRun, place: int) -> None:
        self.run = run
        self.place = place
        self.as_coroutine = run.begin(place)
        self.wait: Wait | None = None
        self.due_at: float | None = None

    def advance(self) -> bool:
        """Resume the run; return False if it is over."""
        try:
            self.wait = next(self.as_coroutine)
        except StopIteration:
            return False
        self.due_at = None if self.wait.seconds is None else time.monotonic() + self.wait.seconds
        return True

    @property
    def fd(self) -> int:
        assert self.wait is not None
        return self.wait.selector.fileno()  # type: ignore[attr-defined,no-any-return]  # that of epoll


def side_by_side(runs: Iterable[QueuedRun], places: int, beside: Sequence[Pollable] = ()) -> int:
    """Do all runs, at most `places` at a time, and return the number of times that they were asked to end.

    The first interrupt asks all that are running to finish their step, and keeps the waiting ones from beginning; the
    second ends all at once. If one run raises an error, or the thread is ended by one, the processes of all are ended.

    Args:
        beside: Checked meanwhile; each can interrupt as a person does.
    """
    waiting, free = iter(runs), deque(range(places))
    running: list[_Running] = []
    interrupts = Interrupts()
    with ExitStack() as owned:
        owned.callback(interrupts.close)
        owned.enter_context(interrupts.of_the_keyboard())
        owned.enter_context(stopped_before_termination(lambda: any(each.run.saves_itself for each in running)))
        owned.callback(_close, running)
        interrupts_so_far = 0
        while True:
            if not running and interrupts.raised is not None:
                raise interrupts.raised
            while free and not interrupts.count and (run := next(waiting, None)) is not None:
                begun = _Running(run, free.popleft())
                running.append(begun)
                _advance(begun, running, free)
                interrupts.read()
            if not running:
                return interrupts.count
            ready = _ready(running, interrupts, beside)
            interrupts.read()
            for _ in range(interrupts.count - interrupts_so_far):
                for each in running:
                    each.run.interrupt()
            interrupts_so_far = interrupts.count
            for each in ready:
                _advance(each, running, free)
            now = time.monotonic()
            for task in beside:
                task.interrupted(interrupts_so_far)
                task.tick(now, interrupts.interrupt)


def _close(running: Sequence[_Running]) -> None:
    """End the processes of all runs that go on."""
    with ExitStack() as every:  # also of those after one that fails to
        for each in running:
            every.callback(each.as_coroutine.close)


def _advance(each: _Running, running: list[_Running], free: deque[int]) -> None:
    if not each.advance():
        running.remove(each)
        free.append(each.place)


def _ready(running: Sequence[_Running], interrupts: Interrupts, beside: Sequence[Pollable]) -> list[_Running]:
    """Wait, and return the runs that have to be resumed."""
    poll = select.poll()
    poll.register(interrupts, select.POLLIN)
    for each in running:
        poll.register(each.fd, select.POLLIN)
    now = time.monotonic()
    dues = [each.due_at - now for each in running if each.due_at is not None]
    dues += [due for task in beside if (due := task.due_in(now)) is not None]
    events = dict(poll.poll(max(0.0, min(dues)) * 1000 if dues else None))
    now = time.monotonic()
    return [each for each in running if each.fd in events or (each.due_at is not None and each.due_at <= now)]
