"""Do something with a module when the program loads it. Runs in ranks, and for a time in a kernel; nothing is
imported that the program does not.

A module that is loaded already, in the kernel or by the zygote, is met at once. Where a version of it does not fit what
is to be done, the program runs as it would without us.
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

__all__ = ["when_loaded", "when_loaded_meanwhile"]

_Action = Callable[[ModuleType], None]


def when_loaded(actions: Mapping[str, _Action]) -> None:
    """Call each action with the module of its name: now, or after its first import in this process."""
    _meet(actions)


@contextmanager
def when_loaded_meanwhile(actions: Mapping[str, _Action]) -> Iterator[None]:
    """`when_loaded`, where modules that are imported after the block are not met any more."""
    finder = _meet(actions)
    try:
        yield
    finally:
        with suppress(ValueError):  # the program has taken it away
            sys.meta_path.remove(finder)


def _meet(actions: Mapping[str, _Action]) -> _Finder:
    later = {name: action for name, action in actions.items() if name not in sys.modules}
    for name in actions.keys() - later.keys():
        with suppress(Exception):  # see above
            actions[name](sys.modules[name])
    finder = _Finder(later)
    sys.meta_path.insert(0, finder)
    return finder


class _Finder(MetaPathFinder):
    """Finds what everybody else finds, and acts on it when it has been loaded."""

    def __init__(self, actions: dict[str, _Action]) -> None:
        self._actions = actions

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        action = self._actions.pop(name, None)  # the search below comes by here again
        if action is None:
            return None
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, action)
        return spec


class _Loader(Loader):
    """Another loader, and something to do after it."""

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
