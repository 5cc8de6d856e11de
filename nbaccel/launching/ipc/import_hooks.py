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
    """Call each action with the module of its name: now, or after its first import in this process."""
    _meet(actions)


@contextmanager
def when_loaded_meanwhile(actions: Mapping[str, _Action]) -> Iterator[None]:
    """Do the same as `when_loaded`, but only for modules that are imported before the block ends."""
    finder = _meet(actions)
    try:
        yield
    finally:
        with suppress(ValueError):  # it was not needed, or the program has removed it
            sys.meta_path.remove(finder)


def _meet(actions: Mapping[str, _Action]) -> _Finder:
    later = {name: action for name, action in actions.items() if name not in sys.modules}
    for name in actions.keys() - later.keys():
        with suppress(Exception):  # see above
            actions[name](sys.modules[name])
    finder = _Finder(later)
    if later:
        sys.meta_path.insert(0, finder)
    return finder


class _Finder(MetaPathFinder):
    """Finds every module that the other finders find, and runs its action when it has been loaded."""

    def __init__(self, actions: dict[str, _Action]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        action = self._actions.pop(name, None)  # the search below calls this method again
        if action is None:
            return None
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, action)
        return spec


class _Loader(Loader):
    """Another loader, and an action after it."""

    def __init__(self, loader: Loader, action: _Action) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        with suppress(Exception):  # see above
            self._action(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
