"""Random states with which torch's loaders draw their order, and passing over batches without fetching. Runs in ranks.

A loader draws when its iterator is made and when its first batch is asked for. Of two loaders in one loop the second
draws after the first has fetched, so each state is kept by itself; so are generators of its own, and plain values of a
sampler that the user wrote. When it draws again, the last indices are compared. Batches that are passed over are drawn
as indices alone where the loader fetches in this process. They are those of the user's loader: parts of them, of
several ranks, are made below.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import threading
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from nbaccel.base.notices import is_users
from nbaccel.base.quantities import with_article
from nbaccel.features.cell_checkpoints import continued_passes, random_states
from nbaccel.features.cell_checkpoints.data_codec import refuse_state
from nbaccel.features.source.users_functions import is_rewritable
from nbaccel.train.raw_loop.loader_pass import PassBegin
from nbaccel.train.step.raw_loop_hooks import window_is_open

__all__ = [
    "DRAWN",
    "LoaderDraw",
    "LoaderDraws",
    "digest_of",
    "further_parts",
    "hands_out_by_number",
    "has_generator",
    "is_compared",
    "is_iterator",
    "is_known",
    "obstacle_to_passing",
    "remade",
]

DRAWN = "nbaccel_drawn"
"""Attribute of an iterator: its `LoaderDraw`."""


_COMPARED = 64
"""Batches whose indices are compared."""


@dataclass(slots=True, eq=False)
class LoaderDraw:
    """The states with which one iterator of a loader drew.

    Args:
        loader, iterator: Return its loader, and itself, if these still exist.
        parts: What draws its order, see `_parts_of`.
        created: The state when it was made.
        first: The state before its first batch; None if that has not come.
        again: The state that its first batch gets; None if that is the present one.
        count: Indices of batches that it has drawn.
        before: `LoaderDraws.held` before its first batch; None if that has not come.
        recent: Numbers for the last of them, without those that were drawn when it was made.
    """

    loader: weakref.ref[Any]
    iterator: weakref.ref[Any]
    parts: list[Any]
    created: dict[str, Any]
    first: dict[str, Any] | None = None
    again: dict[str, Any] | None = None
    count: int = 0
    before: int | None = None
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=_COMPARED))

    def begin(self) -> None:
        """Note the state before the first batch, or go back to it. Called where torch draws: in several ranks with the
        generators that all ranks have alike, which may not be those of the loop's body."""
        if self.first is None:
            if self.again is not None:
                _restore(self.parts, self.again)
            self.first = _states(self.parts)

    def note(self, what: Any) -> None:
        """Note the indices of a batch, or a batch that is made without."""
        self.count += 1
        self.recent.append(digest_of(what))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Return nothing: a pickled iterator has drawn in another process."""
        return type(None), ()

    def record(self) -> dict[str, Any]:
        """Return what `LoaderDraws.passing` needs."""
        order = [self.count, *self.recent]
        return {"created": self.created, "first": self.first, "order": order, "begin": self.begin_of_pass()}

    def begin_of_pass(self) -> list[Any] | None:
        """Return how its pass began, as JSON; None in a rank that is alone, and once the iterator is gone."""
        iterator = self.iterator()
        begin = None if iterator is None else continued_passes.begin_of(iterator)
        return None if begin is None else list(begin)

    def draws_as(self, record: Mapping[str, Any]) -> bool:
        """Return whether the batches that both have drawn last are the same.

        Worker processes draw ahead, by another number of batches where these come in another number of parts.
        """
        count, *recent = record["order"]
        if not (count and self.count):
            return bool(count == self.count)
        own, more = list(self.recent), self.count - count
        if more > 0:
            own = own[:-more]
        elif more:
            recent = recent[:more]
        both = min(len(own), len(recent))
        return not both or own[-both:] == recent[-both:]


class LoaderDraws:
    """Notes the draws of torch's loaders in this thread, and repeats them, while entered.

    Args:
        on_made: Called with each iterator's `LoaderDraw`.

    Attributes:
        taken: Batches that loaders have handed out, one after the other.
        held: The number of the last one that may be in the program's hands: its iterator has not ended.
    """

    def __init__(self, on_made: Callable[[LoaderDraw], None]) -> None:
        self.taken = self.held = 0
        self._on_made = on_made
        self._records: deque[Mapping[str, Any]] = deque()
        self._repeated: list[tuple[Mapping[str, Any], LoaderDraw]] = []
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
            is_noted = DRAWN in iterator.__dict__ and self._minds()
            return self._take(iterator, real_next) if is_noted else real_next(iterator)

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

    def expect(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Let the iterators that are made next draw with these states, until `passed`."""
        self._records = deque(records)
        self._repeated.clear()

    def pass_over(self, iterator: Any, count: int) -> None:
        """Take `count` items of an iterator of the loop; loaders below it fetch nothing where they need not."""
        self._is_passing = True
        try:
            for _ in range(count):
                next(iterator)
        finally:
            self._is_passing = False
            for loader in _loaders_below(iterator):
                continued_passes.note_passed(loader)

    def passed(self) -> bool:
        """Note that the loop is where it was; return whether its loaders have drawn the same again."""
        self._records.clear()
        return all(drawn.draws_as(record) for record, drawn in self._repeated)

    def _minds(self) -> bool:
        return self._place == (os.getpid(), threading.get_ident())

    def _begin(self, loader: Any, real: Callable[[Any], Any]) -> Any:
        record, parts = self._records.popleft() if self._records else None, _parts_of(loader)
        if record is not None:
            _restore(parts, record["created"])
        created = _states(parts)
        with nullcontext() if record is None else continued_passes.beginning_as(_begin(record["begin"])):
            iterator = real(loader)
        if isinstance(iterator, _BaseDataLoaderIter):
            again = None if record is None else record["first"]
            drawn = LoaderDraw(weakref.ref(loader), weakref.ref(iterator), parts, created, again=again)
            drawn.count = continued_passes.batches_ahead(iterator)  # of worker processes, with its making
            iterator.__dict__[DRAWN] = drawn
            iterator._sampler_iter = _Noted(iterator._sampler_iter, drawn)
            if iterator._dataset_kind != _DatasetKind.Map:
                iterator.__dict__["_next_data"] = _noting(iterator._next_data, drawn)
            if record is not None:
                self._repeated.append((record, drawn))
            self._on_made(drawn)
        return iterator

    def _take(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        drawn: LoaderDraw = iterator.__dict__[DRAWN]
        try:
            batch = self._passed(iterator, real) if self._is_passing else real(iterator)
        except StopIteration:
            self.held = drawn.before or 0
            raise
        if drawn.before is None:
            drawn.before = self.held
        self.taken += 1
        self.held = self.taken
        return batch

    def _passed(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        return _draw(iterator) if _need_not_fetch(iterator) else self._whole(iterator, real)

    def _whole(self, iterator: Any, real: Callable[[Any], Any]) -> Any:
        """Return the first part of the next batch, after the others were handed out too."""
        batch = real(iterator)
        while window_is_open():
            real(iterator)
        return batch


class _Noted:
    """The indices of a loader's batches, each noted when it is drawn."""

    def __init__(self, indices: Iterator[Any], drawn: LoaderDraw) -> None:
        self._indices = indices
        self._drawn = drawn

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        self._drawn.begin()
        index = next(self._indices)
        if index is not None:
            self._drawn.note(index)
        return index


def _noting(next_data: Callable[[], Any], drawn: LoaderDraw) -> Callable[[], Any]:
    """Return a function that notes each batch of a stream, which has no indices: the whole one, not a rank's part."""

    def noted() -> Any:
        batch = next_data()
        drawn.note(batch)
        return batch

    return noted


_Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState

_SCALARS = frozenset({int, float, bool, str})

_STATES, _OWN = "states", "own"


def _states(parts: list[Any]) -> dict[str, Any]:
    """Return the random states, with generators that only this loader draws from, and values of samplers, as JSON."""
    own = []
    for at, part in enumerate(parts):
        for name, value in _attributes_of(part).items():
            if isinstance(value, _Generator):
                own.append([at, name, _state_of(value)])
            elif type(value) in _SCALARS and not type(part).__module__.startswith("torch."):
                own.append([at, name, value])
    return {_STATES: random_states.read(), _OWN: own}


def _attributes_of(part: Any) -> dict[str, Any]:
    """Return the attributes of an object, with the generators that its class has for all its objects."""
    kinds = [kind for kind in reversed(type(part).__mro__) if not kind.__module__.startswith(("torch.", "builtins"))]
    of_class = [item for kind in kinds for item in vars(kind).items()]
    return {name: value for name, value in of_class if isinstance(value, _Generator)} | getattr(part, "__dict__", {})


def _restore(parts: list[Any], states: Mapping[str, Any]) -> None:
    """Go back to what `_states` returned."""
    for at, name, state in states[_OWN]:
        value = _attributes_of(parts[at])[name]
        if isinstance(value, _Generator):
            _set_state(value, state)
        elif type(value) in _SCALARS and type(state) in _SCALARS:
            setattr(parts[at], name, state)
    random_states.restore(states[_STATES])


def _parts_of(loader: Any) -> list[Any]:
    """Return what draws the order of a loader, which may be gone before its iterator."""
    batches, single = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    stream = loader.dataset if isinstance(loader.dataset, IterableDataset) else None
    own = types.SimpleNamespace(generator=loader.generator)
    return [own, batches, single, getattr(batches, "sampler", None), getattr(single, "sampler", None), stream]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, list(words), gauss]
    state = generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.bit_generator.state
    return _plain(state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    else:
        state = _arrays(state)
        refuse_state(state)
        if hasattr(generator, "set_state"):
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _arrays(value) for name, value in state.items()}
    return np.array(state, dtype=np.uint64) if isinstance(state, list) else state


def _need_not_fetch(iterator: Any) -> bool:
    """Return whether its batches are made here, each of its own indices: then one that is passed over need not be."""
    is_made_here = not iterator._num_workers and iterator._dataset_kind == _DatasetKind.Map
    return is_made_here and not continued_passes.takes_groups(iterator)


def _draw(iterator: Any) -> None:
    """Draw the indices of the next batch, as torch's iterator does before it fetches."""
    next(iterator._sampler_iter)
    iterator._num_yielded += 1
    continued_passes.pass_over(iterator, 1)


def _begin(begin: Any) -> PassBegin | None:
    return None if begin is None else PassBegin(*begin)


def remade(loader: Any, created: dict[str, Any], first: dict[str, Any] | None, taken: int, begin: Any) -> Any:
    """Return an iterator of `loader` that has handed out `taken` batches.

    Args:
        created, first, begin: Its states, and the begin of its pass, see `LoaderDraw`.
    """
    kept, parts = random_states.read(), _parts_of(loader)
    _restore(parts, created)
    with continued_passes.beginning_as(_begin(begin)):
        iterator = iter(loader)
    if first is not None:
        _restore(parts, first)
        drawn = iterator.__dict__.get(DRAWN)
        if drawn is not None:
            drawn.first = first
    for _ in range(taken):
        if _need_not_fetch(iterator):
            _draw(iterator)
        else:
            next(iterator)
            while window_is_open():
                next(iterator)
    continued_passes.note_passed(iterator)
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

_COMBINED = (
    *(itertools.product, itertools.permutations, itertools.combinations),
    *(itertools.combinations_with_replacement, itertools.count, itertools.repeat),
)
"""Iterators of which that is so too, and which are made anew by their loop's head; their items are compared."""


def obstacle_to_passing(iterator: Any) -> str:
    """Return what of an iterator's position is more than a number of items; empty where it can be passed over.

    A generator of a library, such as that of folds, is run again; what it yields is compared (`digest_of`).
    """
    for part in _innermost(iterator):
        if isinstance(part, types.GeneratorType):
            if is_rewritable(part.gi_code.co_filename):
                return "a generator"
        elif not isinstance(part, (_BaseDataLoaderIter, *_PLAIN, *_COMBINED)) and not is_known(part):
            return with_article(type(part).__name__)
    return ""


def has_generator(iterator: Any) -> bool:
    """Return whether an iterator takes from a generator of a library; one that takes from a loader does not count."""
    return any(isinstance(part, types.GeneratorType) for part in _innermost(iterator))


def is_compared(iterator: Any) -> bool:
    """Return whether what an iterator hands out is compared, as it is not known to be the same again."""
    return has_generator(iterator) or any(isinstance(part, _COMBINED) for part in _innermost(iterator))


def hands_out_by_number(iterable: Any) -> bool:
    """Return whether it is of a library, and has a length and an item for each number: the same ones again."""
    kind = type(iterable)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_own = kind.__module__ == "__main__" or (file is not None and is_users(file))
    return not is_own and hasattr(kind, "__len__") and hasattr(kind, "__getitem__")


def _innermost(iterator: Any) -> Iterator[Any]:
    """Yield what an iterator takes from, below `zip`, `enumerate` and bars."""
    if isinstance(iterator, zip):
        inner = iterator.__reduce__()[1]
    elif isinstance(iterator, enumerate):
        inner = iterator.__reduce__()[1][:1]
    elif isinstance(iterator, types.GeneratorType) and _is_bar(iterator):
        names = iterator.gi_frame.f_locals if iterator.gi_frame is not None else {}
        inner = tuple(names[name] for name in ("it", "iterable") if name in names)[:1]
    else:
        yield iterator
        return
    for each in inner:
        yield from _innermost(each)


def further_parts(iterator: Any) -> int:
    """Return how many items of a loop were further parts of a batch that it had before."""
    return max(map(continued_passes.further_parts, _loaders_below(iterator)), default=0)


def _loaders_below(iterator: Any) -> list[Any]:
    """Return the iterators of loaders from which an iterator takes."""
    return [each for each in _innermost(iterator) if isinstance(each, _BaseDataLoaderIter)]


def is_known(iterable: Any) -> bool:
    """Return whether `iter` of it does nothing but hand out what it holds, or is a loader's, which is noted."""
    kinds = (DataLoader, torch.Tensor, list, tuple, range, dict, str, bytes, set, frozenset, np.ndarray, deque)
    return isinstance(iterable, (*kinds, KeysView, ValuesView, ItemsView))


def is_iterator(iterable: Any) -> bool:
    """Return whether it is an iterator, or a bar around one, of which `obstacle_to_passing` knows."""
    return hasattr(type(iterable), "__next__") or type(iterable).__module__.startswith("tqdm.")


def digest_of(item: Any) -> int:
    """Return a number for an item, by a few of its values; nothing waits for a device."""
    return zlib.crc32(repr(_sampled(item)).encode())


_MOST = 8
"""Values of an item, from each end, that are looked at."""


def _sampled(item: Any) -> Any:
    if type(item) in _SCALARS:
        return item
    if isinstance(item, torch.Tensor) and item.device.type == "cpu" and item.layout == torch.strided:
        return _sampled(item.detach().reshape(-1)[[*range(min(_MOST, item.numel()))]].tolist()), tuple(item.shape)
    if isinstance(item, np.ndarray | np.generic):
        return item.reshape(-1)[:_MOST].tolist(), item.reshape(-1)[-_MOST:].tolist(), item.shape
    if isinstance(item, list | tuple):
        return [*map(_sampled, item[:_MOST])], [*map(_sampled, item[-_MOST:])], len(item)
    if isinstance(item, dict):
        return [(repr(name), _sampled(value)) for name, value in itertools.islice(item.items(), _MOST)]
    return item if item is None else type(item).__name__


def _is_bar(iterator: types.GeneratorType[Any, Any, Any]) -> bool:
    """Return whether a generator is tqdm's, which passes on what it is given."""
    code = iterator.gi_code
    return code.co_qualname in ("tqdm.__iter__", "tqdm_notebook.__iter__")
