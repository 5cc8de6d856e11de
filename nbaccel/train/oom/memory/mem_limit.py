"""MemLimit: an imitation of a device of a few megabytes on the CPU. Runs in tests and, around trial steps, in ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

__all__ = ["MemLimit"]

_COUNTED = (torch.Tensor, torch.nn.Parameter)
"""Counted by exact type, since the storage of a wrapper (FakeTensor) is not memory of its own. Of a sharded tensor
(DTensor) the rows that it wraps are counted."""


class MemLimit(TorchDispatchMode):
    """Limit the bytes of the tensors on the CPU, inside this block. A tensor that would exceed the limit is out of
    memory.

    The limit counts the bytes of the tensors that exist and refuses the one that would not fit, in the operation that
    makes it: in forward, in backward, in the optimizer, in a collective. It does not count what an operation allocates
    and frees internally, tensors on devices, and what other threads make than the one that entered the block (those of
    a loader).

    It is exact to the byte: storages are counted once, whatever views there are, from the operation that makes them
    until their last tensor is freed. Each process counts for itself, so ranks can have their own limits. Blocks may be
    nested, also of one object, and read at any time. Of a sharded model (FSDP) the rows of this rank are counted, and
    gathered parameters for as long as they are gathered.

    Args:
        limit_bytes: The limit, which may be changed inside the block. None only counts.

    Attributes:
        live_bytes: The bytes that are held now.
        peak_bytes: The most bytes that were held since the start or `reset_peak`.
        refusals: How many times the limit raised.

    Raises:
        torch.OutOfMemoryError: From any operation in the block, as a full device does.

    Example:
        >>> with MemLimit(1000) as limit:
        ...     kept = torch.zeros(100)
        ...     try:
        ...         torch.zeros(200)
        ...     except torch.OutOfMemoryError as error:
        ...         print(error)
        CPU out of memory. Tried to allocate 800 bytes; MemLimit allows 1000 bytes, of which 600 bytes are free.
        >>> limit.live_bytes, limit.peak_bytes, limit.refusals
        (400, 400, 1)
        >>> model = torch.nn.Linear(3, 1)
        >>> with MemLimit(1000) as limit:
        ...     limit.count(model)  # 4 numbers, 4 bytes each
        ...     limit.reset_peak()
        >>> limit.peak_bytes
        16
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"limit_bytes must be 0 or more, or None to only count; got {limit_bytes}")
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.refusals = 0
        self._live = 0
        self._storages: dict[int, _Counted] = {}
        self._gathered: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # FSDP frees them and keeps the tensors

    @property
    def live_bytes(self) -> int:
        """Bytes that are held now."""
        self._look_at_gathered()
        return self._live

    @classmethod
    def innermost(cls) -> MemLimit | None:
        """Return the limiting object that this thread has entered last; None outside of any block."""
        entered = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, cls)]
        return next((mode for mode in reversed(entered) if mode.limit_bytes is not None), None)

    def reset_peak(self) -> None:
        """Restart `peak_bytes` from the bytes that are held now."""
        self.peak_bytes = self.live_bytes

    def count(self, *objects: Any) -> None:
        """Count what was made before the block.

        What a forward of a sharded model has left gathered must be freed before (``reshard()``).

        Args:
            *objects: Tensors, modules with their gradients, optimizers, or containers of these. A sharded module counts
                with its rows.

        Raises:
            torch.OutOfMemoryError: The objects do not fit.
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
            if getattr(func, "namespace", "") == "fsdp":
                self._admit_gathered(tree_leaves((kwargs or {}).get("out")))
            self._admit(tree_leaves(result))
        except torch.OutOfMemoryError:
            # On a device nothing would have been made, and the failed operation would hold nothing. So this frame,
            # which the exception keeps alive, must hold nothing either.
            del result, args, kwargs
            raise
        return result

    def _admit(self, leaves: Iterable[Any]) -> None:
        for leaf in map(_own_rows, leaves):
            if type(leaf) in _COUNTED and leaf.device.type == "cpu" and leaf.layout is torch.strided:
                refused_bytes = self._count(leaf.untyped_storage())
                if refused_bytes:
                    del leaf, leaves
                    self._refuse(refused_bytes)

    def _admit_gathered(self, outputs: Sequence[Any]) -> None:
        """Count the tensors into which FSDP gathers parameters, and watch their sizes from now on.

        Their storages are resized between a gather and the next one, which no operation tells.
        """
        for tensor in outputs:
            if type(tensor) in _COUNTED and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._gathered[storage._cdata] = weakref.ref(storage)
        self._admit(outputs)

    def _look_at_gathered(self) -> None:
        """Take off what has been freed of gathered parameters."""
        for key, reference in list(self._gathered.items()):
            storage, known = reference(), self._storages.get(key)
            if storage is None or known is None:
                self._gathered.pop(key, None)
                continue
            freed_bytes = known.size - storage.nbytes()
            if freed_bytes > 0:
                known.size -= freed_bytes
                self._live -= freed_bytes

    def _count(self, storage: torch.UntypedStorage) -> int:
        """Count `storage`, or its growth; return the bytes that do not fit, 0 if it fits."""
        key, size = storage._cdata, storage.nbytes()
        known = self._storages.get(key)
        more = size - (0 if known is None else known.size)
        if self._gathered and self._live + more > self.peak_bytes:  # a new peak, if that is still held
            self._look_at_gathered()
            more = size - (0 if known is None else known.size)
        if more > 0 and self.limit_bytes is not None and self._live + more > self.limit_bytes:
            return more
        if known is None:
            known = self._storages[key] = _Counted()
            weakref.finalize(storage, self._forget, key).atexit = False
        known.size = size
        self._live += more
        self.peak_bytes = max(self.peak_bytes, self._live)
        return 0

    def _count_again(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of `storage` once more, for as long as it lives."""
        key = -storage._cdata  # no storage has such an address
        if key not in self._storages:
            known = self._storages[key] = _Counted()
            weakref.finalize(storage, self._forget, key).atexit = False
            known.size = storage.nbytes()
            self._live += known.size
            self.peak_bytes = max(self.peak_bytes, self._live)

    def _forget(self, key: int) -> None:
        size = self._storages.pop(key).size  # not within the next line: storages also die in gloo's threads, and a
        self._live -= size  # thread may be suspended after a call, but not between reading and writing this

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


def _own_rows(leaf: Any) -> Any:
    """Return the tensor that holds this rank's rows of a sharded one (DTensor); anything else as it is.

    The attribute, since ``to_local`` is an operation on the tensor, which autograd would record.
    """
    return leaf if type(leaf) in _COUNTED else getattr(leaf, "_local_tensor", leaf)


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
