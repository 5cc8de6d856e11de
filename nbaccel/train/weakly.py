"""Weakly: a method reference that does not keep its object alive. Runs in ranks and scripts.

A part that calls back into the Accelerator which owns it would make a reference cycle: a dropped Accelerator would
keep its models, and the worker processes of its loaders, until the next garbage collection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakMethod

__all__ = ["Weakly"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Weakly(Generic[_P, _T]):
    """A callable `method` that works while its object exists. It can be pickled if the method can.

    >>> class Owner:
    ...     def greet(self) -> str:
    ...         return "here"
    >>> owner = Owner()
    >>> greet = Weakly(owner.greet)
    >>> greet()
    'here'
    """

    def __init__(self, method: Callable[_P, _T]) -> None:
        self._method = WeakMethod(method)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._there()(*args, **kwargs)

    def _there(self) -> Callable[_P, _T]:
        method: Callable[_P, _T] | None = self._method()
        if method is None:
            raise ReferenceError("the object that this method belongs to is gone")
        return method

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._there(),)
