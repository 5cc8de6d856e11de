"""Frames of one failure: emptied, so that what a failed call has made is freed. Runs in ranks and in the kernel."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

from nbaccel.train.oom.memory.release import forget

__all__ = ["forget_frames"]


# An exception holds the tensors of its frames: https://github.com/pytorch/pytorch/issues/27600, and IPython
# keeps the last one: https://github.com/ipython/ipython/pull/11572.
def forget_frames(error: BaseException) -> None:
    """Empty the frames of `error` and of all exceptions that it came from, except those that are still running.

    An exception holds its traceback, the traceback holds the frames, and the frames hold what a failed step had made.
    In a notebook a failure is held long after it was shown: by `sys.last_value`, by IPython's last result, by its
    traceback printer, by a variable. Not covered: what an exception carries itself (its arguments), and the bodies of
    classes and of ``exec`` with a separate dict.

    Call it where the exception is caught, before trying again: the locals of the failed attempt are freed at once,
    without a garbage collection.

    Example:
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
    forget(trace for link in _chain(error) for trace in _traces(link.__traceback__))


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
