"""Kinds of objects whose state is not in their attributes, or that lead into their process.

Buffers, queues, loggers, progress bars and widgets are written in place. Threads, figures and iterators cannot be:
where a cell has changed one, `Kind.change` raises `Stays`, and its name and the reason are said. Of any other object
with state in C (`keeps_state_in_c`) the bytes of its memory are compared: where they differ, the notebook compares what
it pickles to, as an object may also cache something there. Runs in ranks and in the kernel; imports no library.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import decimal
import enum
import fractions
import functools
import gc
import io
import logging
import operator
import pathlib
import queue
import re
import struct
import subprocess
import sys
import threading
import types
import typing
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from nbaccel.base.quantities import with_article
from nbaccel.base.values import attributes_of
from nbaccel.namespace.kind import CannotWrite, Entries, Kind, Stays, Step, Write
from nbaccel.namespace.library_objects import Artist, Script, facts_of_matrix, facts_of_tokenizer
from nbaccel.namespace.state_in_c import (
    IN_C,
    Hidden,
    InForeignC,
    Owner,
    bytes_of,
    differs,
    is_other,
    keeps_state_in_c,
    pickles_itself,
)

__all__ = [
    "CLOSED",
    "VALUES",
    "belongs_to_its_process",
    "kind_in_c",
    "kind_of_process_object",
    "referent",
    "trait_of",
]

VALUES = (
    *(str, bytes, int, float, complex, enum.Enum, range, slice, type(None), type(...), type(NotImplemented)),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction),
    *(pathlib.PurePath, re.Pattern, re.Match, frozenset, operator.attrgetter, operator.itemgetter),
    *(operator.methodcaller, struct.Struct, uuid.UUID),
)
"""Classes whose objects do not change; objects of derived classes are treated the same."""

CLOSED: tuple[Any, ...] = (
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, types.TracebackType, property),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MappingProxyType, types.GenericAlias),
    *(
        types.MethodWrapperType,
        types.WrapperDescriptorType,
        types.MethodDescriptorType,
        types.ClassMethodDescriptorType,
    ),
    *(classmethod, staticmethod, super, types.UnionType, typing.TypeVar, type({}.keys()), type({}.values())),
    *(type({}.items()), type(functools.lru_cache(id))),
)
"""Objects that lead to the rest of the process, or to nothing that could be another result: a cache."""

_OF_THE_PROCESS = (
    *("IPython.core.", "IPython.terminal.", "_asyncio.", "_ssl.", "_thread.", "accelerate.", "asyncio.", "comm."),
    *("concurrent.", "contextvars.", "google.", "ipykernel.", "ipywidgets.widgets.widget.", "lightning."),
    *("lightning_fabric.", "matplotlib.", "multiprocessing.", "nbaccel.", "pyarrow.", "pytorch_lightning."),
    *("ray.", "socket.", "ssl.", "tensorboard.", "tensorboardX.", "torch.utils.tensorboard.", "traitlets.config."),
    *("wandb.", "weakref.", "zmq."),
)
"""Modules whose objects belong to their process, know the ranks, or only cache: these are not read.

Those of them that a cell may change are in `_OF_PYTHON` and `_OF_LIBRARIES`.
"""

_DATA = (
    *("IPython.core.display.", "asyncio.locks.", "asyncio.queues.", "matplotlib.RcParams.", "matplotlib.cm."),
    *("matplotlib.colorizer.", "matplotlib.path.", "matplotlib.ticker."),
    *(f"matplotlib.colors.{name}Norm" for name in ("", "Boundary", "Log", "Power", "SymLog", "TwoSlope")),
)
"""Modules below these, and classes, whose objects are data."""

_IMMUTABLE = frozenset({"_csv", "_operator", "_struct", "numpy", "torch", "torch._C", "types"})
"""Modules whose objects in C are values, or have kinds of their own; a `csv.writer` has room for a row, and no more."""


_PACKAGES_THAT_SHOW_IT = sys.stdlib_module_names | {"__main__", "h5py", "numpy", "pandas", "torch"}
"""Packages whose objects in C have their state in their own memory, in a file, or are of other kinds."""


_HEAP_TYPE = 1 << 9
"""Flag of classes that are made at run time; those of Python's own modules in C are not."""


def belongs_to_its_process(kind: type) -> bool:
    """Return whether objects of a type are not read, because they belong to their process, or only cache."""
    module = _module_of(kind)
    return module.startswith(_OF_THE_PROCESS) and not f"{module}{kind.__name__}.".startswith(_DATA)


def kind_in_c(kind: type) -> Kind | None:
    """Return the kind of objects of a type that keeps state in C; None for values and files."""
    has_place = hasattr(kind, "__next__")
    is_iterator = has_place and _module_of(kind) in ("builtins.", "itertools.", "numpy.")
    if issubclass(kind, io.IOBase) or (_module_of(kind).removesuffix(".") in _IMMUTABLE and not has_place):
        return None
    package = _module_of(kind).partition(".")[0]
    is_foreign = package == "builtins" and bool(kind.__flags__ & _HEAP_TYPE)  # of polars, say, that names no module
    if is_iterator or (package in _PACKAGES_THAT_SHOW_IT and not is_foreign):
        return _ITERATOR if is_iterator else IN_C
    return InForeignC(Owner(is_in_c=True) if pickles_itself(kind) else Hidden())


def _module_of(kind: type) -> str:
    return str(type.__dict__["__module__"].__get__(kind)) + "."


def kind_of_process_object(kind: type) -> Kind | None:
    """Return the kind of objects of a type that this module knows; None for any other."""
    for types_, own in _OF_PYTHON:
        if issubclass(kind, types_):
            return own
    for module, name, own in _OF_LIBRARIES:
        if _is_kind_of(kind, module, name):
            return own
    if all(hasattr(kind, name) for name in ("digest", "hexdigest", "update")) and keeps_state_in_c(kind):
        return _Hash()
    return None


def _is_kind_of(kind: type, module: str, name: str) -> bool:
    base = getattr(sys.modules.get(module), name, None)
    return isinstance(base, type) and issubclass(kind, base)


# --- written in place -----------------------------------------------------------------------------------------------


class _Buffer(Kind):
    """Files in memory: their contents and position."""

    def __init__(self, methods: Any) -> None:
        self._methods = methods

    def mark(self, obj: Any) -> Any:
        if self._methods.closed.__get__(obj):
            return None
        if self._methods is io.StringIO:
            text = io.StringIO.getvalue(obj)
            return len(text), hash(text), io.StringIO.tell(obj)
        with io.BytesIO.getbuffer(obj) as memory:
            return len(memory), zlib.crc32(memory), io.BytesIO.tell(obj)

    def change(self, obj: Any, mark: Any) -> Any:
        now = self.mark(obj)
        if now == mark:
            return None
        return (None if now is None else (*self._methods.__getstate__(obj)[:-1], None),)

    def writing(self, obj: Any, change: Any) -> Write:
        (state,) = change
        return lambda: self._methods.close(obj) if state is None else self._methods.__setstate__(obj, state)


class _Queue(Kind):
    """Queues between threads: what waits in them.

    Items that a thread of the notebook waits for are not delivered: it would answer a request of a rank that is gone,
    and the next one who asks would take that answer for its own.
    """

    def parts(self, obj: Any) -> Iterable[tuple[Step, Any]]:
        for index, each in enumerate(list(obj.queue)):
            if type(each) not in _PLAIN:
                yield ("queued", index), each

    def mark(self, obj: Any) -> Any:
        return list(obj.queue), obj.unfinished_tasks, obj.maxsize

    def change(self, obj: Any, mark: Any) -> Any:
        """Return the old length, and the present state."""
        items, unfinished, maxsize = self.mark(obj)
        if (unfinished, maxsize) == mark[1:] and len(items) == len(mark[0]) and not any(map(is_other, items, mark[0])):
            return None
        return len(mark[0]), items, unfinished, maxsize

    def writing(self, obj: Any, change: Any) -> Write:
        before, items, unfinished, maxsize = change
        if len(obj.queue) != before:
            raise CannotWrite("the notebook has changed it meanwhile")
        if items and obj.not_empty._waiters:
            raise CannotWrite("a thread of the notebook waits for its items")

        def write() -> None:
            with obj.mutex:
                obj.queue.clear()
                obj.queue.extend(items)
                obj.unfinished_tasks, obj.maxsize = unfinished, maxsize
                for condition in (obj.not_empty, obj.not_full, *([] if unfinished else [obj.all_tasks_done])):
                    condition.notify_all()

        return write


class _SimpleQueue(Kind):
    """Queues in C: reading takes the items out, so they are put in again."""

    def mark(self, obj: Any) -> Any:
        return bytes_of(obj), [list(map(id, each)) for each in gc.get_referents(obj) if type(each) is list]

    def change(self, obj: Any, mark: Any) -> Any:
        return None if self.mark(obj) == mark else (self._taken(obj, put_back=True),)

    def writing(self, obj: Any, change: Any) -> Write:
        def write() -> None:
            self._taken(obj)
            for each in change[0]:
                obj.put(each)

        return write

    @staticmethod
    def _taken(obj: Any, put_back: bool = False) -> list[Any]:
        items = [obj.get_nowait() for _ in range(obj.qsize())]
        for each in items if put_back else ():
            obj.put(each)
        return items


class _Event(Kind):
    """Events between threads. Who waits for one in the notebook is woken."""

    def mark(self, obj: Any) -> Any:
        return bool(obj._flag)

    def change(self, obj: Any, mark: Any) -> Any:
        return None if bool(obj._flag) == mark else (bool(obj._flag),)

    def writing(self, obj: Any, change: Any) -> Write:
        return lambda: threading.Event.set(obj) if change[0] else threading.Event.clear(obj)


class _Settings(Kind):
    """Objects of which some attributes are data, and the others lead into the process.

    Args:
        after: A function that is called in the kernel once they are written.
        names: Attributes that are data; none for all whose values are plain.
    """

    def __init__(self, *names: str, after: Callable[[Any], object] = lambda obj: None) -> None:
        self._names = frozenset(names)
        self._after = after

    def mark(self, obj: Any) -> dict[str, Any]:
        found = {}
        for name, value in _attributes(obj).items():
            if name in self._names or (not self._names and type(value) in _PLAIN):
                found[name] = list(value) if type(value) is list else value
        return found

    def change(self, obj: Any, mark: dict[str, Any]) -> Any:
        now = self.mark(obj)
        names = [name for name, value in now.items() if name not in mark or differs(value, mark[name])]
        return Entries([], names, [now[name] for name in names]) if names else None

    def writing(self, obj: Any, change: Entries) -> Write:
        def write() -> None:
            for name, value in change.entries().items():
                there = _attributes(obj).get(name)
                if type(there) is list and type(value) is list:
                    there[:] = value
                else:
                    object.__setattr__(obj, name, value)
            self._after(obj)

        return write


class _Widget(Kind):
    """Widgets: their traits that are data, and the functions that they call.

    A front end is told; observers are not called, as they were in the rank.
    """

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        for name, value in _attributes(obj).get("_trait_values", {}).items():
            if type(value) not in _PLAIN and name not in _OF_THE_SCREEN - {"layout", "style"}:
                yield ("trait", name), value
        for name, value in _attributes(obj).items():
            if name == "_trait_notifiers" or _is_kind_of(
                type(value), "ipywidgets.widgets.widget", "CallbackDispatcher"
            ):
                yield ("below", name), value

    def mark(self, obj: Any) -> dict[str, Any]:
        own = _attributes(obj).get("_trait_values", {})
        return {name: value for name, value in own.items() if name not in _OF_THE_SCREEN}

    def change(self, obj: Any, mark: dict[str, Any]) -> Any:
        now = self.mark(obj)
        # A trait gets its default when it is read first.
        names = [name for name, value in now.items() if name in mark and differs(value, mark[name])]
        names += [name for name in now.keys() - mark.keys() if type(now[name]) in _PLAIN and not _is_default(obj, name)]
        return Entries([], names, [now[name] for name in names]) if names else None

    def writing(self, obj: Any, change: Entries) -> Write:
        def write() -> None:
            values = _attributes(obj)["_trait_values"]
            values.update(change.entries())
            if callable(send := getattr(obj, "send_state", None)):
                send([name for name in change.entries() if name in obj.keys])

        return write


class _View(Kind):
    """Views of memory: what they are views of is compared, and written."""

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        with contextlib.suppress(ValueError):  # it is released
            if obj.obj is not None:
                yield ("below", "obj"), obj.obj


class _Callbacks(Kind):
    """Functions that a widget calls: those of `on_click`, say."""

    def mark(self, obj: Any) -> Any:
        return list(obj.callbacks)

    def change(self, obj: Any, mark: Any) -> Any:
        now = list(obj.callbacks)
        return (now,) if differs(now, mark) else None

    def writing(self, obj: Any, change: Any) -> Write:
        def write() -> None:
            obj.callbacks[:] = change[0]

        return write


_OF_THE_SCREEN = frozenset({"comm", "keys", "layout", "style", "log", "parent", "config"})


def _is_default(obj: Any, name: str) -> bool:
    """Return whether a trait that was read for the first time has its default."""
    trait = type(obj)._traits.get(name) if hasattr(type(obj), "_traits") else None
    return trait is not None and bool(trait.default(obj) == _attributes(obj)["_trait_values"][name])


def trait_of(obj: Any, name: str) -> Any:
    return _attributes(obj)["_trait_values"][name]


def _tell_loggers(logger: Any) -> None:
    logging.Logger.manager._clear_cache()  # type: ignore[attr-defined]  # as `setLevel` does


# --- named ----------------------------------------------------------------------------------------------------------


class _Watched(Kind):
    """Objects that live in their process alone.

    Args:
        state: A function that returns what a cell may have changed.
        why: The reason why it cannot be brought back.
    """

    def __init__(self, state: Callable[[Any], Any], why: str) -> None:
        self._state = state
        self._why = why

    def mark(self, obj: Any) -> Any:
        return self._state(obj)

    def change(self, obj: Any, mark: Any) -> Any:
        if self._state(obj) != mark:
            raise Stays(self._why)


class _Iterator(Kind):
    """Iterators: how far they are. What they read of is looked at as well."""

    def parts(self, obj: Any) -> Iterator[tuple[Step, Any]]:
        for index, each in enumerate(gc.get_referents(obj)):
            if type(each) is tuple or (hasattr(type(each), "__next__") and not issubclass(type(each), io.IOBase)):
                yield ("referent", index), each

    def mark(self, obj: Any) -> Any:
        return bytes_of(obj), gc.get_referents(obj)

    def change(self, obj: Any, mark: Any) -> Any:
        now = self.mark(obj)
        if now[0] != mark[0] or len(now[1]) != len(mark[1]) or any(map(is_other, now[1], mark[1])):
            raise Stays(f"{with_article(type(obj).__name__)} cannot be set on: make it in the cell that reads it")


_ITERATOR = _Iterator()


def referent(obj: Any, index: int) -> Any:
    return gc.get_referents(obj)[index]


class _Hash(Kind):
    """Hashes, whose state is behind a pointer."""

    def mark(self, obj: Any) -> Any:
        return obj.digest() if getattr(obj, "digest_size", 0) else obj.digest(16)

    def change(self, obj: Any, mark: Any) -> Any:
        if self.mark(obj) != mark:
            raise Stays(f"{with_article(type(obj).__name__)} keeps its state in C")


class _Weak(Kind):
    """Collections of weak references: what was added, and what was taken out while it lives."""

    def mark(self, obj: Any) -> Any:
        data = vars(obj)["data"]
        references = data.values() if issubclass(type(obj), weakref.WeakValueDictionary) else data
        return {id(each): reference for reference in list(references) if (each := reference()) is not None}

    def change(self, obj: Any, mark: Any) -> Any:
        now = self.mark(obj)
        if now.keys() - mark.keys() or any(mark[key]() is not None for key in mark.keys() - now.keys()):
            raise Stays("weak references cannot be sent to another process")


class _ContextVariable(Kind):
    """Context variables: the value in the context of the cell."""

    def mark(self, obj: Any) -> Any:
        return obj.get(_MARK)

    def change(self, obj: Any, mark: Any) -> Any:
        now = obj.get(_MARK)
        return (now,) if differs(now, mark) and now is not _MARK else None

    def writing(self, obj: Any, change: Any) -> Write:
        return lambda: obj.set(change[0])


_MARK = object()
"""Stands for no value."""


class _ThreadLocal(Kind):
    """Values of the main thread."""

    def mark(self, obj: Any) -> Any:
        return dict(vars(obj))

    def change(self, obj: Any, mark: Any) -> Any:
        now = self.mark(obj)
        names = [name for name, value in now.items() if name not in mark or differs(value, mark[name])]
        gone = [name for name in mark if name not in now]
        return Entries(gone, names, [now[name] for name in names]) if names or gone else None

    def writing(self, obj: Any, change: Entries) -> Write:
        def write() -> None:
            for name in change.removed:
                vars(obj).pop(name, None)
            vars(obj).update(change.entries())

        return write


# --- reading --------------------------------------------------------------------------------------------------------

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


def _attributes(obj: Any) -> dict[str, Any]:
    return attributes_of(obj) or {}


def _state_of_thread(thread: threading.Thread) -> Any:
    return thread._started._flag, thread.is_alive(), thread.name, thread.daemon  # type: ignore[attr-defined]


_LOGGER = _Settings("level", "disabled", "propagate", "handlers", "filters", after=_tell_loggers)
_OF_PYTHON: tuple[tuple[Any, Kind], ...] = (
    (io.BytesIO, _Buffer(io.BytesIO)),
    (io.StringIO, _Buffer(io.StringIO)),
    (memoryview, _View()),
    (queue.Queue, _Queue()),
    (queue.SimpleQueue, _SimpleQueue()),
    (threading.Event, _Event()),
    (type(threading.Lock()), _Watched(lambda obj: obj.locked(), "a lock belongs to threads of its process")),
    (threading.Thread, _Watched(_state_of_thread, "a thread lives in its rank")),
    (BaseProcess, _Watched(lambda obj: obj._popen is None, "a process of its rank")),
    (subprocess.Popen, _Watched(lambda obj: obj.returncode, "its rank cannot wait for it")),
    (threading.local, _ThreadLocal()),
    (contextvars.ContextVar, _ContextVariable()),
    ((weakref.WeakSet, weakref.WeakValueDictionary, weakref.WeakKeyDictionary), _Weak()),
    (logging.Logger, _LOGGER),
    (logging.Handler, _Settings("level", "formatter", "filters", "buffer", "stream", "terminator", "_name")),
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _ITERATOR),
)
_OF_LIBRARIES: tuple[tuple[str, str, Kind], ...] = (
    ("_asyncio", "Future", _Watched(lambda obj: obj.done(), "a task of the event loop")),
    ("tqdm.std", "tqdm", _Settings()),
    ("matplotlib.artist", "Artist", Artist()),
    ("matplotlib.colors", "Colormap", _Settings("_rgba_bad", "_rgba_over", "_rgba_under")),
    ("tokenizers", "Tokenizer", _Watched(facts_of_tokenizer, "its state is in C: --out brings it")),
    ("matplotlib.transforms", "Affine2D", _Watched(lambda obj: obj.get_matrix().tobytes(), "--out brings it")),
    ("torch.jit", "ScriptModule", Script()),
    ("xgboost.core", "DMatrix", _Watched(facts_of_matrix, "its data are in C")),
    ("ipywidgets.widgets.widget", "Widget", _Widget()),
    ("ipywidgets.widgets.widget", "CallbackDispatcher", _Callbacks()),
)
