"""MemLimit: imitates a device of a few megabytes on the CPU. Runs in tests and, around trial steps on a CPU, in ranks.

It counts the bytes of the tensors that exist and refuses the one that would not fit, in the operation that
makes it: in forward, in backward, in the optimizer, in a collective. Not counted: what an operation allocates and
frees internally, tensors on devices, and what other threads than the one that entered it make (of a loader).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

__all__ = ["MemLimit"]

_COUNTED = (torch.Tensor, torch.nn.Parameter)
"""Counted by exact type, since the storage of a wrapper (DTensor, FakeTensor) is not memory of its own."""


class MemLimit(TorchDispatchMode):
    """While entered, tensors on the CPU may hold `limit_bytes` together; one that would exceed it is out of memory.

    Exact to the byte: storages are counted once, whatever views there are, from the operation that makes them until
    their last tensor is freed. Each process counts for itself, so ranks can have limits of their own. It may be
    entered several times, also inside another one, and read at any time.

    limit_bytes: may be changed while it is entered; None only counts.
    live_bytes: held now.  peak_bytes: the most that was held since the start or `reset_peak`.
    refusals: how many times it raised.

    Raises:
        torch.OutOfMemoryError: from any operation in the block, as a full device does.

    >>> with MemLimit(1000) as limit:
    ...     kept = torch.zeros(100)
    ...     try:
    ...         torch.zeros(200)
    ...     except torch.OutOfMemoryError as error:
    ...         print(error)
    CPU out of memory. Tried to allocate 800 bytes; MemLimit allows 1000 bytes, of which 600 bytes are free.
    >>> limit.live_bytes, limit.peak_bytes, limit.refusals
    (400, 400, 1)
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"limit_bytes must be 0 or more, or None to only count; got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.refusals = 0
        self._storages: dict[int, _Counted] = {}

    @classmethod
    def innermost(cls) -> MemLimit | None:
        """Return the limiting instance that this thread has entered last; None outside of any."""
        entered = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, cls)]
        return next((mode for mode in reversed(entered) if mode.limit_bytes is not None), None)

    def reset_peak(self) -> None:
        """Restart `peak_bytes` from the bytes that are held now."""
        self.peak_bytes = self.live_bytes

    def count(self, *objects: Any) -> None:
        """Count what was made before the block: tensors, modules with their gradients, optimizers, containers.

        Raises:
                torch.OutOfMemoryError: the objects do not fit.
        """
        self._admit(_tensors(objects))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would wrap the method below, and the wrapper's frames would hold a refused result."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            self._admit(tree_leaves(result))
        except torch.OutOfMemoryError:
            # On a device nothing would have been made, and the failed operation would hold nothing. So this frame,
            # which the exception keeps alive, must hold nothing either.
            del result, args, kwargs
            raise
        return result

    def _admit(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if type(leaf) in _COUNTED and leaf.device.type == "cpu" and leaf.layout is torch.strided:
                refused_bytes = self._count(leaf.untyped_storage())
                if refused_bytes:
                    del leaf, leaves
                    self._refuse(refused_bytes)

    def _count(self, storage: torch.UntypedStorage) -> int:
        """Count `storage`, or its growth; return the bytes that do not fit, 0 if it fits."""
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        more = size - (0 if known is None else known.size)
        if more > 0 and self.limit_bytes is not None and self.live_bytes + more > self.limit_bytes:
            return more
        if known is None:
            known = self._storages[key] = _Counted()
            weakref.finalize(storage, self._forget, key).atexit = False
        known.size = size
        self.live_bytes += more
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return 0

    def _forget(self, key: int) -> None:
        size = self._storages.pop(key).size  # not within the next line: storages also die in gloo's threads, and a
        self.live_bytes -= size  # thread may be suspended after a call, but not between reading and writing this

    def _refuse(self, asked_bytes: int) -> None:
        self.refusals += 1
        limit_bytes = self.limit_bytes or 0
        raise torch.OutOfMemoryError(
            f"CPU out of memory. Tried to allocate {asked_bytes} bytes; MemLimit allows {limit_bytes} bytes, "
            f"of which {limit_bytes - self.live_bytes} bytes are free."
        )


class _Counted:
    """Size of a storage that exists, as it was last seen."""

    __slots__ = ("size",)

    size: int


def _tensors(objects: Iterable[Any]) -> Iterable[Any]:
    for thing in objects:
        if isinstance(thing, torch.nn.Module):
            for parameter in thing.parameters():
                yield from (parameter, parameter.grad)
            yield from thing.buffers()
        elif isinstance(thing, torch.optim.Optimizer):
            yield from tree_leaves(dict(thing.state))
        else:
            yield from tree_leaves(thing)
