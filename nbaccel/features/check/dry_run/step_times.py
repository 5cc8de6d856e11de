"""Measure where the seconds of a step go in a dry run. Runs in ranks.

Parts: "loader" (within the loader's next), "host to device" (batches of prepared loaders), "forward" (outermost calls
of modules), "backward", "communication" (collectives that the program or this package calls), "optimizer", "saving",
and "program", which is all else. A part that is entered within another one is taken out of it.

On CUDA a part has the time that the device took for it, or waited for it, see `device_clock`: a loader that is done
before the device takes nothing. Not seen: collectives that DDP starts within a backward, which count as backward, and
copies to the device by other ways than `Tensor.to` and `Tensor.cuda`.

The first batch at a place is left out where there are more, since it loads kernels and reserves memory.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from nbaccel.features.check.dry_run.device_clock import DeviceMark, DeviceSpans

__all__ = ["ObservedPass", "StepTimes"]

PROGRAM = "program"
_BACKWARD, _LOADER, _MOVING = "backward", "loader", "host to device"
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

    Args:
        write: Appends a record.
        on_step: Called after each step of an optimizer.
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
        self._pid = self._thread = 0
        self._steps_elsewhere = 0

    def begin(self) -> None:
        """Measure from now on, in this thread."""
        import torch
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._passes = [_Account(None)]
        self._since = DeviceMark(self._clock)
        handles = [
            register_module_forward_pre_hook(self._before_forward),
            register_module_forward_hook(self._after_forward, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._undo = [handle.remove for handle in handles]
        warnings.filterwarnings("ignore", _ABOUT_HOOKS)
        self._undo.append(functools.partial(_forget_filter, warnings.filters[0]))
        self.measure(torch.utils.data.DataLoader, "_get_iterator", _LOADER)  # starts worker processes
        if torch.cuda.is_available():
            self.measure(torch.Tensor, "to", _MOVING, _leaves_the_host)
            self.measure(torch.Tensor, "cuda", _MOVING, lambda tensor, *args, **kwargs: not tensor.is_cuda)
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

    def measure(self, owner: Any, name: str, part: str, counts: Callable[..., bool] | None = None) -> None:
        """Count calls of the function `name` of `owner` as `part`, until `end`.

        Args:
            counts: Returns, for the arguments of a call, whether it is one of these.
        """
        import torch

        real = getattr(owner, name, None)
        if real is None:
            return

        @functools.wraps(real)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not (
                counts is None or counts(*args, **kwargs)
            ):  # see `_before_forward`
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
        if name == _LOADER and not depth:
            self._end_first_batch()
        self._enter(name)
        try:
            yield
        finally:
            self._leave(depth)

    # -- passes, see `PassWatcher`

    def begin_pass(self, this: ObservedPass) -> None:
        self._settle()
        self._passes.append(_Account(this))

    def batch(self, this: ObservedPass, size: float | None, kind: str) -> None:
        """Do nothing: the time is counted by parts."""

    def end_pass(self, this: ObservedPass) -> None:
        self._settle()
        for account in [each for each in self._passes if each.this is this]:
            self._passes.remove(account)
            self._report(account)

    # -- borders

    @property
    def _is_here(self) -> bool:
        return bool(self._passes) and threading.get_ident() == self._thread and os.getpid() == self._pid

    def _settle(self) -> None:
        """Credit the time since the last border to the present part of the innermost pass."""
        now = DeviceMark(self._clock)
        if self._passes:
            self._passes[-1].spans.add(self._parts[-1] if self._parts else PROGRAM, self._since, now)
        self._since = now

    def _end_first_batch(self) -> None:
        """Begin anew for the batches that follow, if the loader is asked for the second batch of a first pass."""
        account = self._passes[-1]
        if account.this is not None and account.this.number == 0 and account.this.given == 1 and account.first is None:
            self._settle()
            account.first, account.spans = account.spans, DeviceSpans()

    def _enter(self, name: str) -> None:
        self._settle()
        self._parts.append(name)

    def _leave(self, depth: int) -> None:
        self._settle()
        del self._parts[depth:]
        while self._steps_elsewhere and _BACKWARD not in self._parts:
            self._steps_elsewhere -= 1
            self._on_step()

    def _report(self, account: _Account) -> None:
        this = account.this
        said: dict[str, Any] = {"place": "", "name": "", "number": 0, "batches": 0}
        if this is not None:
            said = {"place": this.place, "name": this.name, "number": this.number, "batches": this.given}
        seconds = account.spans.seconds()
        if account.first is not None and said["batches"] > 1:
            said["batches"] -= 1
            waited_s = seconds.get(_LOADER, 0.0) + account.first.seconds().get(_LOADER, 0.0)
            seconds[_LOADER] = waited_s * said["batches"] / (said["batches"] + 1)  # some loaders read ahead
        self._write({"kind": "step_times", **said, "seconds": seconds})

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
        elif not self._is_here and os.getpid() == self._pid and _BACKWARD in self._parts:
            self._steps_elsewhere += 1  # in a hook of a gradient, which autograd calls in a thread of the device


class _Account:
    """Seconds of one pass by part; without a pass, of all outside.

    Attributes:
        first: The seconds of the first batch, once there are more.
    """

    def __init__(self, this: ObservedPass | None) -> None:
        self.this = this
        self.spans = DeviceSpans()
        self.first: DeviceSpans | None = None


def _leaves_the_host(tensor: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether a call of ``tensor.to`` copies from the host to a device."""
    import torch

    target = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if not tensor.is_cpu or target is None or isinstance(target, torch.dtype):
        return False
    return str(getattr(target, "device", target)).partition(":")[0] != "cpu"


def _forget_filter(ours: Any) -> None:
    filters: Any = warnings.filters
    with suppress(ValueError):  # the program has reset them
        filters.remove(ours)
