"""Measure where the seconds of a step go in a dry run. Runs in ranks.

Parts: "loader" (within the loader's next), "host to device" (batches of prepared loaders), "forward" (outermost calls
of modules), "backward", "communication" (collectives that the program or this package calls), "optimizer", "saving",
and "program", which is all else. A part that is entered within another one is taken out of it.

The first batch at a place is left out if there are others: it warms up. On CUDA the device is waited for at each border
in the first pass at a place, so that its seconds are right for each part; later passes are not disturbed, and their
parts are the time that the host spent. Not seen: collectives that DDP
starts within a backward, which count as backward, and copies to the device in loops that prepare nothing ("program").
"""

from __future__ import annotations

import functools
import os
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

__all__ = ["ObservedPass", "StepTimes"]

PROGRAM = "program"
_BACKWARD = "backward"
_ABOUT_HOOKS = "Using `torch.compile"
"""Beginning of torch's warning that the hooks of all modules are called once more for a compiled one."""

_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "reduce"),
    *("gather", "gather_object", "scatter", "scatter_object_list", "barrier", "monitored_barrier"),
)


class ObservedPass(Protocol):
    """One iteration over a loader, see `OnePass`."""

    place: str
    name: str
    number: int
    given: int


class StepTimes:
    """Times of the parts of a step: one record of the kind "step_times" for each pass, and one for all outside of them.

    Between passes of which one is within the other, as an evaluation within an epoch, time counts for the inner one.

    write: appends a record.  on_step: called after each step of an optimizer.
    """

    def __init__(
        self,
        write: Callable[[Mapping[str, Any]], None],
        on_step: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._write = write
        self._on_step = on_step
        self._clock = clock
        self._parts: list[str] = []
        self._passes: list[_Account] = []
        self._undo: list[Callable[[], None]] = []
        self._waits = False
        self._pid = self._thread = 0

    def begin(self) -> None:
        """Measure from now on, in this thread."""
        import torch
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._passes = [_Account(None)]
        self._since = self._clock()
        handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._undo = [handle.remove for handle in handles]
        warnings.filterwarnings("ignore", _ABOUT_HOOKS)
        self._undo.append(functools.partial(_forget_filter, warnings.filters[0]))
        self.measure(torch.utils.data.DataLoader, "_get_iterator", "loader")  # starts worker processes
        for name in ("backward", "grad"):
            self.measure(torch.autograd, name, _BACKWARD)
        if torch.distributed.is_available():
            for name in _COLLECTIVES:
                self.measure(torch.distributed, name, "communication")

    def end(self) -> None:
        """Write what is left, and take the hooks away."""
        while self._undo:
            self._undo.pop()()
        if self._passes and os.getpid() == self._pid:
            self._settle()
            while self._passes:
                self._report(self._passes.pop())

    def measure(self, owner: Any, name: str, part: str) -> None:
        """Count calls of the function `name` of `owner` as `part`, until `end`."""
        import torch

        real = getattr(owner, name, None)
        if real is None:
            return

        @functools.wraps(real)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # see `_before_forward`
                return real(*args, **kwargs)
            with self.part(part):
                return real(*args, **kwargs)

        def undo() -> None:
            if getattr(owner, name) is measured:  # otherwise it was wrapped, and calls the real one by this
                setattr(owner, name, real)

        setattr(owner, name, measured)
        self._undo.append(undo)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time that is spent within as `name`."""
        if not self._is_here:
            yield
            return
        depth = len(self._parts)
        self._enter(name)
        try:
            yield
        finally:
            self._leave(depth)

    # -- passes, see `PassWatcher`

    def begin_pass(self, this: ObservedPass) -> None:
        self._settle()
        self._passes.append(_Account(this))
        self._waits = this.number == 0 and _has_cuda()

    def batch(self, this: ObservedPass, size: float | None, kind: str) -> None:
        """Leave the first batch at a place out, once there is a second one: it has the warm-up of the device."""
        if this.number == 0 and this.given == 2:
            self._settle()
            for account in [each for each in self._passes if each.this is this]:
                account.left_out = 1
                account.seconds.clear()

    def end_pass(self, this: ObservedPass) -> None:
        self._settle()
        for account in [each for each in self._passes if each.this is this]:
            self._passes.remove(account)
            self._report(account)
        inner = self._passes[-1].this if self._passes else None
        self._waits = inner is not None and inner.number == 0 and _has_cuda()

    # -- borders

    @property
    def _is_here(self) -> bool:
        return bool(self._passes) and threading.get_ident() == self._thread and os.getpid() == self._pid

    def _settle(self) -> None:
        """Credit the time since the last border to the present part of the innermost pass."""
        if self._waits:
            import torch

            if not torch.cuda.is_current_stream_capturing():  # a graph, which must not be waited for
                torch.cuda.synchronize()
        now = self._clock()
        if self._passes:
            self._passes[-1].seconds[self._parts[-1] if self._parts else PROGRAM] += now - self._since
        self._since = now

    def _enter(self, name: str) -> None:
        self._settle()
        self._parts.append(name)

    def _leave(self, depth: int) -> None:
        self._settle()
        del self._parts[depth:]

    def _report(self, account: _Account) -> None:
        this = account.this
        said = {"place": "", "name": "", "number": 0, "batches": 0}
        if this is not None:
            said = {
                "place": this.place,
                "name": this.name,
                "number": this.number,
                "batches": this.given - account.left_out,
            }
        waits = this is not None and this.number == 0 and _has_cuda()
        self._write({"kind": "step_times", **said, "is_synchronised": waits, "seconds": dict(account.seconds)})

    # -- hooks of torch

    def _before_forward(self, module: Any, *_: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or not self._is_here:  # a compiler would break its graph here
            return
        if _BACKWARD not in self._parts and "forward" not in self._parts:  # else it is a layer, or computed again
            self._outermost = module
            self._enter("forward")

    def _after_forward(self, module: Any, *_: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or not self._is_here:
            return
        if "forward" in self._parts and module is self._outermost:
            self._leave(self._parts.index("forward"))

    def _before_step(self, *_: Any) -> None:
        if self._is_here and "optimizer" not in self._parts:  # else of its base class, or after one that has failed
            self._enter("optimizer")

    def _after_step(self, *_: Any) -> None:
        if self._is_here and "optimizer" in self._parts:
            self._leave(self._parts.index("optimizer"))
            self._on_step()


class _Account:
    """Seconds of one pass by part; without a pass, of all outside.

    left_out: batches whose time does not count.
    """

    def __init__(self, this: ObservedPass | None) -> None:
        self.this = this
        self.left_out = 0
        self.seconds: defaultdict[str, float] = defaultdict(float)


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())


def _forget_filter(ours: Any) -> None:
    filters: Any = warnings.filters
    with suppress(ValueError):  # the program has reset them
        filters.remove(ours)
