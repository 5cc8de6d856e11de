"""Attempt: one run of the user's function at one batch size, and its cleanup. Runs in ranks and scripts.

It only runs and forgets; other modules decide whether there is another attempt, and at which size.
"""

from __future__ import annotations

import enum
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from nbaccel.base.failures import asked_bytes, can_retry
from nbaccel.base.memory_limit import is_shortage
from nbaccel.base.memory_request import MemoryRequest, total_and_free
from nbaccel.base.values import frozen
from nbaccel.features.memory.meters import Peak
from nbaccel.train.oom.memory.release import forget

__all__ = [
    "Attempt",
    "AttemptShortage",
    "ShortagePlace",
    "forget_frames",
]


class ShortagePlace(enum.Enum):
    """Place in a training step where the memory ran out, by the traceback; without a sign of it, a forward."""

    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    ELSEWHERE = "forward"


@frozen
class AttemptShortage:
    """Facts from an error about the memory that was missing.

    Args:
        text: The error, in one line.
        place: Where it was raised.
        demand: Memory in use and asked for, divided by the total, > 1; 1.0 where the error has no such numbers.
        request: The numbers of the refused allocation.
        lines: The lines that led to it.
    """

    text: str
    place: ShortagePlace = ShortagePlace.ELSEWHERE
    demand: float = 1.0
    request: MemoryRequest | None = None
    lines: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> AttemptShortage:
        return cls(
            f"{type(error).__name__}: {error}".partition("\n")[0],
            _place(error),
            _demand(str(error)),
            MemoryRequest.of(error),
            tuple((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)),
        )

    def is_hopeless(self, size: int, larger: AttemptShortage, larger_size: int) -> bool:
        """Return whether one sample would not fit either, judging by this and an earlier, larger attempt."""
        if self.request is None or larger.request is None or self.lines != larger.lines:
            return False
        return self.request.is_hopeless(size, larger.request, larger_size)


class Attempt:
    """One run of a function: its value, or the error that ended it; `forget` drops both.

    The error is kept outside of any ``except`` block, whose frames would hold the failed attempt during its
    cleanup.

    Attributes:
        used: The share of the memory that it took at its peak; None where that is unknown.
        shortage: What was missing, if memory was.
    """

    def __init__(self, function: Callable[..., Any], batch_size: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        peak = Peak()
        self.value: Any = None
        self.error: BaseException | None = None
        try:
            self.value = function(batch_size, *args, **kwargs)
        except BaseException as error:
            self.error = error

        self.used = peak.share
        self.shortage = self._missing()  # now: the state of the memory is unknown later

    def _missing(self) -> AttemptShortage | None:
        error = self.error
        if isinstance(error, Exception) and (can_retry(error, self.used) or is_shortage(error)):
            return AttemptShortage.of(error)
        return None

    def forget(self) -> None:
        """Drop everything that the attempt made, even where the program has kept the error."""
        error, self.value, self.error = self.error, None, None
        if error is not None:
            forget_frames(error)


def _place(error: BaseException) -> ShortagePlace:
    """Return the place by the innermost of torch's modules in the traceback that shows it."""
    place = ShortagePlace.ELSEWHERE
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith("torch.autograd"):
            place = ShortagePlace.BACKWARD
        elif module.startswith("torch.optim.") and trace.tb_frame.f_code.co_name != "profile_hook_step":
            place = ShortagePlace.OPTIMIZER
        trace = trace.tb_next
    return place


def _demand(text: str) -> float:
    """Return the demand from the numbers in the text of torch's allocators for CUDA, ROCm and XPU, and of `MemLimit`.

    Example:
        >>> _demand("Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB is free.")
        1.125
    """
    asked, state = asked_bytes(text), total_and_free(text)
    if not asked or state is None:
        return 1.0
    total, free = state
    return max(1.0, (total - free + asked) / total)


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
