"""Shell: the notebook's names, and the outputs that IPython keeps. Runs in the kernel and in ranks.

IPython is never imported, only used if loaded: in a script the names are those of `__main__`, without history.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nbaccel.train.memory.holdings import Holding, holdings

__all__ = ["Names", "named_holdings"]

_LAST = ("_", "__", "___")


def named_holdings(leaving: Collection[Any] = ()) -> list[Holding]:
    """Return what the program's names and a notebook's outputs keep alive, the largest first.

    leaving: objects whose names are ignored.
    """
    names = Names.of_this_process()
    gone = {id(thing) for thing in leaving}
    staying = {name: value for name, value in names.variables().items() if id(value) not in gone}
    return holdings(staying, names.outputs(), beside=names.not_followed())


class Names:
    """Variables of the program that runs here, by the names its author uses.

    shell: IPython's, or None in a script.
    """

    def __init__(self, shell: Any = None) -> None:
        self._shell = shell

    @classmethod
    def of_this_process(cls) -> Names:
        ipython = sys.modules.get("IPython")
        return cls(None if ipython is None else ipython.get_ipython())

    @property
    def namespace(self) -> dict[str, Any]:
        return vars(sys.modules["__main__"]) if self._shell is None else self._shell.user_ns

    def variables(self) -> dict[str, Any]:
        """Return the program's own variables, without those that IPython made."""
        hidden: Mapping[str, Any] = {} if self._shell is None else self._shell.user_ns_hidden
        return {
            name: value
            for name, value in self.namespace.items()
            if name not in hidden and not (name.startswith("_") and name.strip("_i0123456789") == "")
        }

    def outputs(self) -> dict[str, Any]:
        """Return outputs of cells that IPython keeps, as `Out[7]`; and `_7` or `_`, where only those are left."""
        if self._shell is None:
            return {}
        spaces = (self._shell.user_ns_hidden, self.namespace)
        last = {name: value for space in spaces for name, value in space.items() if name in _LAST or _is_numbered(name)}
        return {f"Out[{number}]": value for number, value in self._out().items()} | last

    def not_followed(self) -> list[Any]:
        """Return objects that would lead from one variable to all others."""
        return [self.namespace, sys.modules, self._out(), *([] if self._shell is None else [self._shell])]

    def forget_history(self, is_heavy: Callable[[Any], bool]) -> None:
        """Drop the heavy outputs everywhere in IPython: Out, `_7`, `_`, its display hook, its mirror.

        The mirror is `user_ns_hidden`, in which IPython records the names it made itself, with their values.
        """
        if self._shell is None:
            return
        mirror = self._shell.user_ns_hidden
        out = self._out()
        for number in [number for number, value in out.items() if is_heavy(value)]:
            del out[number]
        for space in (self.namespace, mirror):
            for name in [name for name in space if _is_numbered(name) and is_heavy(space[name])]:
                del space[name]
            space.update({name: "" for name in _LAST if is_heavy(space.get(name))})
        hook = self._shell.displayhook
        for name in _LAST:
            if is_heavy(getattr(hook, name, None)):
                setattr(hook, name, "")

    def _out(self) -> dict[int, Any]:
        out: dict[int, Any] = {} if self._shell is None else self.namespace.get("_oh", {})
        return out


def _is_numbered(name: str) -> bool:
    """
    >>> _is_numbered("_7"), _is_numbered("_i7"), _is_numbered("_")
    (True, False, False)
    """
    return name.startswith("_") and name[1:].isdecimal()
