"""Random states with which torch's loaders draw their order, and passing over batches without fetching. Runs in ranks.

A loader draws when its iterator is made and when its first batch is asked for. Of two loaders in one loop the second
draws after the first has fetched, so each state is kept by itself. Batches that are passed over are drawn as indices
alone where the loader fetches in this process. They are those of the user's loader: parts of them, of several ranks,
are made below.
"""

from __future__ import annotations

import functools
import os
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, Set, ValuesView
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from nbaccel.features.cell_checkpoints import random_states
from nbaccel.train.raw_loop import loader_pass

__all__ = ["DRAWN", "LoaderDraw", "LoaderDraws", "draws_nothing", "obstacle_to_passing", "remade"]

DRAWN = "nbaccel_drawn"
"""Attribute of an iterator: its `LoaderDraw`."""


@dataclass(slots=True, eq=False)
class LoaderDraw:
    """The states with which one iterator of a loader drew.

    Args:
        loader_of: Returns its loader, if that still exists.
        created: The state when it was made.
        first: The state before its first batch; None if that has not come.
        again: The state that its first batch gets; None if that is the present one.
    """

    loader_of: weakref.ref[Any]
    created: dict[str, Any]
    first: dict[str, Any] | None = None
    again: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return nothing: a pickled iterator has drawn in another process."""
        return type(None), ()

    @property
    def loader(self) -> Any:
        """The loader; None if it is gone."""
        return self.loader_of()

    def record(self) -> dict[str, Any]:
        """Return what `LoaderDraws.passing` needs."""
        return {"created": self.created, "first": self.first}


class LoaderDraws:
    """Notes the draws of torch's loaders in this thread, and repeats them, while entered.

    Args:
        on_made: Called with each iterator's `LoaderDraw`.
    """

    def __init__(self, on_made: Callable[[LoaderDraw], None]) -> None:
        self._on_made = on_made
        self._records: deque[dict[str, Any]] = deque()
        self._is_passing = False
        self._place = (os.getpid(), threading.get_ident())

    def __enter__(self) -> Self:
        loader_kind: Any = DataLoader
        kind: Any = _BaseDataLoaderIter
        self._iter, self._next = loader_kind.__iter__, kind.__next__
        real_iter, real_next = self._iter, self._next

        @functools.wraps(real_iter)
        def begin(loader: Any) -> Any:
            return self._begin(loader, real_iter) if self._minds() else real_iter(loader)

        @functools.wraps(real_next)
        def next_batch(iterator: Any) -> Any:
            drawn = iterator.__dict__.get(DRAWN)
            return real_next(iterator) if drawn is None or not self._minds() else self._take(iterator, drawn, real_next)

        self._own = begin, next_batch
        loader_kind.__iter__, kind.__next__ = begin, next_batch
        return self

    def __exit__(self, *error: object) -> None:
        loader_kind: Any = DataLoader
        kind: Any = _BaseDataLoaderIter
        self._place = (0, 0)
        if loader_kind.__iter__ is self._own[0]:
            loader_kind.__iter__ = self._iter
        if kind.__next__ is self._own[1]:
            kind.__next__ = self._next

    def expect(self, records: Iterable[dict[str, Any]]) -> None:
        """Let the iterators that are made next draw with these states, until `passed`."""
        self._records = deque(records)

    def pass_over(self, iterator: Any, count: int) -> None:
        """Take `count` items of an iterator of the loop; loaders below it fetch nothing where they need not."""
        self._is_passing = True
        try:
            for _ in range(count):
                next(iterator)
        finally:
            self._is_passing = False

    def passed(self) -> None:
        """Note that the loop is where it was: its loaders have drawn."""
        self._records.clear()

    def _minds(self) -> bool:
        return self._place == (os.getpid(), threading.get_ident())

    def _begin(self, loader: Any, real: Callable[[Any], Any]) -> Any:
        again = None
        if self._records:
            record = self._records.popleft()
            random_states.restore(record["created"])
            again = record["first"]
        created = random_states.read()
        iterator = real(loader)
        if isinstance(iterator, _BaseDataLoaderIter):
            drawn = LoaderDraw(weakref.ref(loader), created, again=again)
            iterator.__dict__[DRAWN] = drawn
            self._on_made(drawn)
        return iterator

    def _take(self, iterator: Any, drawn: LoaderDraw, real: Callable[[Any], Any]) -> Any:
        if drawn.first is None:
            if drawn.again is not None:
                random_states.restore(drawn.again)
            drawn.first = random_states.read()
        if self._is_passing and _need_not_fetch(iterator):
            return _draw(iterator)
        return real(iterator)


def _need_not_fetch(iterator: Any) -> bool:
    """Return whether its batches are made here, each of its own indices: then one that is passed over need not be."""
    return not iterator._num_workers and iterator._dataset_kind == _DatasetKind.Map


def _draw(iterator: Any) -> None:
    """Draw the indices of the next batch, as torch's iterator does before it fetches."""
    next(iterator._sampler_iter)
    iterator._num_yielded += 1
    loader_pass.pass_over(iterator, 1)


def remade(loader: Any, created: dict[str, Any], first: dict[str, Any] | None, taken: int) -> Any:
    """Return an iterator of `loader` that has handed out `taken` batches.

    Args:
        created, first: Its states, see `LoaderDraw`.
    """
    kept = random_states.read()
    random_states.restore(created)
    iterator = iter(loader)
    if first is not None:
        random_states.restore(first)
        drawn = iterator.__dict__.get(DRAWN)
        if drawn is not None:
            drawn.first = first
    for _ in range(taken):
        if _need_not_fetch(iterator):
            _draw(iterator)
        else:
            next(iterator)
    random_states.restore(kept)
    return iterator


# --- what can be passed over --------------------------------------------------------------------------------------

_EXAMPLES: tuple[Any, ...] = ([], (), range(1), range(1 << 70), "", b"", set(), {}, {}.keys(), {}.values(), {}.items())

_PLAIN: tuple[type, ...] = (
    reversed,
    *(type(iter(each)) for each in _EXAMPLES),
    *(type(reversed(each)) for each in _EXAMPLES if hasattr(each, "__reversed__")),
)
"""Iterators whose position is the number of items that they have handed out."""


def obstacle_to_passing(iterator: Any) -> str:
    """Return what of an iterator's position is more than a number of items; empty where it can be passed over."""
    if isinstance(iterator, (_BaseDataLoaderIter, *_PLAIN)):
        return ""
    if isinstance(iterator, zip):
        inner = iterator.__reduce__()[1]
    elif isinstance(iterator, enumerate):
        inner = iterator.__reduce__()[1][:1]
    elif isinstance(iterator, types.GeneratorType) and _is_bar(iterator):
        names = iterator.gi_frame.f_locals if iterator.gi_frame is not None else {}
        inner = tuple(names[name] for name in ("it", "iterable") if name in names)[:1]
    else:
        kind = type(iterator)
        return "a generator" if kind is types.GeneratorType else f"{kind.__module__}.{kind.__qualname__}"
    return next(filter(None, map(_obstacle_within, inner)), "")


def _obstacle_within(part: Any) -> str:
    """Like `obstacle_to_passing`; what a bar goes over may be no iterator yet."""
    if isinstance(part, (DataLoader, torch.Tensor, Sequence, Mapping, Set)) or type(part).__module__ == "numpy":
        return ""
    return obstacle_to_passing(part)


def _is_bar(iterator: types.GeneratorType[Any, Any, Any]) -> bool:
    """Return whether a generator is tqdm's, which passes on what it is given."""
    code = iterator.gi_code
    return code.co_qualname in ("tqdm.__iter__", "tqdm_notebook.__iter__")


def draws_nothing(iterable: Any) -> bool:
    """Return whether `iter` of it draws no random numbers, or those of a loader, which are noted by themselves."""
    kinds = (DataLoader, torch.Tensor, list, tuple, range, dict, str, bytes, set, frozenset, *_PLAIN)
    return isinstance(iterable, (*kinds, KeysView, ValuesView, ItemsView))
