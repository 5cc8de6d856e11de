"""Functions over one batch or one output of any tuples, dicts and dataclasses. Run in ranks.

`map_children` rebuilds one level of a container; the caller recurses, since it knows what a leaf is. `share` splits
inputs into one part per rank, for inference and evaluation. Nothing here opens a file or knows a device or a process
group.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserList
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from nbaccel.base.values import frozen

__all__ = [
    "children",
    "is_container",
    "leaves",
    "map_children",
    "share",
]


def map_children(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` rebuilt with `function` applied to each direct child; `value` itself when it is no container.

    Tuples stay tuples, named tuples named; a mapping or dataclass of any class is copied and refilled, so
    classes whose constructor takes other arguments (transformers' ``ModelOutput``) keep their type. A mapping that
    cannot be refilled becomes a dict.

    Example:
        >>> map_children(abs, {"a": -1, "b": -2})
        {'a': 1, 'b': 2}
    """
    kind = type(value)
    if kind is dict:
        return {key: function(child) for key, child in value.items()}
    if kind is list or kind is tuple:
        return kind([function(child) for child in value])
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return {key: function(child) for key, child in value.items()}
    if isinstance(value, Mapping):
        refilled: Any = copy.copy(value)
        for key, child in value.items():
            refilled[key] = function(child)
        return refilled
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*[function(child) for child in value])
    if isinstance(value, list):
        refilled = copy.copy(value)
        refilled[:] = [function(child) for child in value]
        return refilled
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        refilled = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(refilled, field.name, function(getattr(value, field.name)))  # also when frozen
        return refilled
    return value


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each direct child of a container with its name, in the order of `map_children`."""
    if isinstance(value, Mapping):
        yield from ((str(key), child) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), child) for index, child in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a container, in the order in which `map_children` visits them.

    Example:
        >>> list(leaves({"a": (1, 2), "b": [3]}))
        [1, 2, 3]
    """
    below = [child for _, child in children(value)]
    if not below and not is_container(value):
        yield value
    for child in below:
        yield from leaves(child)


def is_container(value: Any) -> bool:
    """Return whether `map_children` would look inside of `value`."""
    return isinstance(value, (Mapping, list, tuple)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


_SLICED = (list, tuple, range, UserList)
"""Sequences whose slices are of their own kind; others (deque has no slices at all) are read into a list."""


def share(inputs: Any, rank: int, world_size: int, apply_padding: bool) -> Any:
    """Return the part of `inputs` for `rank`; see `ProcessControl.split_between_processes`.

    Every input is cut correctly or refused: a rank never gets the whole, which would be the same work N times.

    Example:
        >>> share(range(5), rank=0, world_size=2, apply_padding=False)
        range(0, 3)
        >>> share({"x": [1, 2, 3]}, rank=1, world_size=2, apply_padding=True)
        {'x': [3, 3]}
    """
    inputs = _readable(inputs)
    return _Part.of(_length(inputs), rank, world_size, apply_padding).of_inputs(inputs)


@frozen
class _Part:
    """Samples `start` to `stop`, and the last one of all `repeats` times more."""

    start: int
    stop: int
    repeats: int

    @classmethod
    def of(cls, total: int, rank: int, world_size: int, apply_padding: bool) -> _Part:
        length, extra = divmod(total, world_size)
        start = rank * length + min(rank, extra)
        is_short = extra > 0 and rank >= extra
        return cls(start, start + length + (rank < extra), int(apply_padding and is_short))

    def of_inputs(self, inputs: Any) -> Any:
        if isinstance(inputs, Mapping):
            return map_children(self.of_inputs, inputs)
        if isinstance(inputs, torch.Tensor):
            part = inputs[self.start : self.stop]
            return torch.cat([part, inputs[-1:]]) if self.repeats else part
        if _is_array(inputs):
            part = inputs[self.start : self.stop]
            return sys.modules["numpy"].concatenate([part, inputs[-1:]]) if self.repeats else part
        if hasattr(inputs, "iloc"):  # pandas: by position, whatever the index
            return inputs.iloc[self._numbers(len(inputs))]
        if _is_table(inputs):
            return inputs.select(self._numbers(len(inputs)))
        if isinstance(inputs, Dataset):
            return Subset(inputs, self._numbers(len(inputs)))  # type: ignore[arg-type]
        part = inputs[self.start : self.stop]
        if not self.repeats:
            return part
        return part + inputs[-1:] if isinstance(part, (list, tuple)) else [*part, *inputs[-1:]]

    def _numbers(self, total: int) -> list[int]:
        return [*range(self.start, self.stop), *[total - 1] * self.repeats]


def _readable(inputs: Any) -> Any:
    """Return `inputs` in a form that has a length and an order; every rank must come to the same one.

    Raises:
        TypeError: There is no such form.
    """
    if isinstance(inputs, Mapping):
        return map_children(_readable, inputs)
    kind = type(inputs).__name__
    if isinstance(inputs, (str, bytes, bytearray)):
        raise TypeError(f"split_between_processes does not cut a {kind} into pieces: give it a list, [{kind}]")
    if isinstance(inputs, (set, frozenset)):
        raise TypeError(
            f"split_between_processes cannot split a {kind}: its order differs between processes. "
            "Give it sorted(...) of it"
        )
    if isinstance(inputs, IterableDataset):
        raise TypeError(
            f"split_between_processes would read all of {kind} in every process. Prepare a DataLoader over it: "
            "accelerator.prepare(DataLoader(dataset)) gives each process its samples"
        )
    if _is_sliced(inputs):
        return inputs
    if isinstance(inputs, Iterable) and getattr(inputs, "ndim", None) != 0:
        return list(inputs)
    raise TypeError(
        f"split_between_processes cannot cut a {kind} into parts: give it a list, a tuple, a tensor, an array, "
        "a dataset or a mapping of those"
    )


def _is_sliced(inputs: Any) -> bool:
    if isinstance(inputs, torch.Tensor) or _is_array(inputs):
        return bool(inputs.ndim)
    if isinstance(inputs, _SLICED):
        return True
    return hasattr(inputs, "__len__") and (isinstance(inputs, Dataset) or hasattr(inputs, "iloc") or _is_table(inputs))


def _is_array(inputs: Any) -> bool:
    return "numpy" in sys.modules and isinstance(inputs, sys.modules["numpy"].ndarray)


def _is_table(inputs: Any) -> bool:
    """Return whether `inputs` is like Hugging Face's `datasets.Dataset`, whose rows are taken with `select`."""
    return hasattr(inputs, "select") and hasattr(inputs, "column_names")


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        return len(inputs)
    lengths = {key: _length(values) for key, values in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"split_between_processes needs values of equal length, got {lengths}")
    return next(iter(lengths.values()), 0)
