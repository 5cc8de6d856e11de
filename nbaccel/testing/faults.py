"""Faults: a chosen rank fails at a chosen place and step, on purpose. Runs in tests, and in ranks under test.

A fault belongs to a *point*, which is a name. The program passes points: where it calls `Faults.at` itself, and in
the models, optimizers and collectives that it hands to `in_model`, `in_optimizer` and `in_collectives`. Outside of
the `with` block every point is a no-op. A fault does not imitate a full device, which refuses whatever does not fit
at any operation; `MemLimit` does that.
"""

from __future__ import annotations

import copy
import errno
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from nbaccel.base.world import World

if TYPE_CHECKING:
    import torch

__all__ = ["Fault", "Faults"]

Action = Callable[[Any, str], Any]
"""Action of a fault: takes the value at the point and a text that says where; returns the value to continue with."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Args:
        point: The name of the place, which the program passes.
        action: Called with the value at the point and a text that says where; returns the value to continue with.
        rank: On which rank; None on every one.
        step: At which `Faults.step`; None at every one.
        passing: At which passing of the point within the step, 0-based; None at every one.
        times: How often at most, in each process.

    Example:
        >>> def fill_the_disk(value: object, where: str) -> None:
        ...     raise OSError(28, "No space left on device")
        >>> faults = Faults().add(Fault("saving", fill_the_disk, rank=0, step=2))
    """

    point: str
    action: Action
    rank: int | None = None
    step: int | None = None
    passing: int | None = None
    times: int = 1

    def is_due(self, rank: int, step: int, passing: int) -> bool:
        """Return whether the fault happens at this passing of its point.

        Args:
            rank: The rank of this process.
            step: The current `Faults.step`.
            passing: The number of the passing within the step, 0-based.

        Example:
            >>> Fault("saving", print, step=2).is_due(rank=0, step=2, passing=0)
            True
        """
        wanted = (self.rank, self.step, self.passing)
        return all(want in (None, is_) for want, is_ in zip(wanted, (rank, step, passing), strict=True))


class Faults:
    """A list of faults, and the points at which they happen.

    Points that need no call in the program: "forward" (before it, on the model's own call), "output"
    (of the model; a tensor), "backward" (when the gradient reaches the output; a tensor), "optimizer" and
    "after optimizer" (around its step), "collective" and "after collective" (around each that is launched from the
    thread that entered the block), "sync" and "rename" (before a file or folder is flushed to the disk, or gets its
    final name, as every save does).

    Attributes:
        step: Set this in the loop; a fault's `step` is compared with it. A new step resets the passings.
        fired: The faults that have happened in this process, in order.

    Example:
        >>> faults = Faults().raise_at("loading", KeyError("image"), step=1)
        >>> with faults:
        ...     for faults.step in range(3):
        ...         try:
        ...             _ = faults.at("loading")
        ...         except KeyError as error:
        ...             print(faults.step, error)
        1 'image'
        >>> faults.at("loading"), len(faults.fired)  # outside of the block nothing happens
        (None, 1)
    """

    def __init__(self) -> None:
        self.fired: list[Fault] = []
        self._faults: list[Fault] = []
        self._step = 0
        self._passings: Counter[str] = Counter()
        self._is_active = False

    # -- what goes wrong

    def raise_at(self, point: str, error: BaseException, **when: int) -> Faults:
        """Raise an error at a point.

        Args:
            point: The name of the place.
            error: The error.
            **when: `rank`, `step`, `passing` and `times`, as in `Fault`.

        Returns:
            This object, so that calls can be chained.
        """
        return self.add(Fault(point, _Raise(error), **when))

    def oom_at(self, point: str, **when: int) -> Faults:
        """Raise `torch.OutOfMemoryError` at a point.

        Args:
            point: As for `raise_at`.
            **when: As for `raise_at`.

        Returns:
            This object.

        Example:
            >>> faults = Faults().oom_at("forward", rank=1, step=3)
        """
        return self.add(Fault(point, _run_out_of_memory, **when))

    def kill_at(self, point: str, **when: int) -> Faults:
        """Kill the process with SIGKILL at a point, as the host's out-of-memory killer does.

        Args:
            point: As for `raise_at`.
            **when: As for `raise_at`.

        Returns:
            This object.

        Example:
            >>> faults = Faults().kill_at("optimizer", rank=0, step=5)
        """
        return self.add(Fault(point, _die, **when))

    def leave_at(self, point: str, exit_code: int = 0, **when: int) -> Faults:
        """End the process at a point without an error or a message, as ``os._exit`` does.

        Args:
            point: As for `raise_at`.
            **when: As for `raise_at`.
            exit_code: The exit code of the process.

        Returns:
            This object.

        Example:
            >>> faults = Faults().leave_at("loading", exit_code=3)
        """
        return self.add(Fault(point, _Leave(exit_code), **when))

    def hang_at(self, point: str, **when: int) -> Faults:
        """Wait for ever at a point. Signal handlers still run, so SIGINT raises KeyboardInterrupt.

        Args:
            point: As for `raise_at`.
            **when: As for `raise_at`.

        Returns:
            This object.

        Example:
            >>> faults = Faults().hang_at("collective", rank=1)
        """
        return self.add(Fault(point, _hang, **when))

    def nan_at(self, point: str, **when: int) -> Faults:
        """Replace the tensor at a point by NaN; the program, or the gradient, continues with that.

        Args:
            point: As for `raise_at`.
            **when: As for `raise_at`.

        Returns:
            This object.

        Example:
            >>> faults = Faults().nan_at("output", step=2)
        """
        return self.add(Fault(point, _spoil, **when))

    def enospc_at(self, point: str, **when: int) -> Faults:
        """Raise what a full disk raises, OSError with ENOSPC, at a point.

        Args:
            point: As for `raise_at`.
            **when: As for `raise_at`.

        Returns:
            This object.

        Example:
            >>> faults = Faults().enospc_at("sync")
        """
        return self.add(Fault(point, _find_the_disk_full, **when))

    def add(self, fault: Fault) -> Faults:
        """Add a fault whose action may do anything else.

        Args:
            fault: The fault.

        Returns:
            This object.

        Example:
            >>> faults = Faults().add(Fault("loading", lambda value, where: None))
            >>> with faults:
            ...     print(faults.at("loading", "a batch"))
            None
        """
        self._faults.append(fault)
        return self

    # -- when

    def __enter__(self) -> Faults:
        self._is_active = True
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_active = False

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._passings.clear()

    @property
    def pending(self) -> list[Fault]:
        """The faults that have not happened in this process; a test may require that none are left."""
        return [fault for fault in self._faults if not self._times_fired(fault)]

    def _times_fired(self, fault: Fault) -> int:
        return sum(past is fault for past in self.fired)

    # -- where

    def at(self, point: str, value: Any = None) -> Any:
        """Pass a point: apply the faults that are due there.

        Args:
            point: The name of the place.
            value: What the program has there.

        Returns:
            `value`, changed if a fault changes it.
        """
        if not self._is_active:
            return value
        passing = self._passings[point]
        self._passings[point] += 1
        rank = World.from_env().rank
        for fault in self._faults:
            if fault.point != point or self._times_fired(fault) >= fault.times:
                continue
            if fault.is_due(rank, self._step, passing):
                self.fired.append(fault)
                value = fault.action(value, f"at {point!r} on rank {rank}, step {self._step}, passing {passing}")
        return value

    def in_backward(self, tensor: torch.Tensor, point: str = "backward") -> torch.Tensor:
        """Return `tensor` itself; once its gradient is known, the backward pass passes `point` with the gradient.

        Args:
            tensor: A tensor that requires gradients.
            point: The name of the place.

        Example:
            >>> loss = faults.in_backward(model(x)).sum()  # doctest: +SKIP
        """
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.at(point, gradient))
        return tensor

    @contextmanager
    def in_model(self, model: torch.nn.Module) -> Iterator[None]:
        """Add the points "forward", "output" and "backward" of a model, inside this block.

        "output" and "backward" are passed with the first floating-point tensor in the model's output.

        Args:
            model: Any module.

        Example:
            >>> with faults, faults.in_model(model):  # doctest: +SKIP
            ...     train(model)
        """
        from torch.utils._pytree import tree_flatten, tree_unflatten

        def before(module: torch.nn.Module, inputs: Any) -> None:
            self.at("forward")

        def after(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
            leaves, structure = tree_flatten(output)
            for place, leaf in enumerate(leaves):
                if hasattr(leaf, "is_floating_point") and leaf.is_floating_point():
                    leaves[place] = self.in_backward(self.at("output", leaf))
                    break
            return tree_unflatten(leaves, structure)

        hooks = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def in_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Add the points "optimizer" and "after optimizer", around each step of an optimizer, inside this block.

        Args:
            optimizer: Any optimizer.

        Example:
            >>> with faults, faults.in_optimizer(optimizer):  # doctest: +SKIP
            ...     train(model, optimizer)
        """

        def before(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
            self.at("optimizer")

        def after(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
            self.at("after optimizer")

        hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def in_collectives(self) -> Iterator[None]:
        """Add the points "collective" and "after collective", around each launch of a collective, inside this block.

        Example:
            >>> with faults, faults.in_collectives():  # doctest: +SKIP
            ...     train(model)
        """
        from torch.utils._python_dispatch import TorchDispatchMode

        faults = self

        class Watching(TorchDispatchMode):
            @classmethod
            def _should_skip_dynamo(cls) -> bool:
                return False  # as in MemLimit

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                is_collective = func.namespace == "c10d"
                if is_collective:
                    faults.at("collective")
                result = func(*args, **(kwargs or {}))
                if is_collective:
                    faults.at("after collective")
                return result

        with Watching():  # type: ignore[no-untyped-call]
            yield

    @contextmanager
    def in_saves(self) -> Iterator[None]:
        """Add the points "sync" and "rename", before each `os.fsync` and `os.rename`, inside this block.

        Saves in the background pass them too, since every thread of the process does.

        Example:
            >>> with faults, faults.in_saves():  # doctest: +SKIP
            ...     accelerator.save_state("saved")
        """

        def passing(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def passed(*args: Any, **options: Any) -> Any:
                self.at(point)
                return function(*args, **options)

            return passed

        with (
            mock.patch.object(os, "fsync", passing("sync", os.fsync)),
            mock.patch.object(os, "rename", passing("rename", os.rename)),
        ):
            yield


@dataclass(frozen=True, slots=True)
class _Raise:
    error: BaseException

    def __call__(self, value: Any, where: str) -> Any:
        error = copy.copy(self.error)  # each raise grows a traceback of its own, and holds the frames in it
        error.add_note(f"on purpose, {where}")
        raise error


@dataclass(frozen=True, slots=True)
class _Leave:
    exit_code: int

    def __call__(self, value: Any, where: str) -> Any:
        os._exit(self.exit_code)


def _run_out_of_memory(value: Any, where: str) -> Any:
    import torch

    raise torch.OutOfMemoryError(f"CPU out of memory. On purpose, {where}.")


def _find_the_disk_full(value: Any, where: str) -> Any:
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}. On purpose, {where}")


def _die(value: Any, where: str) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    return value


def _hang(value: Any, where: str) -> Any:
    threading.Event().wait()
    return value


def _spoil(value: Any, where: str) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"no tensor is {where}, but {type(value).__name__}; nan_at needs one to make it NaN")
    return value * float("nan")
