"""Runs an action on a module when the program loads it. In ranks; it imports nothing else.

For a module that is loaded already, in the kernel or by the zygote, the action runs at once. If a version of the module
does not fit the action, the program runs as it would without it. What is to be done with the modules of a package can
be asked for when the package is found (`when_found`), so that nobody loads it for programs without that package. For
the time of one block: `import_hooks_meanwhile`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = [
    "Action",
    "Ask",
    "Finder",
    "when_found",
    "when_loaded",
]

Action = Callable[[ModuleType], None]

Ask = Callable[[], Iterable[tuple[str, Action]]]


def when_loaded(actions: Mapping[str, Action]) -> None:
    """Call each action with the module of its name: now, or after its first import in this process.

    Actions for one module run in the order in which they were given. Nothing stays where all modules are loaded.
    """
    later = [name for name in actions if name not in sys.modules]
    (_finder() if later else Finder()).add(actions.items())


def when_found(asks: Iterable[tuple[str, Ask]]) -> None:
    """Ask what is to be done with which modules before the package of each name is loaded; at once if it is.

    What an ask raises is raised by the import of the package.
    """
    finder = _finder()
    for name, ask in asks:
        finder.add_ask(name, ask)


def _finder() -> Finder:
    finder = next((each for each in sys.meta_path if type(each) is Finder), None)
    if finder is None:  # one for all: each import of the program asks every finder
        sys.meta_path.insert(0, finder := Finder())
    return finder


class Finder(MetaPathFinder):
    """Finds every module that the other finders find, and runs its actions when it has been loaded."""

    def __init__(self) -> None:
        self._actions: dict[str, list[Action]] = {}
        self._asks: dict[str, list[Ask]] = {}

    def add(self, actions: Iterable[tuple[str, Action]], loading: str = "") -> None:
        """Run each action with the module of its name, now or when it is loaded.

        Args:
            loading: A module that is being loaded, and not complete.
        """
        for name, action in actions:
            if name not in sys.modules or name == loading:
                self._actions.setdefault(name, []).append(action)
            else:
                with suppress(Exception):  # see above
                    action(sys.modules[name])

    def add_ask(self, name: str, ask: Ask) -> None:
        """Ask now, or before the module of that name is loaded."""
        if name in sys.modules:
            self.add(ask())
        else:
            self._asks.setdefault(name, []).append(ask)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        of_module = [(known, known.pop(name)) for known in (self._actions, self._asks) if name in known]
        if not of_module:  # or the search below calls this method again
            return None
        try:
            spec = find_spec(name)
        finally:
            for known, entries in of_module:  # a program may only look whether there is such a module
                known[name] = entries  # type: ignore[assignment]
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name, self)
        return spec

    def load(self, module: ModuleType, name: str, loader: Loader) -> None:
        """Load `module` by its own `loader`, with its asks before that and its actions behind."""
        for ask in self._asks.pop(name, ()):
            self.add(ask(), loading=name)
        loader.exec_module(module)
        for action in self._actions.pop(name, ()):
            with suppress(Exception):  # see above
                action(module)


class _Loader(Loader):
    """Another loader, and the asks and actions for its module around it."""

    def __init__(self, loader: Loader, name: str, finder: Finder) -> None:
        self._loader = loader
        self._name = name
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._finder.load(module, self._name, self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
