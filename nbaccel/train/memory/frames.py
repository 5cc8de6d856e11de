"""Frames: clears the local variables of calls that ended by an exception, which keep tensors alive. Runs anywhere.

An exception holds its traceback, the traceback holds the frames, and the frames hold what a failed step had made. In
a notebook a failure is held long after it was shown: by `sys.last_value`, by IPython's last result, by its traceback
printer, by a variable. Here the frames are emptied; the exceptions stay, and still print where they were raised. Not
covered: what an exception carries itself (its arguments), and the bodies of classes and of ``exec`` with a separate
dict.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import AsyncGeneratorType, CoroutineType, FrameType, FunctionType, GeneratorType, TracebackType
from typing import Any

__all__ = ["forget_all_frames", "forget_frames"]

_CAN_BE_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def forget_frames(error: BaseException) -> None:
    """Empty the frames of `error` and of all exceptions that it came from, except those that are still running.

    Call it where the exception is caught, before trying again: the locals of the failed attempt are freed at once,
    without a garbage collection.

    >>> def fail():
    ...     large = [0] * 1000
    ...     raise MemoryError
    >>> try:
    ...     fail()
    ... except MemoryError as error:
    ...     failed = error
    >>> forget_frames(failed)
    >>> failed.__traceback__.tb_next.tb_frame.f_locals
    {}
    """
    _forget(trace for link in _chain(error) for trace in _traces(link.__traceback__))


def forget_all_frames() -> None:
    """Empty the frames of every exception that is held in this process, except those that are still running.

    They may be held anywhere: in a variable of Python's or IPython's, a future, a log record. The garbage
    collector knows all tracebacks; a list of such places would miss some. Takes tens of milliseconds.
    """
    _forget(thing for thing in gc.get_objects() if type(thing) is TracebackType)


def _forget(traces: Iterable[TracebackType]) -> None:
    frames = {id(trace.tb_frame): trace.tb_frame for trace in traces}
    if any(frame.f_code.co_flags & _CAN_BE_SUSPENDED for frame in frames.values()):
        for key in _suspended():
            frames.pop(key, None)
    _empty_closures([frame for frame in frames.values() if _empty(frame)])


def _empty(frame: FrameType) -> bool:
    """Forget the variables of a call that is over; return False for one that runs: a caller of ours, or a thread's."""
    try:
        frame.clear()
    except RuntimeError:
        return False
    # Up to Python 3.12 a frame whose locals were read, as IPython does to print them, keeps a copy. The copy is
    # updated when the locals are read again.
    frame.f_locals  # noqa: B018
    return True


def _empty_closures(frames: list[FrameType]) -> None:
    """Forget the variables that the functions of these calls closed over, where no code can call those any more.

    A frame holds its function, and the function its closure: the body of a comprehension, for example, holds all that
    it mentions. Only a function that nothing but such frames refer to is an orphan; one that a caller, an object or a
    hook still has keeps what it closed over, and so does one that mentions itself.
    """
    orphans = _held_by_nobody_else(
        thing
        for frame in frames
        for thing in gc.get_referents(frame)
        if type(thing) is FunctionType and thing.__code__ is frame.f_code
    )
    for cell in _held_by_nobody_else(cell for function in orphans for cell in function.__closure__ or ()):
        with suppress(ValueError):  # it is empty already
            del cell.cell_contents
    for function in orphans:
        function.__defaults__ = function.__kwdefaults__ = None


def _held_by_nobody_else(things: Iterator[Any]) -> list[Any]:
    """Return those of `things`, each given once by each of its known holders, that have no other holder."""
    known: Counter[int] = Counter()
    unique = []
    thing = None
    for thing in things:
        known[id(thing)] += 1
        if known[id(thing)] == 1:
            unique.append(thing)
    del thing, things  # otherwise they would count
    listed_only = _references([object()])[0]
    counts = _references(unique)
    return [unique[at] for at, count in enumerate(counts) if count == listed_only + known[id(unique[at])]]


def _references(things: list[Any]) -> list[int]:
    """Return how many references there are to each, counted alike: the list's, those of this call, and all others."""
    return [sys.getrefcount(thing) for thing in things]


def _suspended() -> Iterator[int]:
    """Yield the ids of suspended frames: clearing those would close their generators."""
    for thing in gc.get_objects():
        frame: FrameType | None = None
        if type(thing) is GeneratorType:
            frame = thing.gi_frame
        elif type(thing) is CoroutineType:
            frame = thing.cr_frame
        elif type(thing) is AsyncGeneratorType:
            frame = thing.ag_frame
        if frame is not None:
            yield id(frame)


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, its causes, errors handled when it was raised, and the members of groups; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__]
        if isinstance(link, BaseExceptionGroup):
            waiting += link.exceptions
