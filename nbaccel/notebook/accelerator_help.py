"""AcceleratorHelp: help and completion for `accelerator`, which ranks have and the kernel has not. Runs in the kernel.

Tab must not wait for torch, which takes seconds to import and would not answer in time. So the names are read from the
source of the class, and help imports the class only when it is asked for.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["ACCELERATOR", "AcceleratorHelp", "HelpMember", "public_members"]

ACCELERATOR = "accelerator"
_MODULE, _CLASS = "nbaccel.train.accelerator", "Accelerator"


class HelpMember(NamedTuple):
    """A public name of the Accelerator.  kind: "function" or "property"."""

    name: str
    kind: str


@functools.cache
def public_members() -> tuple[HelpMember, ...]:
    """Return every public method and property of the class and its bases, by name."""
    members = {member.name: member for member in _members_of(_MODULE, _CLASS)}
    return tuple(members[name] for name in sorted(members))


def _members_of(module: str, name: str) -> Iterator[HelpMember]:
    spec = find_spec("nbaccel")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    homes = {
        alias.asname or alias.name: (each.module, alias.name)
        for each in tree.body
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("nbaccel.")
        for alias in each.names
    }
    here = {each.name for each in tree.body if isinstance(each, ast.ClassDef)}
    for base in node.bases:
        if isinstance(base, ast.Name) and (base.id in homes or base.id in here):
            home, base_name = homes.get(base.id, (module, base.id))
            yield from _members_of(str(home), base_name)
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            marks = {mark.id for mark in each.decorator_list if isinstance(mark, ast.Name)}
            yield HelpMember(each.name, "property" if marks & {"property", "cached_property"} else "function")


class AcceleratorHelp:
    """Answers requests about `accelerator` in one shell, between `install` and `remove`, unless the name is used."""

    _FINDER = "_object_find"

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def install(self) -> None:
        """Replace the shell's method that finds names: IPython has no hook for names that it does not find."""
        find = getattr(self._shell, self._FINDER, None)
        if find is None:
            return

        def found(name: str, namespaces: Any = None) -> Any:
            info = find(name, namespaces)
            if namespaces is None and not info.found and name.strip().partition(".")[0] == ACCELERATOR:
                return find(name, [("of the ranks", {ACCELERATOR: _stand_in()})])
            return info

        setattr(self._shell, self._FINDER, found)

    def remove(self) -> None:
        vars(self._shell).pop(self._FINDER, None)


def _stand_in() -> Any:
    """Return an empty Accelerator to read the help from."""
    from nbaccel.train.accelerator import Accelerator

    return object.__new__(Accelerator)
