"""find_executable_batch_size: decorates a function that trains. Runs in ranks, scripts and kernels.

It is the loop over attempts. Other modules choose the next size, exchange messages between ranks, and clean up
between two attempts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from nbaccel.demand import WHAT_HELPS
from nbaccel.errors import NoBatchSizeFits
from nbaccel.events import OutOfMemory, emit
from nbaccel.train.executable.attempt import Attempt
from nbaccel.train.executable.sizes import Sizes
from nbaccel.train.executable.survivors import Survivors
from nbaccel.train.executable.together import Alone, Report, Together
from nbaccel.train.implicit import begin_anew
from nbaccel.train.memory import release_unused
from nbaccel.train.state import PartialState, current_world

__all__ = ["find_executable_batch_size"]


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Run `function` again with a smaller batch size whenever memory runs out, equally on all ranks.

    function: takes a batch size (per rank) as its first argument, which callers leave out. It is run from its
    beginning in each attempt, so it should make its model, optimizer and loaders itself; an Accelerator may be made
    outside. Without it, a decorator is returned.
    starting_batch_size: the first size of the first call. Later calls begin with the size that fitted, or with a larger
    one if the allocator's numbers show that it fits.
    reduce_batch_size_fn: takes nothing and returns the next, smaller size; called on every rank after each failure.
    By default the error itself decides, mostly for the half; `nbaccel.train.executable.sizes` gives the rule.

    Collective: with several ranks all of them call it. When memory runs out on one of them, at any place, all give
    up the attempt, form the process group again, and continue with the same smaller size; it returns on all of them
    once all are done. Accelerators and their collectives keep working, and DDP modules made outside join the new group.
    Process groups that the program itself made (``new_group``, a device mesh) and FSDP modules are lost: where
    they were made outside of the function, the error says so and there is no further attempt.

    Raises:
        NoBatchSizeFits: a ``RuntimeError``; not even 1 fitted.
        PeerFailed: another rank's function raised an error that is not about memory; that rank has it.
        TypeError: the call gave the batch size itself.

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
    sizes = Sizes(starting_batch_size, reduce_batch_size_fn)

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
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
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sizes, peers: Alone
    ) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._sizes = sizes
        self._peers = peers
        self._way = sizes.way_down()
        self._survivors = Survivors()

    def run(self) -> Any:
        release_unused()
        size = self._peers.agreed(self._sizes.first)
        tried: list[int] = []
        shortage = ""
        while size > 0:
            tried.append(size)
            begin_anew()
            self._survivors.begin()
            with self._peers.watching(size):
                attempt = Attempt(self._function, size, self._args, self._kwargs)
            if self._peers.is_done(attempt):
                self._sizes.fitted(size, attempt.used)
                return attempt.value
            lack, step = attempt.shortage, self._survivors.step
            agreed = self._peers.regroup(functools.partial(self._clean_up, attempt, size))
            if lack is not None:
                emit(OutOfMemory(step, lack.place.value, size, agreed.size, size, lack.text))
            self._survivors.go_on(agreed.steps, agreed.source, agreed.scalings)
            size, shortage = agreed.size, agreed.shortage
        self._sizes.nothing_fits()
        raise NoBatchSizeFits(
            f"{_name(self._function)} fits in memory at no batch size: {_listed(tried)} were tried.\n"
            f"  the last error: {shortage}\n"
            "  What does not depend on the batch (the model, the optimizer's state, what the notebook still holds) "
            f"takes the memory: make that smaller, or free it. What helps: {WHAT_HELPS}.",
            tuple(tried),
        )

    def _clean_up(self, attempt: Attempt, size: int) -> Report:
        """Forget a failed attempt, and return what to do next."""
        shortage = attempt.shortage
        attempt.forget()
        self._survivors.clean_up()
        return Report(
            size=self._way.after(size, shortage),
            steps=self._survivors.steps,
            shortage="" if shortage is None else shortage.text,
            obstacle=self._survivors.obstacle,
            keeps=self._survivors.has_replicas,
            scalings=self._survivors.scalings,
        )


def _peers(name: str) -> Alone:
    return Together(name, PartialState().collectives) if current_world().is_distributed else Alone()


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
