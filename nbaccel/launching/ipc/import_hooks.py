"""Runs an action on a module when the program loads it. In ranks; it imports nothing else.

For a module that is loaded already, in the kernel or by the zygote, the action runs at once. If a version of the module
does not fit the action, the program runs as it would without it. What is to be done with the modules of a package can
be asked for when the package is found (`when_found`), so that nobody loads it for programs without that package. For
the time of one block: `import_hooks_meanwhile`.

What a rank only puts in place can be made before, in the kernel: `Changes`, made of `Replacement`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

__all__ = [
    "Action",
    "Ask",
    "AskPrepares",
    "Assignment",
    "Change",
    "Changes",
    "Finder",
    "Prepare",
    "Replacement",
    "when_found",
    "when_loaded",
]

Action = Callable[[ModuleType], None]

Ask = Callable[[], Iterable[tuple[str, Action]]]

_Entry = TypeVar("_Entry")

Change = Callable[[], object]
"""Puts something in place in a module of this process. It is made before, maybe in the kernel."""

Prepare = Callable[[Any], Iterable[Change]]
"""Returns what is to be put in place in a module, and changes nothing."""

AskPrepares = Callable[[], Iterable[tuple[str, Prepare]]]


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

    def expect(self, actions: dict[str, list[Action]], asks: dict[str, list[Ask]]) -> None:
        """Take actions and asks for modules that are not loaded, by the names of these."""
        self._actions = _joined(self._actions, actions)
        self._asks = _joined(self._asks, asks)

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


def _joined(known: dict[str, list[_Entry]], added: dict[str, list[_Entry]]) -> dict[str, list[_Entry]]:
    """Return both, by name; the larger one is not gone through."""
    few, many = sorted((known, added), key=len)
    for name in few:
        many[name] = [*known.get(name, ()), *added.get(name, ())]
    return many


class Replacement:
    """A change: a function takes another one's place in a module or class. Nothing is changed before it is called.

    A rank that makes a function copies a page of the kernel's for each object that it uses for that. So it is made
    once, before the first fork of all: a forked rank only puts it in place.

    Args:
        holders: The modules or classes that have the function, under one name.
        name: That name.
        wraps: Returns the new function for the old one.
    """

    def __init__(self, holders: Sequence[Any], name: str, wraps: Callable[[Any], Any]) -> None:
        self._holders = holders
        self._name = name
        self._wraps = wraps
        self._old = getattr(holders[0], name)
        self._new = wraps(self._old)

    def __call__(self) -> None:
        """Put the new function there; it is made anew where another one has taken the old one's place since."""
        now = getattr(self._holders[0], self._name)
        new = self._new if now is self._old else self._wraps(now)
        for holder in self._holders:
            setattr(holder, self._name, new)


class Assignment:
    """A change: a name of a module, class or object gets a value. Nothing is changed before it is called.

    What has that name now is kept: a rank that released it would copy a page for each object that it is made of.

    Args:
        holder: The module, class or object.
        name: The name.
        value: Its value.
    """

    def __init__(self, holder: Any, name: str, value: Any) -> None:
        self._place = holder, name, value
        self._kept = vars(holder).get(name)

    def __call__(self) -> None:
        setattr(*self._place)


class Changes:
    """Changes of modules that a rank puts in place. Made in the kernel, before the fork: see `Replacement`.

    What concerns a module that the kernel has loaded is made here, the rest when the rank has loaded the module.

    Args:
        prepares: By the name of a module.
        asks: For a package, by its name, the same for its modules; asked when the package is found.
    """

    def __init__(
        self, prepares: Iterable[tuple[str, Prepare]] = (), asks: Iterable[tuple[str, AskPrepares]] = ()
    ) -> None:
        self._prepares = list(prepares)
        self._asks = list(asks)
        self._make()

    def current(self) -> Changes:
        """Return these changes; what was loaded, or loaded anew, since they were made is among them."""
        modules = sys.modules
        if self._is_awaited_there() or any(modules.get(name) is not module for name, module in self._seen):
            self._make()
        return self

    def _make(self) -> None:
        self._changes: list[Change] = []
        self._seen: list[tuple[str, Any]] = []
        self._later: dict[str, list[Action]] = {}
        self._later_asks: dict[str, list[Ask]] = {}
        for package, ask in self._asks:
            if package in sys.modules:
                self._add(ask())
            else:
                self._later_asks.setdefault(package, []).append(partial(_actions_of, ask))
        self._add(self._prepares)
        # Copies that lie side by side: a rank that looks for them writes to one page, and not to one for each name.
        self._awaited = "\n".join((*self._later, *self._later_asks)).split("\n")

    def _add(self, prepares: Iterable[tuple[str, Prepare]]) -> None:
        for name, prepare in prepares:
            if name not in sys.modules:
                self._later.setdefault(name, []).append(partial(_prepare_and_put, prepare))
                continue
            self._seen.append((name, sys.modules[name]))
            with suppress(Exception):  # a version that does not fit: the program runs as it would without it
                self._changes += list(prepare(sys.modules[name]))

    def put(self) -> None:
        """Put all in place, now or when a module is loaded."""
        if self._is_awaited_there():  # another thread of the kernel has loaded it since
            self._make()
        _put(self._changes)
        if self._later or self._later_asks:
            _finder().expect(self._later, self._later_asks)

    def _is_awaited_there(self) -> bool:
        return any(map(sys.modules.__contains__, self._awaited))


def _actions_of(ask: AskPrepares) -> Iterator[tuple[str, Action]]:
    for name, prepare in ask():
        yield name, partial(_prepare_and_put, prepare)


def _prepare_and_put(prepare: Prepare, module: ModuleType) -> None:
    _put(list(prepare(module)))


def _put(changes: Iterable[Change]) -> None:
    for change in changes:
        try:
            change()
        except Exception:  # as in `Changes`
            continue


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
