"""Join what the ranks have left of their parts of the last batch, as one process would have left it. Runs in ranks.

After a loop a notebook shows its last batch, or what the model made of it: ``out.view(16, 3, 3)``. In a rank these are
of its part. At the end of a cell the tensors that its names hold, and that are of parts, are joined in the order of the
ranks, and sizes that were read of them become those of the whole batch. A tensor is of parts if the ranks have
different ones, of the same kind, whose lengths add up to the batch: weights are equal in all ranks.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from nbaccel.train.distributed.callers import users_frames
from nbaccel.train.distributed.nested import map_children
from nbaccel.train.raw_loop.batch_parts import GivenBatches
from nbaccel.train.raw_loop.part_numbers import without_magics
from nbaccel.train.raw_loop.trained_tensors import sums_of

__all__ = ["LastBatch"]

_MOST_BYTES = 64_000_000
"""Largest size of a rank's tensors that are joined: they go to all ranks."""

_MOST_FRAMES = 100
_DEEPEST = 8
_CONTAINERS = (list, tuple, dict)


class LastBatch:
    """The names of one cell that may hold a part of its last batch.

    Args:
        namespace: The names of the cell.
    """

    def __init__(self, namespace: dict[str, Any] | None) -> None:
        self._namespace = {} if namespace is None else namespace
        firsts = ((name, _first_tensor(value)) for name, value in self._namespace.items())
        # References: a tensor may lie where an earlier one of the same name was, as when a cell is run again.
        self._before = {name: weakref.ref(first) for name, first in firsts if first is not None}
        self._handed: GivenBatches | None = None
        self._file = ""

    def note(self, handed: GivenBatches) -> None:
        """Note a backward; `handed` is what it was of."""
        if not handed.is_part or not self._namespace:
            return
        if self._handed is None:
            tops = [frame for frame in users_frames(_MOST_FRAMES) if frame.f_globals is self._namespace]
            self._file = next((top.f_code.co_filename for top in tops if top.f_code.co_name == "<module>"), "")
        self._handed = handed

    def join(self, gather: Callable[[list[Any]], list[Any]]) -> None:
        """Replace parts by the whole. Collective.

        Args:
            gather: A function that returns to all ranks the joined entries of their lists.
        """
        handed = self._handed
        if handed is None or not handed.whole or handed.turn.share != 1.0:
            return
        mine: dict[str, list[Any]] = {}
        sizes: set[str] = set()
        with suppress(Exception):  # a class of the user's may raise anything
            mine = dict(self._parts(handed.rows))
            sizes = {name for name in _sizes(self._file) if self._namespace.get(name) == handed.rows}
        theirs = gather([(mine, sizes)])
        names = [name for name in mine if self._is_of_parts(name, [each for each, _ in theirs], handed.whole)]
        parts = gather([{name: [leaf.detach().cpu() for leaf in _leaves(self._namespace[name])] for name in names}])
        for name in names:
            wholes = iter([torch.cat(column) for column in zip(*(each[name] for each in parts), strict=True)])
            self._namespace[name] = _with(self._namespace[name], wholes)
        for name in set.intersection(*(each for _, each in theirs)):
            self._namespace[name] = handed.whole

    def _parts(self, rows: int) -> Iterator[tuple[str, list[Any]]]:
        """Yield names that the cell has bound to tensors of `rows` rows alone, with what tells these tensors apart."""
        for name, value in list(self._namespace.items()):
            first, before = _first_tensor(value), self._before.get(name)
            if name.startswith("_") or first is None or (before is not None and before() is first):
                continue
            leaves = _leaves(value)
            if not leaves or sum(leaf.nbytes for leaf in leaves) > _MOST_BYTES:
                continue
            if all(type(leaf) is Tensor and leaf.ndim and leaf.shape[0] == rows and _is_dense(leaf) for leaf in leaves):
                kinds = [(tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in leaves]
                yield name, [kinds, sums_of(leaves), rows]

    @staticmethod
    def _is_of_parts(name: str, theirs: list[Mapping[str, list[Any]]], whole: int) -> bool:
        found = [each[name] for each in theirs if name in each]
        are_alike = len(found) == len(theirs) and all(kinds == found[0][0] for kinds, *_ in found)
        differ = are_alike and any(sums != found[0][1] for _, sums, _ in found)
        return differ and sum(rows for *_, rows in found) == whole


def _leaves(value: Any) -> list[Tensor]:
    """Return the tensors of a value that is one, or consists of some; empty where it has others."""
    if _is_tensor(value):
        return [value]
    if type(value) not in _CONTAINERS or not value:
        return []
    below = [_leaves(each) for each in (value.values() if isinstance(value, dict) else value)]
    return [leaf for leaves in below for leaf in leaves] if all(below) else []


def _first_tensor(value: Any) -> Tensor | None:
    """Return the tensor that a value is, or that stands first in it."""
    for _ in range(_DEEPEST):
        if type(value) not in _CONTAINERS or not value:
            break
        value = next(iter(value.values() if isinstance(value, dict) else value))
    return value if _is_tensor(value) else None


def _is_tensor(value: Any) -> bool:
    """Return whether the true type of `value` is a tensor's: a proxy's ``__class__`` is code, and may raise."""
    return issubclass(type(value), Tensor)


def _with(value: Any, wholes: Iterator[Tensor]) -> Any:
    """Return `value` with other tensors in the places of its own."""
    if _is_tensor(value):
        whole = next(wholes).to(value.device)
        return whole.requires_grad_() if value.requires_grad and value.is_leaf else whole
    return map_children(lambda child: _with(child, wholes), value)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _sizes(file: str) -> set[str]:
    """Return names that a cell binds to the number of rows of something: ``n = x.size(0)``, ``n, c = x.shape``."""
    return sizes_in(without_magics(file)) if file else set()


def sizes_in(source: str) -> set[str]:
    """Return names that are bound to a number of rows.

    Example:
        >>> sorted(sizes_in("a = x.size(0)\\nb = len(x)\\nc, d = x.shape\\ne = x.shape[0]\\nf = x.size(1)"))
        ['a', 'b', 'c', 'e']
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            target, text = node.targets[0], ast.unparse(node.value)
            if isinstance(target, ast.Tuple) and target.elts and text.endswith((".shape", ".size()")):
                target, text = target.elts[0], f"{text}[0]"
            if isinstance(target, ast.Name) and (text.endswith((".size(0)", ".shape[0]", "()[0]")) or _is_len(text)):
                found.add(target.id)
    return found


def _is_len(text: str) -> bool:
    return text.startswith("len(") and text.endswith(")") and text.count("(") == text.count(")") == 1
