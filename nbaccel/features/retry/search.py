"""Run a function that trains again with smaller batch sizes until one fits. Runs in ranks, scripts and kernels.

`find_executable_batch_size` is the loop over attempts; `Sizes` and `ByRule` choose the sizes, in pure arithmetic. Other
modules exchange messages between ranks, and clean up between two attempts. The first attempt that fits is the training
itself, so there is no trial after it: sizes only decrease, and every step of it costs a started training.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from nbaccel.base.events import OutOfMemory, emit
from nbaccel.base.memory_request import WHAT_HELPS
from nbaccel.errors import NoBatchSizeFits
from nbaccel.features.retry.attempt import Attempt, AttemptShortage, ShortagePlace
from nbaccel.features.retry.coordinate import AttemptReport, DistributedRetry, LocalRetry
from nbaccel.features.retry.outside_retry import OutsideTheRetry
from nbaccel.train.distributed.callers import warn_user
from nbaccel.train.distributed.partial_state import PartialState, current_world
from nbaccel.train.oom.memory.release import release_unused
from nbaccel.train.step.raw_loop_hooks import begin_anew

__all__ = [
    "ByRule",
    "ByUser",
    "Sizes",
    "find_executable_batch_size",
    "grown",
]


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Run a function again with a smaller batch size whenever memory runs out, with the same size on all ranks.

    Collective: with several ranks all of them call it. When memory runs out on one of them, all give up the attempt,
    form the process group again, and continue with the same smaller size. The call returns on all ranks once all are
    done. Accelerators and their collectives keep working, and DDP modules made outside join the new group. Process
    groups that the program made (``new_group``, a device mesh) and FSDP modules are lost; if they were made outside of
    the function, the error says so and there is no further attempt.

    Args:
        function: Takes a batch size (per rank) as its first argument, which callers leave out. Each attempt runs it
            from its beginning, so it should make its model, optimizer and loaders itself; an Accelerator may be made
            outside. Without it, a decorator is returned.
        starting_batch_size: The first size of the first call. Later calls begin with the size that fitted, or with a
            larger one if the numbers of the allocator show that it fits.
        reduce_batch_size_fn: Takes nothing and returns the next, smaller size; called on every rank after each failure.
            By default the error itself decides, mostly for the half; `nbaccel.features.retry.search.ByRule` is the
            rule.

    Returns:
        The function without its first argument. It returns what `function` returns.

    Raises:
        NoBatchSizeFits: Not even size 1 fitted. It is a ``RuntimeError``.
        PeerFailed: The function raised an error that is not about memory on another rank, which raises that error
            itself.
        TypeError: The call gave the batch size itself; or `function` is a generator function or a coroutine function,
            whose body runs after its call. A warning says that where it is decorated.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=100)
        ... def train(batch_size, limit):
        ...     if batch_size > limit:
        ...         raise MemoryError
        ...     return batch_size
        >>> train(30)
        25
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    if unseen := _why_unseen(function):
        warn_user(unseen)  # at once; the call is refused
    sizes = Sizes(starting_batch_size, reduce_batch_size_fn)

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        if unseen:
            raise TypeError(unseen)
        _refuse_given_size(function, args, kwargs)
        peers = _peers(_name(function))
        try:
            return _Search(function, args, kwargs, sizes, peers).run()
        finally:
            peers.close()

    return search


class _Search:
    """One call: attempts at ever smaller sizes until one succeeds."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sizes: Sizes,
        peers: LocalRetry,
    ) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._sizes = sizes
        self._peers = peers
        self._way = sizes.way_down()
        self._outside = OutsideTheRetry()

    def run(self) -> Any:
        release_unused()
        size = self._peers.agreed(self._sizes.first)
        tried: list[int] = []
        shortage = ""
        while size > 0:
            tried.append(size)
            begin_anew()
            self._outside.begin()
            with self._peers.watching(size):
                attempt = Attempt(self._function, size, self._args, self._kwargs)
            if self._peers.is_done(attempt):
                self._sizes.fitted(size, attempt.used)
                return attempt.value
            lack, step = attempt.shortage, self._outside.step
            agreed = self._peers.regroup(functools.partial(self._clean_up, attempt, size))
            if lack is not None:
                emit(OutOfMemory(step, lack.place.value, size, agreed.size, size, lack.text))
            self._outside.go_on(agreed.steps, agreed.source, agreed.scalings)
            size, shortage = agreed.size, agreed.shortage
        self._sizes.nothing_fits()
        raise NoBatchSizeFits(
            f"{_name(self._function)} fits in memory at no batch size: {_listed(tried)} were tried.\n"
            f"  the last error: {shortage}\n"
            "  What does not depend on the batch (the model, the optimizer's state, what the notebook still holds) "
            f"takes the memory: make that smaller, or free it. What helps: {WHAT_HELPS}.",
            tuple(tried),
        )

    def _clean_up(self, attempt: Attempt, size: int) -> AttemptReport:
        """Forget a failed attempt, and return what to do next."""
        shortage = attempt.shortage
        attempt.forget()
        self._outside.clean_up()
        return AttemptReport(
            size=self._way.after(size, shortage),
            steps=self._outside.steps,
            shortage="" if shortage is None else shortage.text,
            obstacle=self._outside.obstacle,
            keeps=self._outside.has_replicas,
            scalings=self._outside.scalings,
        )


def _peers(name: str) -> LocalRetry:
    return DistributedRetry(name, PartialState().collectives) if current_world().is_distributed else LocalRetry()


def _why_unseen(function: Callable[..., Any]) -> str:
    """Return why nothing of `function` has run when its call returns, so that its errors are not seen; else empty."""
    kinds = {
        "a generator function": (inspect.isgeneratorfunction, inspect.isasyncgenfunction),
        "a coroutine function": (inspect.iscoroutinefunction,),
    }
    code = (function, type(function).__dict__.get("__call__"))  # an object's is that of its class
    for kind, tests in kinds.items():
        if any(test(each) for test in tests for each in code):
            return (
                f"find_executable_batch_size: {_name(function)} is {kind}, so its body runs after the call, and memory "
                "that runs out there would not be seen. Decorate a function that runs the loop to its end, and returns "
                "what it has made (a list of what is yielded)."
            )
    return ""


def _refuse_given_size(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError if the caller gave the batch size, or if the function takes none."""
    called = _name(function)
    signature = inspect.signature(function)
    if not signature.parameters:
        raise TypeError(f"{called}() takes no arguments: its first one must be the batch size")
    if _fits(signature, 0, *args, **kwargs) or not _fits(signature, *args, **kwargs):
        return  # the size was left out, or the call itself will raise
    given = signature.bind(*args, **kwargs).arguments
    (_, batch_size), *rest = given.items()
    shown = ", ".join(f"{name}={value!r}" for name, value in rest)
    raise TypeError(
        f"{called}() was called with {batch_size!r} as its batch size, which find_executable_batch_size gives it. "
        f"Leave it out: {called}({shown})"
    )


def _fits(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


_NEAR = (0.9, 0.9, 0.75)
_HALF = 0.5
_FILLED = 0.97
"""Share of the limit that a predicted size may fill; the rest is for fragments of the allocator."""
_WORTH = 1.1
"""Growth below that is not worth a training that may fail."""


class ByRule:
    """The default way down, for one search; against Accelerate's x 0.9 (up to 45 attempts from 4096 to 37).

    - Memory ran out in a forward, or outside of a step: half, at most. The error does not show how much more the rest
      of the step would have needed. From `start` to the largest size that fits, m, there are at most log2(start / m) +
      1 of these attempts, and the size that fits is more than m / 2.
    - It ran out in a backward or in the optimizer: the forward, which holds most of a step's memory, did fit. So m is
      near: x 0.9 twice, x 0.75, then half (under activation checkpointing a backward can need many times the forward).
    - The allocator's numbers, which CUDA, ROCm and XPU put into the error, bound m from above: memory is a + b n with a
      of 0 or more, so with `demand` times the memory needed at n, m is at most n / demand. A single request of seven
      times the device costs one attempt and not three.
    - The search does not go below a size that did fit in an earlier call without trying that one.
    - When the same bytes were refused at the same line twice, and the line through the memory in use shows that one
      sample would not fit either, there is no further attempt.
    """

    def __init__(self, known_to_fit: int = 0) -> None:
        self._known_to_fit = known_to_fit
        self._near_misses = 0
        self._earlier: list[tuple[int, AttemptShortage]] = []

    def after(self, batch_size: int, shortage: AttemptShortage | None) -> int:
        """Return the size to try when `batch_size` did not fit; 0 when there is none.

        Args:
            shortage: What was missing here; None where another rank ran out of memory, and its shortage decides.

        Example:
            >>> rule = ByRule()
            >>> rule.after(128, AttemptShortage("CUDA out of memory"))
            64
            >>> rule.after(64, AttemptShortage("", ShortagePlace.BACKWARD))
            57
        """
        if shortage is None:
            return batch_size
        is_hopeless = any(shortage.is_hopeless(batch_size, larger, size) for size, larger in self._earlier)
        if is_hopeless and not self._known_to_fit:
            return 0
        self._earlier.append((batch_size, shortage))
        factor = _HALF
        if shortage.place is not ShortagePlace.ELSEWHERE:
            factor = (*_NEAR, _HALF)[min(self._near_misses, len(_NEAR))]
            self._near_misses += 1
        size = min(int(batch_size * factor), int(batch_size / shortage.demand), batch_size - 1)
        return max(size, self._known_to_fit if self._known_to_fit < batch_size else 0)


class ByUser:
    """The user's ``reduce_batch_size_fn``: called once for each size that did not fit, on every rank."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def after(self, batch_size: int, shortage: AttemptShortage | None) -> int:
        """Return the next size, as `ByRule.after` does.

        Raises:
            ValueError: The function does not reduce, so that the search would never end.
        """
        size = int(self._function())
        if size >= batch_size:
            raise ValueError(
                f"reduce_batch_size_fn must return a smaller batch size each time: it returned {size} after "
                f"{batch_size} did not fit in memory"
            )
        return max(size, 0)


class Sizes:
    """Sizes that one decorated function has learned, from call to call.

    Later calls start from the size that fitted. They start higher where the allocator's peak of that run shows that
    more fits; see `grown`.

    Args:
        starting: Where the first search begins.
        reduce: The user's rule, None for the default one.
    """

    def __init__(self, starting: int, reduce: Callable[[], Any] | None = None) -> None:
        self._starting = starting
        self._reduce = reduce
        self._next = starting
        self._known_to_fit = 0

    @property
    def first(self) -> int:
        """The size that a call begins with."""
        return self._next

    def way_down(self) -> ByRule | ByUser:
        """Return the rule for one search."""
        return ByRule(self._known_to_fit) if self._reduce is None else ByUser(self._reduce)

    def fitted(self, batch_size: int, used: float | None = None) -> None:
        """Note that a call succeeded.

        Args:
            used: The largest share of the memory that it took; None where unknown.
        """
        self._known_to_fit = batch_size
        self._next = batch_size if self._reduce is not None or not used else grown(batch_size, used)

    def nothing_fits(self) -> None:
        """Note that a call has tried everything. The next one starts from the beginning: memory may be free by then."""
        self._next = self._starting
        self._known_to_fit = 0


def grown(batch_size: int, used: float) -> int:
    """Return the largest size that surely fits where `batch_size` took the share `used` of the memory.

    Memory is a + b n with a >= 0, hence at most proportional to n. A growth below a tenth is not worth an attempt.

    Example:
        >>> grown(64, used=0.5), grown(64, used=0.9), grown(64, used=1.0)
        (124, 64, 64)
    """
    size = int(batch_size * _FILLED / used)
    return size if size >= _WORTH * batch_size else batch_size
