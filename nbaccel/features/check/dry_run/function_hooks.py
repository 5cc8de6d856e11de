"""Functions of libraries that are replaced for a while, and put back. Used in the ranks of dry runs and of trials.

If something else has wrapped a replacement meanwhile, it is not put back: calls still reach the real function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["FunctionHooks"]

_ABSENT: Any = object()


class FunctionHooks:
    """Functions that are replaced until `undo`.

    Example:
        >>> import math
        >>> replaced = FunctionHooks()
        >>> replaced.wrap(math, "sqrt", lambda real, x: real(x) + 1)
        >>> math.sqrt(9)
        4.0
        >>> replaced.undo()
        >>> math.sqrt(9)
        3.0
    """

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def wrap(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        """Call `ours` instead of a function, with that function before its arguments.

        Args:
            owner: The module or the class that has it.
        """
        real = getattr(owner, name)

        @functools.wraps(real)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return ours(real, *args, **kwargs)

        self.put(owner, name, wrapped)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give an attribute of a module or a class another value."""
        # Not `getattr`: a static method, say, is put back as what it was.
        self._made.append((owner, name, vars(owner).get(name, _ABSENT), value))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put back what was there, the last replacement first. Calling this again has no effect."""
        while self._made:
            owner, name, before, ours = self._made.pop()
            if vars(owner).get(name) is not ours:
                continue
            if before is _ABSENT:  # it was inherited
                delattr(owner, name)
            else:
                setattr(owner, name, before)
