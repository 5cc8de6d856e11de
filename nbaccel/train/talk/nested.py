"""Nested containers: functions over one batch or one output of any tuples, dicts and dataclasses. Runs in ranks.

`map_children` rebuilds one level of a container; the caller recurses, since it knows what a leaf is.
It opens no file, knows no device and no process group.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

__all__ = ["children", "concatenate", "count_rows", "is_container", "leaves", "map_children", "slice_rows"]


def map_children(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` rebuilt with `function` applied to each direct child; `value` itself when it is no container.

    Tuples stay tuples, named tuples named; a mapping or dataclass of any class is copied and refilled, so
    classes whose constructor takes other arguments (transformers' ``ModelOutput``) keep their type. A mapping that
    cannot be refilled becomes a dict.

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


def count_rows(value: Any) -> int | None:
    """Return the number of samples in a collated batch: the first dimension of its first tensor. None without one."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else None
    for _, child in children(value):
        rows = count_rows(child)
        if rows is not None:
            return rows
    return None


def slice_rows(value: Any, start: int, stop: int) -> Any:
    """Return samples `start` to `stop` of a collated batch; strings and numbers of the whole batch are not cut."""
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.ndim else value
    if _lists_samples(value):
        return value[start:stop]
    return map_children(lambda child: slice_rows(child, start, stop), value)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Join collated batches of one structure along the samples, or their tensors along another dimension.

    >>> concatenate([{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 2)}])["x"].shape
    torch.Size([3, 2])
    """
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim) if first.ndim else first
    if _lists_samples(first):
        return type(first)(sample for value in data for sample in value)
    parts = iter([[child for _, child in children(value)] for value in data])
    columns = iter(list(zip(*parts, strict=True)))
    return map_children(lambda _: concatenate(next(columns), dim), first)


def _lists_samples(value: Any) -> bool:
    """Return whether `value` is a list with one entry per sample, as default_collate keeps strings and objects."""
    return type(value) in (list, tuple) and bool(value) and count_rows(value) is None
