"""Runs an action on a module when the program loads it. In ranks, and for a time in a kernel; it imports nothing else.

For a module that is loaded already, in the kernel or by the zygote, the action runs at once. If a version of the module
does not fit the action, the program runs as it would without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = [
    "when_loaded",
    "when_loaded_meanwhile",
]

_Action = Callable[[ModuleType], None]


def when_loaded(actions: Mapping[str, _Action]) -> None:
    """Call each action with the module of its name: now, or after its first import in this process.

    Actions for one module run in the order in which they were given.
    """
    finder = next((each for each in sys.meta_path if type(each) is _Finder), None)
    if finder is None:  # one for all: each import of the program asks every finder
        sys.meta_path.insert(0, finder := _Finder())
    finder.add(actions)


@contextmanager
def when_loaded_meanwhile(actions: Mapping[str, _Action]) -> Iterator[None]:
    """Do the same as `when_loaded`, but only for modules that are imported before the block ends."""
    finder = _FinderForNow()
    sys.meta_path.insert(0, finder)
    finder.add(actions)
    try:
        yield
    finally:
        with suppress(ValueError):  # the program has removed it
            sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds every module that the other finders find, and runs its actions when it has been loaded."""

    def __init__(self) -> None:
        self._actions: dict[str, list[_Action]] = {}

    def add(self, actions: Mapping[str, _Action]) -> None:
        for name, action in actions.items():
            if name not in sys.modules:
                self._actions.setdefault(name, []).append(action)
            else:
                with suppress(Exception):  # see above
                    action(sys.modules[name])

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        actions = self._actions.pop(name, None)  # the search below calls this method again
        if actions is None:
            return None
        try:
            spec = find_spec(name)
        finally:
            self._actions[name] = actions  # a program may only look whether there is such a module
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name, self._actions)
        return spec


class _FinderForNow(_Finder):
    """A finder of one block: nobody else adds to it."""


class _Loader(Loader):
    """Another loader, and the actions for its module after it."""

    def __init__(self, loader: Loader, name: str, actions: dict[str, list[_Action]]) -> None:
        self._loader = loader
        self._name = name
        self._actions = actions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for action in self._actions.pop(self._name, ()):
            with suppress(Exception):  # see above
                action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
