"""Attempt: one run of the user's function at one batch size, and its cleanup. Runs in ranks and scripts.

It only runs and forgets; other modules decide whether there is another attempt, and at which size.
"""

from __future__ import annotations

import enum
import traceback
from collections.abc import Callable
from typing import Any

from nbaccel.base.failures import asked_bytes, can_retry
from nbaccel.base.memory_limit import is_shortage
from nbaccel.base.memory_request import MemoryRequest, total_and_free
from nbaccel.base.values import frozen
from nbaccel.features.memory.meters import Peak
from nbaccel.train.oom.memory.failed_frames import forget_frames

__all__ = [
    "Attempt",
    "AttemptShortage",
    "ShortagePlace",
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
