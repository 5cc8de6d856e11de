"""Python objects for another process, in one memfd. Runs in the kernel and in ranks.

All names are sent in one pickle, so shared objects stay shared. Memory of tensors and arrays lies after the pickle,
page aligned, one block per storage: the receiver maps it copy-on-write instead of reading it, so n ranks hold one copy
and none sees another's writes. A view brings its whole storage along, as ``torch.save`` does. Tensors of a device
arrive on the receiver's device (see `tensor_devices`), and without their gradients if they are sent to ranks, as
``torch.save`` drops them too. No connection is opened: the sender passes the descriptor on.
"""

from __future__ import annotations

import gc
import importlib
import mmap
import os
import pickle
import struct
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nbaccel.errors import CannotSend
from nbaccel.namespace.kind import Change
from nbaccel.namespace.pickling import Contents, Joined, Packer, Places, PlacingPacker, Unpacker, is_ours
from nbaccel.namespace.sharded_tensors import Piece, ShardedTensors
from nbaccel.namespace.tensor_devices import InFile
from nbaccel.namespace.unpicklable import CannotJoin, describe_refusal, reason

__all__ = [
    "Payload",
    "aligned",
    "pack",
    "pack_what_can_travel",
    "packages_in",
    "rows_in",
    "unpack",
    "unpack_what_can_be_rebuilt",
    "write_all",
]

_PAGE = mmap.PAGESIZE
_CACHE_LINE = 64

_EVERYWHERE = sys.stdlib_module_names | {"__main__", "nbaccel", "torch", "numpy", "IPython"}
"""Modules that every rank has before its first payload, or that patch nothing."""

_FOOTER = struct.Struct("<8sQ")
_MAGIC = b"nbparcel"


@dataclass(frozen=True, slots=True)
class Payload:
    """A packed payload. The code that packed it closes `fd`; mappings of it outlive that.

    Args:
        fd: The memfd.
        nbytes: Its length.
        lacks: Names whose values were sent without some of their parts, and descriptions of these parts.
    """

    fd: int
    nbytes: int
    lacks: Mapping[str, Sequence[str]] = field(default_factory=dict)


def pack(
    values: dict[str, Any],
    *,
    by_reference: Mapping[int, str] | None = None,
    namespace: dict[str, Any] | None = None,
) -> Payload:
    """Pack all of `values` into one payload.

    Args:
        by_reference: Name by ``id(object)``, for classes and functions that the other side has; only the name is sent.
        namespace: The globals of notebook functions; in the receiver they become those of `unpack_what_can_be_rebuilt`.

    Raises:
        CannotSend: A value cannot be sent; `names` has every such name with the reason.

    Example:
        >>> payload = pack({"x": 1, "y": [2, 3]})
        >>> unpack(payload.fd)
        {'x': 1, 'y': [2, 3]}
        >>> os.close(payload.fd)
    """
    make = _packers(by_reference or {}, namespace)
    try:
        return _write(values, make)
    except Exception as error:
        refused = _culprits(values, make, namespace) or {", ".join(values): reason(error, "", values)}
        lines = "".join(f"\n  {name}: {why}" for name, why in refused.items())
        raise CannotSend(
            f"{len(refused)} of {len(values)} names cannot be sent to another process:{lines}\n"
            "  Make such objects in the cell that uses them, or send the data they were made from.",
            refused,
        ) from error


def pack_what_can_travel(
    values: dict[str, Any],
    *,
    by_reference: Mapping[int, str] | None = None,
    namespace: dict[str, Any] | None = None,
    as_written: bool = False,
    places: Places | None = None,
    may_lack: Collection[str] = (),
    sharded: ShardedTensors | None = None,
    unneeded: Collection[str] = (),
) -> tuple[Payload, dict[str, str]]:
    """Return the payload of every value that can be sent, and the names of the others, each with the reason.

    If only entries of a `Change` cannot be sent, the rest of it is; such an entry is named "name:key".

    Args:
        by_reference, namespace: See `pack`.
        as_written: Send objects as the user wrote them: of prepared objects, also inside of others, the wrapped ones.
        places: Those of objects that the receiver has; if given, only the place of such an object is sent, and all
            others as written.
        may_lack: Names whose values are sent without the parts that cannot be sent, rather than not at all: see
            `Absent`.
        sharded: Tensors of which this rank's rows are sent, whether `values` lead to them or not.
        unneeded: Names of `namespace` whose values do not come along with functions that read them.
    """
    rest = values
    refused: dict[str, str] = {}
    lacking: set[str] = set()
    make = _packers(by_reference or {}, namespace, as_written, places, lacking, sharded, unneeded)
    while True:
        try:
            return _write(rest, make), refused
        except Exception as error:  # also a second time, by an object with inconsistent answers
            culprits = _culprits(rest, make, namespace) or {name: reason(error, name, rest) for name in rest}
        if parted := {name for name in culprits if name in may_lack} - lacking:
            lacking |= parted
            continue
        rest = {name: value for name, value in rest.items() if name not in culprits}
        for name, why in culprits.items():
            value = values[name]
            entries = value.entries() if type(value) is Change else {}
            wrong = _culprits(entries, make, namespace)
            if wrong and f"{name}:{next(iter(wrong))}" not in refused:
                rest[name] = value.without(wrong)
                refused |= {f"{name}:{key}": reason for key, reason in wrong.items()}
            else:
                refused[name] = why


def unpack(fd: int) -> dict[str, Any]:
    """Return the values of the payload behind `fd`, which stays open; the caller closes it."""
    values: dict[str, Any] = Unpacker(_contents(fd)).load()
    return values


def unpack_what_can_be_rebuilt(
    fd: int,
    *,
    namespace: dict[str, Any] | None = None,
    anchored: Callable[[str], Any] | None = None,
    placed: Callable[[Any], Any] | None = None,
    is_lasting: bool = False,
    joined: Joined | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of the payload behind `fd` that can be rebuilt, and the names of the others, with the reason.

    Args:
        namespace: Becomes ``__globals__`` of the functions that were packed with one. Globals that they refer to are
            added to it; existing names keep their values.
        anchored: Finds an object of this process by the name it was anchored under.
        placed: Finds one by the token of the sender's `Places.token`.
        is_lasting: The values stay for long, and must not keep a larger rest of the payload alive.
        joined: Has the whole tensors for those of which the payload has only rows.
    """
    try:
        values: dict[str, Any] = Unpacker(_contents(fd, namespace, anchored, placed, is_lasting, joined)).load()
        return values, {}
    except Exception:
        values, errors = _salvaged(_contents(fd, namespace, anchored, placed, is_lasting, joined))
    return values, {name: _why_not_rebuilt(error) for name, error in errors.items()}


def _why_not_rebuilt(error: Exception) -> str:
    return str(error) if isinstance(error, CannotJoin) else f"it cannot be rebuilt here: {describe_refusal(error)}"


def packages_in(fd: int) -> list[str]:
    """Return the packages of the payload behind `fd` that a user installed, in the order of their import."""
    _, (_, _, packages, _, _) = _opened(fd)
    return packages


def rows_in(fd: int) -> dict[str, tuple[memoryview, Piece]]:
    """Return the rows of sharded tensors in the payload behind `fd`, by the key of the tensor; nothing is copied."""
    mapping, (places, _, _, rows, _) = _opened(fd)
    found = {}
    for key, (index, piece) in rows.items():
        offset, nbytes = places[index]
        found[key] = (memoryview(mapping)[offset : offset + nbytes], piece)
    return found


_Table = tuple[list[tuple[int, int]], list[int], list[str], dict[str, tuple[int, Piece]], int]


def _opened(fd: int) -> tuple[mmap.mmap, _Table]:
    """Open the payload behind `fd`; return it with its table: places, buffers, packages, rows, begin of the pickle."""
    mapping = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    magic, table = _FOOTER.unpack_from(mapping, len(mapping) - _FOOTER.size)
    if magic != _MAGIC:
        raise ValueError("this file descriptor does not hold a payload")
    return mapping, pickle.loads(memoryview(mapping)[table:])


def _contents(
    fd: int,
    namespace: dict[str, Any] | None = None,
    anchored: Callable[[str], Any] | None = None,
    placed: Callable[[Any], Any] | None = None,
    is_lasting: bool = False,
    joined: Joined | None = None,
) -> Contents:
    mapping, (places, buffers, packages, _, begin) = _opened(fd)
    for name in packages:
        if name not in sys.modules:
            with suppress(Exception):  # if it is needed, the pickle raises a better error
                importlib.import_module(name)
    return Contents(mapping, places, buffers, namespace, anchored, placed, is_lasting, joined, begin)


_MakePacker = Callable[[Any], Packer]
"""Makes a packer that writes to a file."""


def _packers(
    by_reference: Mapping[int, str],
    namespace: dict[str, Any] | None,
    as_written: bool = False,
    places: Places | None = None,
    may_lack: Collection[str] = (),
    sharded: ShardedTensors | None = None,
    unneeded: Collection[str] = (),
) -> _MakePacker:
    if places is not None:
        return lambda file: PlacingPacker(file, by_reference, namespace, places, may_lack)
    return lambda file: Packer(file, by_reference, namespace, as_written, may_lack, sharded, unneeded)


def _culprits(values: dict[str, Any], make: _MakePacker, namespace: dict[str, Any] | None) -> dict[str, str]:
    """Return the names whose values cannot be pickled even alone, each with the reason.

    It writes nothing, copies no buffer.
    """
    refused = {}
    for name, value in values.items():
        packer = make(_Nowhere())
        try:
            with _telling_where(packer):
                packer.dump_names({name: value})
        except Exception as error:
            refused[name] = reason(error, name, {**(namespace or {}), **values})
    return refused


def _write(values: dict[str, Any], make: _MakePacker) -> Payload:
    """Write the pickle first, then the blocks, then the table that finds them, then the place of the table.

    If blocks are in a file already (`HostFile` of `free_kernel`), the rest is written behind them, and they are not
    copied.
    """
    fd = os.memfd_create("nbaccel-payload", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            packer = make(_Stoppable(file))
            with _telling_where(packer):
                packer.dump_names(values)
                packer.add_rows()
            end = file.tell()
        begin, host_file = 0, next(iter(packer.in_file.values()), None)
        if host_file is not None:
            fd, begin = _moved_behind(host_file, fd, end)
            end += begin
        places = []
        for index, block in enumerate(packer.blocks):
            with block() as source:
                if index in packer.in_file:
                    places.append((packer.in_file[index].offset, source.nbytes))
                    continue
                offset = aligned(end, source.nbytes)
                write_all(fd, source, offset)
                end = offset + source.nbytes
            places.append((offset, end - offset))
        packer.forget()
        table = pickle.dumps((places, packer.buffers, _in_order_of_import(packer.packages), packer.rows, begin))
        write_all(fd, memoryview(table + _FOOTER.pack(_MAGIC, end)), end)
        return Payload(fd, end + len(table) + _FOOTER.size, packer.lacks)
    except BaseException:
        os.close(fd)
        raise


def _moved_behind(host_file: InFile, fd: int, length: int) -> tuple[int, int]:
    """Move the content of `fd` behind the blocks of a file, and return another descriptor of that, and where it is.

    What an earlier payload has written there is cut off: the ranks that had mapped it have ended.
    """
    begin = aligned(host_file.size, _PAGE)
    os.ftruncate(host_file.fd, host_file.size)
    with mmap.mmap(fd, length, access=mmap.ACCESS_READ) as mapping, memoryview(mapping) as content:
        write_all(host_file.fd, content, begin)
    target = os.dup(host_file.fd)
    os.close(fd)
    return target, begin


def _in_order_of_import(packages: Set[str]) -> list[str]:
    """Return the packages that a user installed, as this process imported them.

    Some patch others when they are imported, and have to come before them (or after): the pickle would import them in
    the arbitrary order of its references.
    """
    loaded = [name for name in packages if name in sys.modules and name not in _EVERYWHERE]
    if len(loaded) < 2:  # most payloads: going through all modules would copy the pages of their names in a forked rank
        return loaded
    return [name for name in list(sys.modules) if name in loaded]


@contextmanager
def _telling_where(packer: Packer) -> Iterator[None]:
    """Name the value that was being packed in an interrupt: it may be one that never ends."""
    try:
        yield
    except KeyboardInterrupt:
        name = packer.at.removeprefix("in:").removeprefix("out:")
        raise KeyboardInterrupt(f"interrupted while {name} was packed for another process") from None


def aligned(offset: int, nbytes: int) -> int:
    unit = _PAGE if nbytes >= _PAGE else _CACHE_LINE
    return -(-offset // unit) * unit


def write_all(fd: int, source: memoryview, offset: int) -> None:
    done = 0
    while done < source.nbytes:
        done += os.pwrite(fd, source[done:], offset + done)


class _Stoppable:
    """Wraps `file` with a `write` in Python, so that an interrupt is handled in any thread, which C code does not do.

    For a value that never ends the pickler writes 64 KiB again and again without running a line of the user's.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        written: int = self._file.write(data)
        return written


class _Nowhere:
    """A file for a trial: discards everything."""

    def write(self, data: Any) -> int:
        return len(data)


_Reader: Any = pickle._Unpickler  # the one written in Python, which can continue after an error
_CLOSED = (type, types.ModuleType, types.FrameType, types.CodeType, str, bytes)


def _salvaged(contents: Contents) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Return the values of `contents` by name that can be rebuilt, and the error of each of the others.

    Used after the pickle of a payload has failed as a whole: an error in the ``__setstate__`` of one value must not
    lose the model that came with it. The pickle is read again, slowly, in Python; an object that fails is replaced, and
    every name that leads to a replaced object is left out with the reason.
    """
    reader = _Salvager(contents)
    values: dict[str, Any] = reader.load()
    refused: dict[str, Exception] = {}
    for name, value in values.items():
        if (error := reader.error_in(value)) is not None:
            refused[name] = error
    return {name: value for name, value in values.items() if name not in refused}, refused


class _Broken:
    """Replaces an object that could not be rebuilt; calling it raises the same error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *args: Any) -> Any:
        raise self.error


def _guarded(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap an operation of the pickle machine that fills the object on top of the stack, by code of its class."""

    def guarded(self: _Salvager) -> None:
        operands = self.stack[-2:]
        try:
            load(self)
        except Exception as error:
            if self.stack and type(self.stack[-1]) is not _Broken:
                cause = next((each.error for each in operands if type(each) is _Broken), error)
                self.blame(self.stack[-1], cause)

    return guarded


class _Salvager(_Reader):  # type: ignore[misc]
    """Continues reading after an object that cannot be rebuilt."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_Reader.dispatch)
    for _code in (pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS, pickle.BUILD):
        dispatch[_code[0]] = _guarded(dispatch[_code[0]])

    def __init__(self, contents: Contents) -> None:
        contents.mapping.seek(contents.begin)
        super().__init__(contents.mapping, buffers=contents.buffers())
        self._contents = contents
        self._errors: dict[int, Exception] = {}  # by the id of the object that could not be filled
        self._kept: list[Any] = []
        self._known: list[Any] = []  # the receiver's own objects, which are whole

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._contents.call if is_ours(module, name) else super().find_class(module, name)
        except Exception as error:
            return _Broken(error)

    def persistent_load(self, token: Any) -> Any:
        try:
            known = self._contents.placed(token)
        except Exception as error:
            return _Broken(error)
        self._known.append(known)
        return known

    def blame(self, thing: Any, error: Exception) -> None:
        """Record that `thing` was made, and that a part of it is missing."""
        self._errors[id(thing)] = error
        self._kept.append(thing)

    def _call(self, function: Any, operands: list[Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            cause = next((each.error for each in operands if type(each) is _Broken), error)
            if getattr(function, "__name__", "").endswith(("setstate", "_set_function_state")):
                self.blame(args[0], cause)  # it fills its first argument, and its value is thrown away
            return _Broken(cause)

    def load_reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack.pop()
        self.append(self._call(function, [function, *args], *args))

    def load_newobj(self) -> None:
        args = self.stack.pop()
        kind = self.stack.pop()
        self.append(self._call(getattr(kind, "__new__", None), [kind, *args], kind, *args))

    def load_newobj_ex(self) -> None:
        kwargs = self.stack.pop()
        args = self.stack.pop()
        kind = self.stack.pop()
        self.append(self._call(getattr(kind, "__new__", None), [kind, *args], kind, *args, **kwargs))

    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex

    def error_in(self, value: Any) -> Exception | None:
        """Return the error of the first object that `value` leads to and that could not be rebuilt."""
        seen = set(map(id, self._known))
        waiting = [value]
        while waiting:
            thing = waiting.pop()
            if type(thing) is _Broken:
                return thing.error
            if id(thing) in self._errors:
                return self._errors[id(thing)]
            if id(thing) in seen or issubclass(type(thing), _CLOSED):
                continue
            seen.add(id(thing))
            np = sys.modules.get("numpy")
            if type(thing) is types.FunctionType:  # its globals are the notebook's
                waiting += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
            elif np is not None and type(thing) is np.ndarray and thing.dtype.kind == "O":
                waiting += thing.ravel().tolist()
            else:
                waiting += gc.get_referents(thing)
        return None
