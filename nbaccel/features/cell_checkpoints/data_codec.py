"""Objects as data: JSON and tensors, with aliases and cycles, and back. Runs in ranks.

A value that JSON has is itself; any other is a list whose first element says what it is. An object is ``["o", n]``, and
the n-th record of the file describes it: as a place of the notebook, or as a new object of one of a few kinds, which
are all that reading builds. No class is imported by a name in a file: classes of the notebook are places, too. What is
read is checked before anything is written: an error changes nothing (`Decoder`).

Both directions stand here: each kind of record has a line in either, and a kind that only one of them knows would be a
file that nobody reads.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import random
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor

from nbaccel.base.quantities import with_article
from nbaccel.base.values import attributes_of
from nbaccel.errors import CannotResume
from nbaccel.features.cell_checkpoints.head_state import CODE, SCALARS, HeadState, Seen, is_refused_name, text_of
from nbaccel.namespace.arrays import TensorChange, Values, has_plain_memory, is_as_it_lies
from nbaccel.namespace.kind import Entries
from nbaccel.namespace.kinds import slots_of
from nbaccel.namespace.state_in_c import keeps_state_in_c
from nbaccel.train.checkpoint.serialization import CannotPack, ToHost, knows_dtypes_of, pack, unpack

__all__ = ["Decoder", "Encoder", "NoData", "NotMade", "refuse_state"]

_JSON_INT = 1 << 63

_DATES = {kind.__name__: kind for kind in (datetime.date, datetime.time, datetime.datetime)}
_TEXTS: dict[str, type] = {
    **{kind.__name__: kind for kind in (decimal.Decimal, uuid.UUID)},
    **{kind.__name__: kind for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))},
}
"""Types of values that are made of their text."""

_SEQUENCES: dict[str, type] = {kind.__name__: kind for kind in (list, set, frozenset, tuple)}
_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_NAMESPACES: dict[str, type] = {"SimpleNamespace": types.SimpleNamespace, "Namespace": argparse.Namespace}
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple)}
"""What a defaultdict may call."""

_BASES = (list, dict, tuple, set, frozenset)
"""Containers from which a class of the notebook may derive."""

_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "Tensor": lambda tensor: tensor,
    "Parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "Buffer": lambda tensor: torch.nn.Buffer(tensor),
}

_BIT_GENERATORS = frozenset({"PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"})
_ARRAYS = "biufcSUMm"
"""Kinds of NumPy's types that are plain memory."""

_CODE_NAMES: dict[Any, str] = {
    types.FunctionType: "function",
    types.BuiltinFunctionType: "function",
    types.MethodType: "method",
    types.ModuleType: "module",
}
_SPECIAL = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


class NoData(TypeError):
    """An object has no form as data.

    Args:
        what: The object in words: "a function".
        steps: The way to it from the value that was encoded.
        obj: The object.
        place: All of its place, where that is known.
    """

    def __init__(self, what: str, steps: str = "", obj: Any = None, place: str = "") -> None:
        super().__init__(f"{what}{steps}")
        self.what = what
        self.steps = steps
        self.obj = obj
        self.place = place


class NotMade(LookupError):
    """Raised for an object that the notebook's own statements make again, and have not made yet."""


class Encoder:
    """Collects the records of objects, and their tensors.

    Args:
        head: Its objects are named by their places.
        to_host: Brings a tensor to the CPU, see `nbaccel.train.checkpoint.serialization`.
        made: Places of objects that are made again by other means, by the id of the object.

    Example:
        >>> encoder = Encoder(HeadState({}), lambda name, tensor: tensor)
        >>> shared = [1, 2]
        >>> encoder.encoded({"a": shared, "b": shared})
        ['o', 0]
        >>> encoder.records
        [['dict', [['a', ['o', 1]], ['b', ['o', 1]]]], ['list', [1, 2]]]
    """

    def __init__(self, head: HeadState, to_host: ToHost, made: Mapping[int, str] = MappingProxyType({})) -> None:
        self._head = head
        self._to_host = to_host
        self._made = made
        self.records: list[Any] = []
        self.tensors: dict[str, Tensor] = {}
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []  # by number; kept, so that no id is used twice
        self._storages: dict[Any, str] = {}
        self._bases = {_memory(each): each for each in head.tensors()}
        self._waiting: deque[tuple[int, Any, str]] = deque()
        self._at_work: Any = None

    def encoded(self, value: Any) -> Any:
        """Return a value, and all that it leads to, as JSON that refers to records.

        Raises:
            NoData: Nothing of it is kept.
        """
        begin, tensors, storages = len(self.records), dict(self.tensors), dict(self._storages)
        try:
            found = self._value(value, "")
            self._encode_waiting()
            return found
        except NoData:
            for obj in self._objects[begin:]:
                del self._numbers[id(obj)]
            del self.records[begin:], self._objects[begin:]
            self._waiting.clear()
            self.tensors, self._storages = tensors, storages
            raise

    def change(self, content: Any) -> Any:
        """Return the content of a change (`nbaccel.namespace.kind`) as JSON.

        Raises:
            NoData: Nothing of it is kept.
        """
        if type(content) is Entries:
            keys, values = [self._key(key) for key in content.keys], content.values
            parts = [self.change_part(value, key) for key, value in zip(content.keys, values, strict=True)]
            return ["entries", [self._key(key) for key in content.removed], keys, parts]
        if type(content) is TensorChange:
            new = None if content.values is None else self._tensor(content.values.tensor, is_new=False)
            gradient = None if content.gradient is None else [self.encoded(content.gradient[0])]
            return ["tensor change", new, content.wants_gradient, gradient]
        if type(content) is tuple:
            return ["t", [self.change(each) for each in content]]
        if type(content) is list:
            return ["l", [self.change_part(each, index) for index, each in enumerate(content)]]
        if type(content) is dict:
            return ["d", [[self._key(key), self.change_part(each, key)] for key, each in content.items()]]
        return self.encoded(content)

    def change_part(self, value: Any, key: Any) -> Any:
        try:
            return self.encoded(value)
        except NoData as error:
            raise NoData(error.what, f"{_step(key)}{error.steps}", error.obj) from None

    def _key(self, key: Any) -> Any:
        if is_refused_name(key):
            raise NoData(f"a name of Python's own, {key}")
        return self.encoded(key)

    def _encode_waiting(self) -> None:
        while self._waiting:
            number, obj, steps = self._waiting.popleft()
            self._at_work = obj
            try:
                self.records[number] = self._record(obj, steps)
            except CannotPack as error:
                raise NoData(with_article(type(obj).__name__), steps) from error

    def _value(self, obj: Any, steps: str) -> Any:
        kind = type(obj)
        if kind in SCALARS and not (kind is int and abs(obj) >= _JSON_INT):
            return obj
        if (value := self._immutable(obj, steps)) is not None:
            return value
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self.records)
            self.records.append(None)
            self._objects.append(obj)
            self._waiting.append((number, obj, steps))
        return ["o", number]

    def _immutable(self, obj: Any, steps: str) -> Any:
        """Return a value that is made at once; None for an object with a record."""
        kind = type(obj)
        if kind is int:
            return ["int", hex(obj)]
        if kind in (range, slice):
            return [kind.__name__, *(self._value(each, steps) for each in (obj.start, obj.stop, obj.step))]
        if obj is ... or obj is NotImplemented:
            return [repr(obj)]
        if kind.__name__ in _DATES and kind is _DATES[kind.__name__] and _has_plain_zone(obj):
            return [kind.__name__, obj.isoformat()]
        if kind is datetime.timedelta:
            return ["timedelta", obj.days, obj.seconds, obj.microseconds]
        if kind.__name__ in _TEXTS and kind is _TEXTS[kind.__name__]:
            return [kind.__name__, str(obj)]
        if kind is fractions.Fraction:
            return ["Fraction", self._value(obj.numerator, steps), self._value(obj.denominator, steps)]
        if isinstance(obj, enum.Enum):
            return ["enum", self._class(kind, steps), obj.name]
        np = sys.modules.get("numpy")
        is_number = np is not None and isinstance(obj, np.generic) and obj.dtype.kind in _ARRAYS
        if is_number and type(obj.item()) not in SCALARS:
            return ["scalar", obj.dtype.str, base64.b64encode(obj.tobytes()).decode()]
        if is_number or kind in (complex, bytes, torch.Size, torch.device, torch.dtype):
            return ["value", pack(obj).structure]
        return None

    def _record(self, obj: Any, steps: str) -> Any:
        kind = type(obj)
        if (place := self._head.place(obj)) is not None:
            return ["at", text_of(place)]
        if (text := self._made.get(id(obj))) is not None:
            return ["made", text]
        if issubclass(kind, CODE):
            name = "class" if isinstance(obj, type) else _CODE_NAMES.get(type(obj), type(obj).__name__)
            raise NoData(with_article(name), steps)
        if kind in _SEQUENCES.values():
            return [kind.__name__, self._items(obj, steps)]
        if kind in _MAPPINGS.values():
            return [kind.__name__, self._pairs(obj.items(), steps)]
        if kind is defaultdict:
            factory = obj.default_factory
            if factory is not None and factory not in _FACTORIES.values():
                raise NoData("a defaultdict that calls a function", steps)
            return ["defaultdict", factory and factory.__name__, self._pairs(obj.items(), steps)]
        if kind is deque:
            return ["deque", obj.maxlen, self._items(obj, steps)]
        if kind is bytearray:
            return ["bytearray", base64.b64encode(obj).decode()]
        if kind in _NAMESPACES.values():
            return [kind.__name__, self._pairs(vars(obj).items(), steps)]
        if isinstance(obj, Tensor):
            return self._tensor(obj, steps)
        if (record := self._of_libraries(obj, steps)) is not None:
            return record
        return self._object(obj, steps)

    def _items(self, items: Iterable[Any], steps: str) -> list[Any]:
        return [self._value(each, f"{steps}[{index}]") for index, each in enumerate(items)]

    def _pairs(self, items: Iterable[tuple[Any, Any]], steps: str) -> list[Any]:
        pairs = []
        for key, value in items:
            if is_refused_name(key):
                raise NoData(f"a name of Python's own, {key}", steps)
            pairs.append([self._value(key, steps), self._value(value, f"{steps}{_step(key)}")])
        return pairs

    def _object(self, obj: Any, steps: str) -> Any:
        """Return the record of an object whose class the notebook has, and whose attributes are all that it is."""
        kind = type(obj)
        name = self._class(kind, steps)
        if not _is_data_class(kind):
            raise NoData(with_article(kind.__name__), steps, obj)
        base = _base_of(kind)
        own = attributes_of(obj) or {}
        slots = {}
        for slot, member in slots_of(kind).items():
            try:
                slots[slot] = member.__get__(obj)
            except AttributeError:
                continue
        inner = None
        if base is dict:
            inner = self._pairs(dict.items(obj), steps)
        elif base is not None:
            inner = self._items(base.__iter__(obj), steps)
        attributes = [[key, self._value(value, f"{steps}.{key}")] for key, value in (own | slots).items()]
        if any(type(key) is not str or is_refused_name(key) for key, _ in attributes):
            raise NoData("an attribute of Python's own", steps)
        return ["object", name, inner, attributes]

    def _class(self, kind: type, steps: str) -> str:
        place = self._head.place_of_class(kind)
        if place is None:
            is_lost = ", whose class was made in the loop," if kind.__module__ == "__main__" else ""
            raise NoData(with_article(kind.__name__) + is_lost, steps, self._at_work)
        return text_of(place)

    def _of_libraries(self, obj: Any, steps: str) -> Any:
        np = sys.modules.get("numpy")
        if np is not None and type(obj) is np.ndarray:
            return self._array(obj, steps)
        pandas = sys.modules.get("pandas")
        if pandas is not None and type(obj) in (getattr(pandas, "DataFrame", None), getattr(pandas, "Series", None)):
            return self._table(obj, steps)
        if pandas is not None and type(obj) in (getattr(pandas, "Index", None), getattr(pandas, "RangeIndex", None)):
            return ["index", *self._axis(obj, steps, is_whole=False)]
        if type(obj) is torch.Generator:
            return ["torch.Generator", str(obj.device), self._put(obj.get_state())]
        if np is not None and type(obj) is np.random.Generator:
            bits = type(obj.bit_generator).__name__
            if bits not in _BIT_GENERATORS:
                raise NoData(with_article(bits), steps)
            return ["numpy.random.Generator", bits, self._value(obj.bit_generator.state, steps)]
        if np is not None and type(obj) is np.random.RandomState:
            return ["numpy.random.RandomState", self._value(obj.get_state(legacy=True), steps)]
        if type(obj) is random.Random:
            return ["random.Random", self._value(obj.getstate(), steps)]
        return None

    def _array(self, array: Any, steps: str) -> Any:
        if array.dtype.kind == "O":
            return ["objects", list(array.shape), self._items(array.ravel().tolist(), steps)]
        if array.dtype.kind not in _ARRAYS:
            raise NoData(f"an array of {array.dtype}", steps)
        np = sys.modules["numpy"]
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        flat = np.frombuffer(array.tobytes(order) or b"", dtype=np.uint8)
        return ["array", array.dtype.str, list(array.shape), order, self._put(torch.from_numpy(flat.copy()))]

    def _table(self, table: Any, steps: str) -> Any:
        """Return the record of a table or a column of pandas whose values NumPy has, with plain labels."""
        pandas: Any = sys.modules["pandas"]
        is_column = type(table) is pandas.Series
        columns = [table] if is_column else [table.iloc[:, number] for number in range(table.shape[1])]
        plain = [column.to_numpy() for column in columns]
        axes = [self._axis(axis, steps) for axis in table.axes]
        for column, values in zip(columns, plain, strict=True):
            if pandas.Series(values).dtype != column.dtype:
                raise NoData(f"a column of {column.dtype}", steps)
        name = self._value(table.name, steps) if is_column else None
        return ["table", is_column, axes, [self._value(values, steps) for values in plain], name]

    def _axis(self, axis: Any, steps: str, is_whole: bool = True) -> Any:
        """Return the record of labels.

        Args:
            is_whole: They are made once all arrays are filled; else a tuple has objects, which are made before it.
        """
        pandas: Any = sys.modules["pandas"]
        name = self._value(axis.name, steps)
        if type(axis) is pandas.RangeIndex:
            return ["range", axis.start, axis.stop, axis.step, name]
        values = axis.to_numpy() if type(axis) is pandas.Index else None
        if values is None or pandas.Index(values).dtype != axis.dtype:
            labels = f"{with_article(type(axis).__name__)} of {axis.dtype}"
            raise NoData(f"a table with {labels}" if is_whole else labels, steps)
        is_tuple = values.dtype.kind == "O" and not is_whole
        return ["labels", self._value(tuple(values.tolist()) if is_tuple else values, steps), name]

    def _tensor(self, tensor: Tensor, steps: str = "", is_new: bool = True) -> Any:
        """Return the record of a tensor: a view of one that the notebook has, or of memory that is in the file."""
        name = type(tensor).__name__
        if type(tensor) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or not has_plain_memory(tensor):
            raise NoData(with_article(name) if name != "Tensor" else f"a tensor of {tensor.layout}", steps)
        plain = tensor.detach()
        flags = [name, tensor.requires_grad, not tensor.is_leaf]
        base = self._bases.get(_memory(tensor)) if is_new and tensor.numel() and is_as_it_lies(tensor) else None
        if base is not None and base.dtype == tensor.dtype:
            place = [list(plain.size()), list(plain.stride()), plain.storage_offset()]
            return ["view", self._value(base, steps), *place, *flags]
        gradient = self._value(tensor.grad, f"{steps}.grad") if is_new and tensor.is_leaf else None
        device = str(tensor.device)
        if not is_as_it_lies(tensor) or _repeats(plain):
            plain = plain.resolve_conj().resolve_neg().contiguous()
            stored, offset = self._put(plain.reshape(-1)), 0
        elif is_new:
            stored, offset = self._stored(plain)
        else:
            span = _span(plain)
            stored, offset = self._put(plain.as_strided((span,), (1,))), 0
        layout: list[Any] = [str(plain.dtype), list(plain.size()), list(plain.stride()), offset]
        return ["tensor", stored, *layout, device, *flags, gradient]

    def _stored(self, plain: Tensor) -> tuple[str, int]:
        """Return the name of the memory of a new tensor, which others may share, and the tensor's place in it."""
        if not plain.numel():
            return self._put(plain.reshape(-1)), 0
        size = plain.untyped_storage().nbytes() // plain.element_size()
        key = (_memory(plain), plain.dtype)
        if key not in self._storages:
            if size > 2 * _span(plain):  # of a row of a large table the row alone
                return self._put(plain.as_strided((_span(plain),), (1,))), 0
            self._storages[key] = self._put(plain.as_strided((size,), (1,), 0))
        return self._storages[key], int(plain.storage_offset())

    def _put(self, flat: Tensor) -> str:
        """Store the memory of a flat tensor; return its name in the file."""
        name = f"tensor.{len(self.tensors)}"
        if not knows_dtypes_of({name: flat}):
            flat = flat.contiguous().view(torch.uint8)
        self.tensors[name] = self._to_host(name, flat)
        return name


def _is_data_class(kind: type) -> bool:
    """Return whether the attributes, and the elements, of an object are all that it is, for all that its class says."""
    if _base_of(kind) is None and keeps_state_in_c(kind):
        return False
    if isinstance(kind, enum.EnumMeta) or issubclass(kind, (BaseException, torch.nn.Module, torch.optim.Optimizer)):
        return False
    own = [base for base in kind.__mro__ if base.__module__ not in ("builtins", "typing", "abc", "collections.abc")]
    is_frozen = "__dataclass_fields__" in vars(kind)  # such a class with slots gets __getstate__
    special = () if is_frozen else _SPECIAL
    return not any(name in vars(base) for base in own for name in ("__del__", "__new__", *special)) or _is_named_tuple(
        kind
    )


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and "__del__" not in vars(kind)


def _base_of(kind: type) -> Any:
    return next((base for base in _BASES if issubclass(kind, base)), None)


def _has_plain_zone(moment: Any) -> bool:
    return getattr(moment, "tzinfo", None) is None or type(moment.tzinfo) is datetime.timezone


def _memory(tensor: Tensor) -> Any:
    """Return what tensors that share memory have in common."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def _span(plain: Tensor) -> int:
    """Return how many elements of memory lie between the first and the last one of a tensor."""
    if not plain.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(plain.size(), plain.stride(), strict=True))


def _repeats(plain: Tensor) -> bool:
    """Return whether elements share memory, as in an expanded tensor: of these the file has each one."""
    return any(stride == 0 and size > 1 for size, stride in zip(plain.size(), plain.stride(), strict=True))


def _step(key: Any) -> str:
    return f"[{key!r}]" if type(key) in SCALARS and len(repr(key)) <= 40 else f"[{with_article(type(key).__name__)}]"


class Decoder:
    """Makes the objects of records, and finds those of the notebook. Nothing of the notebook is changed by it.

    Args:
        records, tensors: Those of an `Encoder`, as they were read from a file.
        head: Has the places that the records name.

    New objects are filled once all of them are made (`fills`), and again where code may have changed them since.

    Raises:
        An error of any kind: it is not what an `Encoder` made.

    Example:
        >>> decoder = Decoder([["list", [1, ["o", 0]]]], {}, HeadState({}))
        >>> decoder.decoded(["o", 0])
        []
        >>> for fill in decoder.fills():
        ...     fill()
        >>> decoder.decoded(["o", 0])
        [1, [...]]
    """

    def __init__(self, records: list[Any], tensors: Mapping[str, Tensor], head: HeadState) -> None:
        self._records = records
        self._tensors = tensors
        self._head = head
        self._made: dict[int, Any] = {}
        self._under_way: set[int] = set()
        self._waiting: list[Callable[[], None]] = []
        self._postponed: list[Callable[[], None]] = []
        self._there: Mapping[str, Seen] = {}
        self._fills: list[tuple[int, Callable[[], object]]] = []
        self._memory: dict[tuple[str, str, str], Tensor] = {}

    def fills(self) -> list[Callable[[], object]]:
        """Return the functions that fill the objects that were made since the last call."""
        fills, self._fills = sorted(self._fills, key=lambda each: each[0]), []
        return [fill for _, fill in fills]

    def decoded(self, value: Any) -> Any:
        """Return the value that was encoded; new objects in it are filled later.

        Raises:
            NotMade: It needs an object that is not made again yet, see `make`.
        """
        found = self._value(value)
        self._decode_waiting()
        return found

    def make(self, there: Mapping[str, Seen], is_last: bool = False) -> None:
        """Go on with what waited for objects that are made again.

        Args:
            there: These objects, by the text of their place.
            is_last: Everything is there by now.

        Raises:
            NotMade: It is not.
        """
        self._there = there
        self._waiting, self._postponed = self._postponed, []
        self._decode_waiting()
        if is_last and self._postponed:
            raise NotMade("an object that is not made again")

    def _decode_waiting(self) -> None:
        while self._waiting:
            children = self._waiting.pop()
            try:
                children()
            except NotMade:
                self._postponed.append(children)

    def change(self, content: Any) -> Any:
        """Return the content of a change that `Encoder.change` was given."""
        if type(content) is list and content and content[0] in ("entries", "tensor change", "t", "l", "d"):
            return getattr(self, "_" + content[0].replace(" ", "_"))(*content[1:])
        return self.decoded(content)

    def _entries(self, removed: list[Any], keys: list[Any], values: list[Any]) -> Entries:
        return Entries(self._keys(removed), self._keys(keys), [self.decoded(each) for each in values])

    def _tensor_change(self, values: Any, wants_gradient: bool, gradient: Any) -> TensorChange:
        new = None if values is None else self._stored_tensor(*_checked(values, "tensor"))
        # A receiver of a payload gets the tensor of `Values`, too.
        return TensorChange(
            cast("Values | None", new), bool(wants_gradient), None if gradient is None else (self.decoded(gradient[0]),)
        )

    def _t(self, parts: list[Any]) -> Any:
        return tuple(self.change(each) for each in parts)

    def _l(self, parts: list[Any]) -> Any:
        return [self.decoded(each) for each in parts]

    def _d(self, parts: list[Any]) -> Any:
        return dict(zip(self._keys([key for key, _ in parts]), [self.decoded(each) for _, each in parts], strict=True))

    def _keys(self, keys: list[Any]) -> list[Any]:
        found = [self.decoded(key) for key in keys]
        _refuse_names(found)
        return found

    def _value(self, value: Any) -> Any:
        if type(value) in SCALARS:
            return value
        name, *rest = value
        return self._object(*rest) if name == "o" else _IMMUTABLE[name](self, name, *rest)

    def _object(self, number: int) -> Any:
        if number in self._made:
            return self._made[number]
        if type(number) is not int or not 0 <= number < len(self._records) or number in self._under_way:
            raise ValueError(f"{number!r} is no object of the file")
        self._under_way.add(number)  # a tuple, whose elements are made first, cannot hold itself
        name, *rest = self._records[number]
        try:
            obj = self._made[number] = _RECORDS[name](self, name, *rest)
        except NotMade:
            self._under_way.discard(number)
            raise
        return obj

    def _made_again(self, _: str, place: str) -> Any:
        if place not in self._there:
            raise NotMade(place)
        return self._checked(self._there[place].obj, place)

    def _later(self, children: Callable[[], tuple[int, Callable[[], object]]]) -> None:
        """Decode the children of an object later: `children` returns when, and how, it is filled with them."""
        self._waiting.append(lambda: self._fills.append(children()))

    def _fill_with(self, items: list[Any], fill: Callable[[list[Any]], object], order: int) -> None:
        def children() -> tuple[int, Callable[[], object]]:
            values = [self._value(each) for each in items]
            return order, lambda: fill(values)

        self._later(children)

    def _made_of_pairs(self, obj: Any, pairs: list[Any], methods: Any, order: int) -> Any:
        def children() -> tuple[int, Callable[[], object]]:
            keys, values = [self._value(key) for key, _ in pairs], [self._value(value) for _, value in pairs]
            _refuse_names(keys)

            def fill() -> None:
                methods.clear(obj)
                for key, value in zip(keys, values, strict=True):
                    methods.__setitem__(obj, key, value)

            return order, fill

        self._later(children)
        return obj

    # --- immutable values

    def _int(self, _: str, text: str) -> int:
        return int(text, 16)

    def _range(self, _: str, *parts: Any) -> range:
        return range(*(self._value(each) for each in parts))

    def _slice(self, _: str, *parts: Any) -> slice:
        return slice(*(self._value(each) for each in parts))

    def _singleton(self, name: str) -> Any:
        return ... if name == "Ellipsis" else NotImplemented

    def _date(self, name: str, text: str) -> Any:
        return _DATES[name].fromisoformat(text)

    def _timedelta(self, _: str, *parts: int) -> datetime.timedelta:
        return datetime.timedelta(*parts)

    def _of_text(self, name: str, text: str) -> Any:
        return _TEXTS[name](str(text))

    def _fraction(self, _: str, numerator: Any, denominator: Any) -> fractions.Fraction:
        return fractions.Fraction(self._value(numerator), self._value(denominator))

    def _enum(self, _: str, place: str, name: str) -> Any:
        kind = self._class(place)
        if not isinstance(kind, enum.EnumMeta):
            raise ValueError(f"{place} is no enumeration")
        return kind.__members__[name]

    def _scalar(self, _: str, dtype: str, data: str) -> Any:
        return sys.modules["numpy"].frombuffer(base64.b64decode(data), dtype=_plain_dtype(dtype))[0]

    def _packed(self, _: str, structure: Any) -> Any:
        ((name, parts),) = structure.items()
        if name not in ("number", "complex", "bytes", "Size", "device", "dtype"):
            raise ValueError(f"{name} is no value")
        if name == "number":
            _plain_dtype(parts[0])
        return unpack(structure, {})

    # --- objects

    def _at(self, _: str, place: str) -> Any:
        return self._checked(self._head.objects()[place].obj, place)

    def _checked(self, obj: Any, place: str) -> Any:
        if issubclass(type(obj), CODE):
            raise ValueError(f"{place} is code")
        return obj

    def _class(self, place: str) -> type:
        kind = self._head.objects()[place].obj
        if not isinstance(kind, type):
            raise ValueError(f"{place} is no class")
        return kind

    def _list(self, _: str, items: list[Any]) -> list[Any]:
        new: list[Any] = []
        self._fill_with(items, lambda values: new.__setitem__(slice(None), values), 1)
        return new

    def _set(self, _: str, items: list[Any]) -> set[Any]:
        new: set[Any] = set()
        self._fill_set(new, items)
        return new

    def _fill_set(self, new: set[Any], items: list[Any]) -> None:
        def fill(values: list[Any]) -> None:
            set.clear(new)
            set.update(new, values)

        self._fill_with(items, fill, 2)

    def _tuple(self, _: str, items: list[Any]) -> tuple[Any, ...]:
        return tuple(self._value(each) for each in items)

    def _frozenset(self, _: str, items: list[Any]) -> frozenset[Any]:
        return frozenset(self._value(each) for each in items)

    def _deque(self, _: str, maxlen: int | None, items: list[Any]) -> deque[Any]:
        new: deque[Any] = deque(maxlen=maxlen)

        def fill(values: list[Any]) -> None:
            new.clear()
            new.extend(values)

        self._fill_with(items, fill, 1)
        return new

    def _mapping(self, name: str, pairs: list[Any]) -> Any:
        kind = _MAPPINGS[name]
        return self._made_of_pairs(kind(), pairs, OrderedDict if kind is OrderedDict else dict, 2)

    def _defaultdict(self, _: str, factory: str | None, pairs: list[Any]) -> Any:
        return self._made_of_pairs(defaultdict(None if factory is None else _FACTORIES[factory]), pairs, dict, 2)

    def _namespace(self, name: str, pairs: list[Any]) -> Any:
        new: Any = _NAMESPACES[name]()
        self._made_of_pairs(vars(new), pairs, dict, 0)
        return new

    def _bytearray(self, _: str, data: str) -> bytearray:
        content = base64.b64decode(data)
        new = bytearray(content)
        self._fills.append((1, lambda: new.__setitem__(slice(None), content)))
        return new

    def _instance(self, _: str, place: str, items: list[Any] | None, attributes: list[Any]) -> Any:
        """Return an object of a class of the notebook. None of the methods of the class is called, not even a new."""
        kind = self._class(place)
        base = _base_of(kind)
        if not _is_data_class(kind) or (base is None) != (items is None):
            raise ValueError(f"{place} is no class of data")
        new: Any
        if items is None:
            new = object.__new__(kind)
        elif base in (tuple, frozenset):
            new = base.__new__(kind, [self._value(each) for each in items])
        else:
            new = base.__new__(kind)
        if items is not None and base is dict:
            self._made_of_pairs(new, items, dict, 2)
        elif items is not None and base is set:
            self._fill_set(new, items)
        elif items is not None and base is list:
            self._fill_with(items, lambda values: list.__setitem__(new, slice(None), values), 1)
        self._later(lambda: (0, self._attributes(new, attributes)))
        return new

    def _attributes(self, new: Any, attributes: list[Any]) -> Callable[[], None]:
        values = {str(name): self._value(value) for name, value in attributes}
        _refuse_names(values)
        slots, own = slots_of(type(new)), attributes_of(new)
        if own is None and not values.keys() <= slots.keys():
            raise ValueError("an object without these attributes")

        def fill() -> None:
            for name, value in values.items():
                if name in slots:
                    slots[name].__set__(new, value)
                elif own is not None:
                    own[name] = value

        return fill

    # --- memory

    def _view(self, _: str, base: Any, size: list[int], stride: list[int], offset: int, *flags: Any) -> Tensor:
        whole = self._value(base)
        if not isinstance(whole, Tensor):
            raise ValueError("a view of no tensor")
        plain = torch.Tensor.detach(whole)
        elements = plain.untyped_storage().nbytes() // plain.element_size()
        return _flagged(_laid_out(plain, elements, size, stride, offset), *flags)

    def _new_tensor(self, _: str, *parts: Any) -> Tensor:
        *layout, name, wants_gradient, has_graph, gradient = parts
        plain = self._stored_tensor(*layout)
        stored, dtype, size, stride, offset = layout[:5]
        memory = self._of_file(stored, dtype)
        pristine = _laid_out(memory, memory.numel(), size, stride, offset)
        new = _flagged(plain, name, wants_gradient, has_graph)
        values = new.detach()

        def children() -> tuple[int, Callable[[], object]]:
            grad = None if gradient is None else self._value(gradient)

            def fill() -> None:
                values.copy_(pristine)
                if grad is not None:
                    new.grad = grad

            return 1, fill

        self._later(children)
        return new

    def _stored_tensor(
        self, stored: str, dtype: str, size: list[int], stride: list[int], offset: int, device: str, *rest: Any
    ) -> Tensor:
        key = (stored, dtype, device)
        if key not in self._memory:
            # Into memory of torch's own: of other addresses MKL may compute other bits.
            self._memory[key] = self._of_file(stored, dtype).clone().to(_here(torch.device(device)))
        memory = self._memory[key]
        return _laid_out(memory, memory.numel(), size, stride, offset)

    def _of_file(self, stored: str, dtype: str) -> Tensor:
        kind: torch.dtype = unpack({"dtype": [dtype]}, {})
        memory = self._tensors[stored]
        if memory.dtype == kind:
            return memory
        # Files align to 8 bytes, and torch's instructions for complex128 may need 16: a fault, where there is no AVX.
        return (memory.clone() if memory.data_ptr() % kind.itemsize else memory).view(kind)

    def _array(self, _: str, dtype: str, shape: list[int], order: str, stored: str) -> Any:
        pristine = self._tensors[stored].numpy().view(_plain_dtype(dtype)).reshape(shape, order=order)
        new = pristine.copy(order="K")
        self._fills.append((1, lambda: new.__setitem__(..., pristine)))
        return new

    def _objects(self, _: str, shape: list[int], items: list[Any]) -> Any:
        np: Any = sys.modules["numpy"]
        flat = np.empty(len(items), dtype=object)
        new = flat.reshape(shape)

        def fill(values: list[Any]) -> None:
            for index, each in enumerate(values):
                flat[index] = each

        self._fill_with(items, fill, 1)
        return new

    def _table(self, _: str, is_column: bool, axes: list[Any], columns: list[Any], name: Any) -> Any:
        pandas: Any = sys.modules["pandas"]
        new = pandas.Series(dtype=object) if is_column else pandas.DataFrame()
        labels = [self._axis(*axis) for axis in axes]

        def fill(values: list[Any]) -> None:
            own, *plain = values
            if is_column:
                new._update_inplace(pandas.Series(plain[0], index=labels[0]()))
                new.name = own
                return
            table = pandas.DataFrame(dict(enumerate(plain)), index=labels[0]())
            table.columns = labels[1]()
            new._update_inplace(table)

        self._fill_with([name, *columns], fill, 2)
        return new

    def _index(self, _: str, *axis: Any) -> Any:
        return self._axis(*axis)()

    def _axis(self, word: str, *parts: Any) -> Callable[[], Any]:
        pandas: Any = sys.modules["pandas"]
        *labels, name = (self._value(part) for part in parts)
        if word not in ("range", "labels"):
            raise ValueError(f"{word} is no axis")
        if word == "range":
            return lambda: pandas.RangeIndex(*labels, name=name)
        return lambda: pandas.Index(*labels, name=name, tupleize_cols=False)

    # --- random generators

    def _generator(self, _: str, device: str, stored: str) -> torch.Generator:
        new = torch.Generator(_here(torch.device(device)))
        state = self._tensors[stored]
        self._fills.append((1, lambda: new.set_state(state)))
        return new

    def _generator_of_numpy(self, _: str, bits: str, state: Any) -> Any:
        np: Any = sys.modules["numpy"]
        if bits not in _BIT_GENERATORS:
            raise ValueError(f"{bits} is no generator")
        new = np.random.Generator(getattr(np.random, bits)())

        def fill(values: list[Any]) -> None:
            refuse_state(values[0])
            new.bit_generator.state = values[0]

        self._fill_with([state], fill, 3)
        return new

    def _random_state(self, _: str, state: Any) -> Any:
        new = sys.modules["numpy"].random.RandomState()

        def fill(values: list[Any]) -> None:
            refuse_state(values[0])
            new.set_state(values[0])

        self._fill_with([state], fill, 3)
        return new

    def _random(self, _: str, state: Any) -> random.Random:
        new = random.Random()
        self._fill_with([state], lambda values: new.setstate(values[0]), 3)
        return new


_IMMUTABLE: dict[str, Callable[..., Any]] = {
    **{"int": Decoder._int, "range": Decoder._range, "slice": Decoder._slice, "timedelta": Decoder._timedelta},
    **{"Ellipsis": Decoder._singleton, "NotImplemented": Decoder._singleton, "Fraction": Decoder._fraction},
    **{"enum": Decoder._enum, "scalar": Decoder._scalar, "value": Decoder._packed},
    **dict.fromkeys(_DATES, Decoder._date),
    **dict.fromkeys(_TEXTS, Decoder._of_text),
}
_RECORDS: dict[str, Callable[..., Any]] = {
    **{
        "at": Decoder._at,
        "made": Decoder._made_again,
        "list": Decoder._list,
        "set": Decoder._set,
        "tuple": Decoder._tuple,
    },
    **{"frozenset": Decoder._frozenset, "deque": Decoder._deque, "defaultdict": Decoder._defaultdict},
    **{"bytearray": Decoder._bytearray, "object": Decoder._instance, "view": Decoder._view},
    **{"tensor": Decoder._new_tensor, "array": Decoder._array, "objects": Decoder._objects, "table": Decoder._table},
    "index": Decoder._index,
    **{"torch.Generator": Decoder._generator, "numpy.random.Generator": Decoder._generator_of_numpy},
    **{"numpy.random.RandomState": Decoder._random_state, "random.Random": Decoder._random},
    **dict.fromkeys(_MAPPINGS, Decoder._mapping),
    **dict.fromkeys(_NAMESPACES, Decoder._namespace),
}


class _LostGraph(torch.autograd.Function):
    """Stands for the graph of a tensor, which is in no file: a backward through it is an error, not a wrong number."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise CannotResume(
            "a backward goes through a tensor of the rounds before the checkpoint, whose graph no file holds. Detach "
            "what is kept from round to round (loss.item(), hidden.detach()), or save where nothing is kept"
        )


def _flagged(plain: Tensor, name: str, wants_gradient: bool, has_graph: bool) -> Tensor:
    """Return a tensor of the class `name` that wants gradients as the one did that was saved."""
    if not wants_gradient:
        return _TENSORS[name](plain)
    if has_graph:
        origin = torch.zeros((), requires_grad=True, device=plain.device)
        lost: Tensor = _LostGraph.apply(plain, origin)  # type: ignore[no-untyped-call]
        return lost
    return _TENSORS[name](plain).requires_grad_()


def _laid_out(memory: Tensor, elements: int, size: list[int], stride: list[int], offset: int) -> Tensor:
    """Return a tensor in `memory`; it has no more elements than that."""
    are_sizes = all(type(each) is int and each >= 0 for each in (*size, *stride, offset)) and len(size) == len(stride)
    if not are_sizes or math.prod(size) > elements:
        raise ValueError(f"a tensor of {size} in memory for {elements}")
    return memory.as_strided(size, stride, offset)


def _here(device: torch.device) -> torch.device:
    """Return where a tensor of `device` belongs in this process: a rank has one device, whatever its number was."""
    if device.type == "cpu":
        return device
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return torch.device("cpu")
    return torch.device(device.type, torch.accelerator.current_device_index())


def _plain_dtype(text: str) -> Any:
    """Return a type of NumPy whose elements are as large as their bytes in the file."""
    dtype = sys.modules["numpy"].dtype(text)
    if dtype.kind not in _ARRAYS + "?" or not dtype.itemsize or dtype.subdtype is not None:
        raise ValueError(f"{text} is no type of plain values")
    return dtype


def refuse_state(state: Any) -> None:
    """Refuse a state of one of NumPy's generators that would read beyond its memory: NumPy does not look.

    Raises:
        ValueError: It is one.
    """
    places: list[tuple[Any, int]] = []
    if isinstance(state, dict):
        places.append((state.get("buffer_pos", 0), _PHILOX_WORDS))
        if isinstance(inner := state.get("state"), dict):
            places.append((inner.get("pos", 0), _TWISTER_WORDS))
    elif isinstance(state, tuple) and len(state) > 2 and state[0] == "MT19937":
        places.append((state[2], _TWISTER_WORDS))
    if not all(0 <= place <= most for place, most in places):
        raise ValueError("it is not the state of a random generator")


_PHILOX_WORDS = 4
_TWISTER_WORDS = 624


def _refuse_names(names: Iterable[Any]) -> None:
    for name in names:
        if is_refused_name(name):
            raise ValueError(f"{name} may not be in a file")


def _checked(record: Any, name: str) -> list[Any]:
    if record[0] != name:
        raise ValueError(f"{record[0]} is no {name}")
    rest: list[Any] = record[1:]
    return rest
