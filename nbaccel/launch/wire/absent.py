"""Absent: replaces, in the notebook, a part of an object that could not leave its rank. Known to both sides.

An object that a cell made may hold a lock, a thread, a file. The object is sent anyway, and code that uses that part
gets an error that says why it is missing.
"""

from __future__ import annotations

from typing import Any, NoReturn

from nbaccel.errors import StayedInRank

__all__ = ["Absent"]


class Absent:
    """Replaces `what` ("a lock") in the value of `name`.

    >>> Absent("out:trainer", "a lock")
    <a lock, which stayed in its rank>
    """

    __slots__ = ("_name", "_what")

    def __init__(self, name: str, what: str) -> None:
        self._name = name.removeprefix("out:")
        self._what = what

    def __reduce__(self) -> tuple[type[Absent], tuple[str, str]]:
        return Absent, (self._name, self._what)

    def __repr__(self) -> str:
        return f"<{self._what}, which stayed in its rank>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python asks for these by itself
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StayedInRank(
            f"a part of {self._name} stayed in its rank: {self._what}. Make {self._name} in a cell of the notebook, "
            "above the one that trains it."
        )

    __call__ = __enter__ = __exit__ = __iter__ = __next__ = __len__ = __getitem__ = __contains__ = _refuse
