"""RunCoroutine: a run that one thread watches, alone or beside others. Runs in the kernel; starts nothing itself.

A run is a generator. It never waits: it yields a `Wait`, and is resumed when one of the wait's events has come or its
seconds are over. `driven` waits for one run, `side_by_side` of sweeps for several at once.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from selectors import BaseSelector
from typing import TypeVar

__all__ = [
    "RunCoroutine",
    "Wait",
    "driven",
]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Wait:
    """The events for which a run waits, and the seconds after which it goes on without one; None for no limit."""

    selector: BaseSelector
    seconds: float | None


RunCoroutine = Generator[Wait, None, Result]
"""A run in progress; its value is the result of the run."""


def driven(coroutine: RunCoroutine[Result]) -> Result:
    """Return the result of a run, and wait whenever it does.

    An exception that comes while it waits, by another thread or a handler of a signal, is the run's affair.
    """
    try:
        wait = next(coroutine)
        while True:
            try:
                wait.selector.select(wait.seconds)
            except BaseException as error:
                wait = coroutine.throw(error)
            else:
                wait = next(coroutine)
    except StopIteration as end:
        result: Result = end.value
        return result
    finally:
        coroutine.close()
