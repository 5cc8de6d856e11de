"""Import hooks of one block: they act on what is imported before it ends. In the kernel, and in ranks of a check."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from nbaccel.launching.ipc.import_hooks import Action, Ask, Finder

__all__ = ["when_found_meanwhile", "when_loaded_meanwhile"]


@contextmanager
def when_loaded_meanwhile(actions: Mapping[str, Action]) -> Iterator[None]:
    """Do the same as `when_loaded`, but only for modules that are imported before the block ends."""
    with _for_now() as finder:
        finder.add(actions.items())
        yield


@contextmanager
def when_found_meanwhile(asks: Iterable[tuple[str, Ask]]) -> Iterator[None]:
    """Do the same as `when_found`, but only for packages that are imported before the block ends."""
    with _for_now() as finder:
        for name, ask in asks:
            finder.add_ask(name, ask)
        yield


@contextmanager
def _for_now() -> Iterator[_FinderForNow]:
    finder = _FinderForNow()
    sys.meta_path.insert(0, finder)
    try:
        yield finder
    finally:
        with suppress(ValueError):  # the program has removed it
            sys.meta_path.remove(finder)


class _FinderForNow(Finder):
    """A finder of one block: nobody else adds to it."""
