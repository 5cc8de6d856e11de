"""CellNames: the names of a notebook whose objects decide how a cell runs. Runs in ranks.

A rank that is forked has all names of the notebook, and one that starts from a clean process only those that the cell
reads. A checkpoint compares, and finds objects by, those that both have, so that either can go on with it.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from nbaccel.base.values import attributes_of
from nbaccel.launching.tasks.cell_code import CellSource
from nbaccel.namespace.names import (
    READ_BY_TEXT,
    codes_of,
    made_before_read,
    names_in_magics,
    names_read,
    not_read,
    with_their_own,
)

__all__ = ["CellNames"]


class CellNames:
    """The names that a cell may read, and those that it has bound. Made before the cell runs.

    A value that an earlier run of the cell has left, and that this one makes anew, is none of them until it has.

    Args:
        namespace: The notebook, as the cell finds it.

    Example:
        >>> notebook = {"data": [1], "loss": 0.5, "other": [2]}
        >>> names = CellNames(CellSource("total = sum(data)\\nloss = total", "In [2]"), notebook)
        >>> notebook["total"] = 1
        >>> sorted(names.compared(notebook))
        ['data', 'total']
    """

    def __init__(self, source: CellSource, namespace: Mapping[str, Any]) -> None:
        parts = source.compile()
        reads = names_read(parts) | names_in_magics(source.code)
        self._reads = with_their_own(reads - made_before_read(source.code), namespace)
        self._reads |= with_their_own(
            _names_behind([namespace.get(name) for name in self._reads], namespace), namespace
        )
        self._reads -= not_read(source.code, namespace)
        if READ_BY_TEXT & reads:
            self._reads |= namespace.keys()
        self._began = {name: _referred(value) for name, value in namespace.items()}

    def compared(self, roots: Mapping[str, Any]) -> frozenset[str]:
        """Return those of `roots`, names and locals of functions, that the cell may read or has bound."""
        began = self._began
        return frozenset(
            root
            for root, value in roots.items()
            if root in self._reads or root not in began or began[root]() is not value
        )

    def let_go(self) -> None:
        """Keep no value of before the cell: the state at the head is taken."""
        self._began.clear()


def _names_behind(values: Iterable[Any], namespace: Mapping[str, Any]) -> set[str]:
    """Return functions and classes of the notebook that are inside of other values, and names that these read.

    Such are a loader's data set, the function that makes its batches, and the layers of a model.
    """
    found: set[str] = set()
    waiting, seen = deque(values), set[int]()
    while waiting and len(seen) < _MOST:
        value = waiting.popleft()
        kind = type(value)
        if id(value) in seen or kind in _HOLD_NONE or issubclass(kind, types.ModuleType):
            continue
        seen.add(id(value))
        found |= names_read(list(codes_of(value)))
        is_code = kind is types.FunctionType or issubclass(kind, type)
        code: Any = value if is_code else kind
        name = code.__name__
        if code.__module__ == "__main__" and namespace.get(name) is code:
            found.add(name)
        if kind is dict:
            waiting += islice(value.values(), _MOST_ITEMS)
        elif kind in (list, tuple, set, frozenset):
            waiting += islice(value, _MOST_ITEMS)
        elif not is_code:
            waiting += islice((attributes_of(value) or {}).values(), _MOST_ITEMS)
    return found


_MOST, _MOST_ITEMS = 5_000, 100
"""Objects that are looked into, and parts of each: a list of samples holds objects of one kind."""
_HOLD_NONE = frozenset({type(None), bool, int, float, complex, str, bytes, Tensor, Parameter})


def _referred(value: Any) -> Callable[[], Any]:
    """Return a function that returns `value`; one that is rebound, such as a model, is not kept where possible."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
