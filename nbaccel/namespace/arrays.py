"""Kinds of objects that keep their values in plain memory: tensors, arrays, tables of pandas, and random generators.

Values are compared by checksums, so no copy of the earlier values is kept. Runs in ranks and in the kernel; imports
neither torch nor NumPy nor pandas.
"""

from __future__ import annotations

import io
import math
import operator
import pickle
import random
import reprlib
import sys
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from nbaccel.base.quantities import with_article
from nbaccel.namespace.kind import CannotWrite, Kind, Write

__all__ = [
    "ARRAY",
    "ARRAY_OF_A_CLASS",
    "TensorChange",
    "Values",
    "has_plain_memory",
    "is_as_it_lies",
    "kind_of_memory",
]

_WHOLE = 1 << 22
"""Bytes that are compared by one checksum; more by a checksum of sums over blocks, as fast as memory."""

_BLOCK = 512
"""64-bit words of a block, 4 kB.

Words at the same position of their blocks are summed, too: the sum of a block does not show that two words within it
were exchanged.
"""

_SAMPLED = 1 << 31
"""Bytes that are read of a larger value: every other block, or every third one ..."""


class Values(NamedTuple):
    """The values of a tensor that the notebook has, for sending: for the tensor itself only the place would be sent."""

    tensor: Any


@dataclass(frozen=True, slots=True)
class TensorChange:
    """The change of a tensor.

    Args:
        values: None if they are as before.
        wants_gradient: The tensor requires a gradient now.
        gradient: The present gradient, or None, in a tuple; None if it is as before.
    """

    values: Values | None
    wants_gradient: bool
    gradient: tuple[Any] | None

    @property
    def gradient_bytes(self) -> int:
        has_one = self.gradient is not None and self.gradient[0] is not None
        return int(self.gradient[0].nbytes) if self.gradient is not None and has_one else 0


def kind_of_memory(kind: type) -> Kind | None:
    """Return the kind of objects of exactly this type; None if it is not in this module."""
    torch, np = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _TENSOR if kind in _tensor_types(torch) else _TENSOR_OF_A_CLASS
    if torch is not None and issubclass(kind, torch.Generator):
        return _Stateful(_bytes_of_generator, _set_bytes_of_generator)
    if np is not None and issubclass(kind, np.ndarray):
        # A memory map is the file, which is the same for all processes.
        return ARRAY if kind is np.ndarray else Kind() if issubclass(kind, np.memmap) else ARRAY_OF_A_CLASS
    if np is not None and issubclass(kind, np.random.Generator):
        return _Stateful(_state_of_bits, _set_state_of_bits)
    if np is not None and issubclass(kind, np.random.RandomState):
        return _Stateful(np.random.RandomState.get_state, np.random.RandomState.set_state)
    if issubclass(kind, random.SystemRandom):
        return Kind()
    if issubclass(kind, random.Random):
        return _Stateful(random.Random.getstate, random.Random.setstate)
    if torch is not None and issubclass(kind, torch.UntypedStorage):
        return _Stateful(_bytes_of_storage, _set_bytes_of_storage)
    if kind.__module__.partition(".")[0] == "pandas":
        if kind.__name__ in ("DataFrame", "Series"):
            return _TABLE
        if issubclass(kind, sys.modules["pandas"].api.extensions.ExtensionArray):
            return _COLUMN
        return None if kind.__module__.startswith("pandas.io.") else Kind()
    return None


class _Tensor(Kind):
    """Tensors: the values, the shape, whether gradients are required, and the gradient.

    Fused optimizers and writes through ``.data`` do not increase a tensor's version, so values are compared. The
    version counts in addition if not all values are read, and alone if they have no plain memory.
    """

    cost = 8
    is_data = True

    def mark(self, obj: Any) -> _Seen:
        return _Seen.of(obj)

    def change(self, obj: Any, mark: _Seen) -> TensorChange | None:
        now = _Seen.of(obj)
        values = Values(obj.detach()) if now.differs(mark) else None
        gradient = None if _is_same_gradient(now.gradient, mark.gradient) else (obj.grad,)
        if values is None and gradient is None:
            return None
        return TensorChange(values, obj.requires_grad, gradient)

    def digest(self, obj: Any, mark: _Seen) -> Any:
        return [*map(str, mark.layout[1:]), mark.wants_gradient, mark.digest]

    def keeps_memory(self, obj: Any, mark: _Seen) -> bool:
        return mark.digest is not None and has_plain_memory(obj) and _layout(obj) == mark.layout

    def writing(self, obj: Any, change: TensorChange) -> Write:
        torch: Any = sys.modules["torch"]
        new: Any = change.values
        if new is None:
            return lambda: _set_gradient(obj, change)
        if type(obj) not in _tensor_types(torch):
            raise CannotWrite(f"it is {with_article(type(obj).__name__)} here")
        is_lazy = _is_lazy(obj)
        is_alike = not is_lazy and obj.shape == new.shape and obj.dtype == new.dtype
        if is_alike and (obj.is_inference() or _overlaps(obj)):
            raise CannotWrite("its memory cannot be written to")
        if not is_alike and not is_lazy and not (obj.is_leaf and obj._base is None):
            raise CannotWrite(f"its shape was {tuple(obj.shape)}, and is {tuple(new.shape)}")

        def write() -> None:
            with torch.no_grad():
                if is_alike:
                    obj.copy_(new)
                else:
                    if is_lazy:
                        obj.__class__ = obj.cls_to_become
                    obj.data = new.to(obj.device)
            if obj.is_leaf and obj.requires_grad != change.wants_gradient:
                obj.requires_grad_(change.wants_gradient)
            _set_gradient(obj, change)

        return write


def _set_gradient(tensor: Any, change: TensorChange) -> None:
    if change.gradient is not None and tensor.is_leaf:
        (gradient,) = change.gradient
        tensor.grad = None if gradient is None else gradient.to(tensor.device)


class _TensorOfAClass(Kind):
    """Tensors of other classes, which keep their values in unknown places; torch's count of writes is compared."""

    def mark(self, obj: Any) -> int:
        torch: Any = sys.modules["torch"]
        with torch._C.DisableTorchFunctionSubclass():
            return 0 if obj.is_inference() else int(obj._version)

    def change(self, obj: Any, mark: int) -> None:
        if self.mark(obj) != mark:
            raise TypeError("it was written to")


class _Array(Kind):
    """Arrays of numbers; those of objects are containers."""

    cost = 8
    is_data = True

    def mark(self, obj: Any) -> tuple[Any, ...]:
        return obj.shape, obj.dtype, _digest_of_array(obj)

    def change(self, obj: Any, mark: tuple[Any, ...]) -> tuple[Any] | None:
        if self.mark(obj) == mark:
            return None
        # Another object: for the array itself only the place would be sent. A view of a part would send the whole.
        return (obj.view() if obj.base is None else obj.copy(),)

    def writing(self, obj: Any, change: tuple[Any]) -> Write:
        (new,) = change
        if obj.shape != new.shape or obj.dtype != new.dtype:
            raise CannotWrite(f"it was {obj.dtype}{list(obj.shape)}, and is {new.dtype}{list(new.shape)}")
        if not obj.flags.writeable:
            raise CannotWrite("it is read-only here")

        def write() -> None:
            obj[...] = new

        return write

    def digest(self, obj: Any, mark: Any) -> Any:
        return None if mark is None else [*map(str, mark[:2]), mark[2]]


class _ArrayOfAClass(_Array):
    """Arrays of other classes, such as masked arrays and matrices: read as an array of NumPy's own, by its methods."""

    def mark(self, obj: Any) -> Any:
        return None if obj.dtype.hasobject else super().mark(self._base(obj))

    def change(self, obj: Any, mark: Any) -> tuple[Any] | None:
        return None if mark is None else super().change(self._base(obj), mark)

    def writing(self, obj: Any, change: tuple[Any]) -> Write:
        return super().writing(self._base(obj), change)

    @staticmethod
    def _base(obj: Any) -> Any:
        np: Any = sys.modules["numpy"]
        return np.ndarray.view(obj, np.ndarray)


_SHORT = reprlib.Repr()  # of attributes without end, and of objects whose own raises
_SHORT.maxlevel, _SHORT.maxtuple, _SHORT.maxlist, _SHORT.maxdict = 4, 9, 99, 99
_SHORT.maxstring, _SHORT.maxother = 999, 999


class _Table(Kind):
    """DataFrames and Series, read by columns, and written as pandas' own ``inplace=True`` does."""

    cost = 100
    is_data = True

    def mark(self, obj: Any) -> tuple[list[Any], list[Any], Any]:
        pandas: Any = sys.modules["pandas"]
        is_column = issubclass(type(obj), pandas.Series)
        columns = [obj] if is_column else [obj.iloc[:, i] for i in range(obj.shape[1])]
        names = [list(axis.names) for axis in obj.axes], obj.name if is_column else None, dict(obj.attrs)
        return list(obj.axes), [_digest_of_column(column) for column in columns], _SHORT.repr(names)

    def change(self, obj: Any, mark: tuple[list[Any], list[Any], Any]) -> tuple[Any] | None:
        axes, columns, names = self.mark(obj)
        are_axes = all(a is b or (len(a) == len(b) and a.equals(b)) for a, b in zip(axes, mark[0], strict=True))
        are_columns = len(columns) == len(mark[1]) and all(map(_is_same_column, columns, mark[1]))
        return None if are_axes and are_columns and names == mark[2] else (obj.copy(),)

    def writing(self, obj: Any, change: tuple[Any]) -> Write:
        (new,) = change

        def write() -> None:
            obj._update_inplace(new)
            obj.attrs = new.attrs
            if issubclass(type(obj), sys.modules["pandas"].Series):
                obj.name = new.name

        return write

    def digest(self, obj: Any, mark: tuple[list[Any], list[Any], Any]) -> Any:
        axes, columns, names = mark
        plain = [[str(type(each)) for each in values] if type(values) is list else values for _, values in columns]
        return [[len(axis) for axis in axes], [kind for kind, _ in columns], zlib.crc32(repr((plain, names)).encode())]


class _Column(Kind):
    """Arrays of pandas, such as those with missing values."""

    cost = 100
    is_data = True

    def mark(self, obj: Any) -> Any:
        return _digest_of_column(sys.modules["pandas"].Series(obj, copy=False))

    def change(self, obj: Any, mark: Any) -> tuple[Any] | None:
        return None if _is_same_column(self.mark(obj), mark) else (obj.copy(),)

    def writing(self, obj: Any, change: tuple[Any]) -> Write:
        (new,) = change
        if len(new) != len(obj):
            raise CannotWrite("it has another length here")

        def write() -> None:
            obj[:] = new

        return write


class _Stateful(Kind):
    """Random generators, by the state that they return and accept."""

    is_data = True

    def __init__(self, read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> None:
        self._read = read
        self._write = write

    def mark(self, obj: Any) -> bytes:
        return pickle.dumps(self._read(obj))

    def change(self, obj: Any, mark: bytes) -> tuple[Any] | None:
        return None if self.mark(obj) == mark else (self._read(obj),)

    def writing(self, obj: Any, change: tuple[Any]) -> Write:
        return lambda: self._write(obj, change[0])

    def digest(self, obj: Any, mark: bytes) -> Any:
        text = io.BytesIO()
        pickler = pickle.Pickler(text)
        pickler.fast = True  # else it depends on which equal texts in the state are one object
        pickler.dump(pickle.loads(mark))
        return zlib.crc32(text.getvalue())


def _bytes_of_generator(generator: Any) -> bytes:
    data: bytes = generator.get_state().numpy().tobytes()
    return data


def _set_bytes_of_generator(generator: Any, state: bytes) -> None:
    torch: Any = sys.modules["torch"]
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _bytes_of_storage(storage: Any) -> bytes:
    torch: Any = sys.modules["torch"]
    data: bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().numpy().tobytes()
    return data


def _set_bytes_of_storage(storage: Any, state: bytes) -> None:
    torch: Any = sys.modules["torch"]
    there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    there.copy_(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _state_of_bits(generator: Any) -> Any:
    return generator.bit_generator.state


def _set_state_of_bits(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


# --- tensors --------------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """The state of a tensor at one time.

    Args:
        memory: The address of its values; on the host alone, an equal address means the same values.
        version: Number of torch's writes.
        digest: The digest of its values; None if they have no plain memory.
        gradient: The gradient, and its version.
    """

    layout: tuple[Any, ...]
    wants_gradient: bool
    memory: int
    version: int
    digest: int | None
    gradient: tuple[Any, int] | None = None

    @classmethod
    def of(cls, tensor: Any) -> _Seen:
        layout, wants_gradient = _layout(tensor), tensor.requires_grad
        if _is_lazy(tensor):
            return cls(layout, wants_gradient, 0, 0, None)
        version = 0 if tensor.is_inference() else tensor._version
        gradient = tensor.grad if tensor.is_leaf else None
        seen = None if gradient is None else (weakref.ref(gradient), gradient._version)
        if not has_plain_memory(tensor):
            return cls(layout, wants_gradient, 0, version, None, seen)
        values = tensor.detach()
        return cls(layout, wants_gradient, values.data_ptr(), version, _digest_of_tensor(values), seen)

    def differs(self, before: _Seen) -> bool:
        if (self.layout, self.wants_gradient, self.digest) != (before.layout, before.wants_gradient, before.digest):
            return True
        is_whole = self.digest is not None and self.nbytes <= _SAMPLED
        return not is_whole and self.memory == before.memory and self.version != before.version

    @property
    def nbytes(self) -> int:
        _, dtype, shape = self.layout
        return int(math.prod(shape) * dtype.itemsize)


def _is_same_gradient(now: tuple[Any, int] | None, before: tuple[Any, int] | None) -> bool:
    if now is None or before is None:
        return now is before
    return now[0]() is before[0]() and now[1] == before[1]


def _tensor_types(torch: Any) -> tuple[type, ...]:
    """Return the classes of tensors whose state is known; other classes keep theirs in unknown places."""
    lazy = torch.nn.parameter
    return torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, lazy.UninitializedParameter, lazy.UninitializedBuffer


def _layout(tensor: Any) -> tuple[Any, ...]:
    return type(tensor), None if _is_lazy(tensor) else tensor.dtype, () if _is_lazy(tensor) else tuple(tensor.shape)


def _is_lazy(tensor: Any) -> bool:
    torch: Any = sys.modules["torch"]
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)


def has_plain_memory(tensor: Any) -> bool:
    """Return whether its values are in memory that an address, a shape and strides describe."""
    torch: Any = sys.modules["torch"]
    return (
        not _is_lazy(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
    )


def is_as_it_lies(tensor: Any) -> bool:
    """Return whether its values are those in its memory: in conjugate and negative views a bit changes them."""
    return has_plain_memory(tensor) and not tensor.is_conj() and not tensor.is_neg()


def _overlaps(tensor: Any) -> bool:
    """Return whether elements of it share memory, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


# --- checksums ------------------------------------------------------------------------------------------------------


def _digest_of_tensor(values: Any) -> int:
    torch: Any = sys.modules["torch"]
    if not values.numel():
        return 0
    flat = values.resolve_conj().resolve_neg().contiguous().reshape(-1)
    flat = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    if flat.device.type == "cpu" or flat.numel() <= _WHOLE:
        return _digest_of_bytes(flat.cpu().numpy())
    return _digest_of_blocks(flat, lambda words, axis: words.view(torch.int64).view(-1, _BLOCK).sum(axis).cpu().numpy())


def _digest_of_array(array: Any) -> int:
    np: Any = sys.modules["numpy"]
    if not array.size:
        return 0
    flat = array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)  # copies what is neither
    return _digest_of_bytes(np.ascontiguousarray(flat).view("uint8"))


def _digest_of_column(column: Any) -> tuple[str, Any]:
    """Return the type of a column of a table, and a number for its memory, or pandas' hash; for objects the objects."""
    values = getattr(column.array, "_ndarray", None)
    if values is None:
        hashes = sys.modules["pandas"].util.hash_pandas_object(column, index=False)
        return str(column.dtype), zlib.crc32(hashes.values)
    return str(column.dtype), values.tolist() if values.dtype.hasobject else _digest_of_array(values)


def _is_same_column(now: tuple[str, Any], before: tuple[str, Any]) -> bool:
    if type(now[1]) is list is type(before[1]):
        return len(now[1]) == len(before[1]) and not any(map(operator.is_not, now[1], before[1]))
    return now == before


def _digest_of_bytes(flat: Any) -> int:
    """Return a number that changes with `flat`, a NumPy array of bytes."""
    if len(flat) <= _WHOLE:
        return zlib.crc32(flat)
    return _digest_of_blocks(flat, lambda words, axis: words.view("int64").reshape(-1, _BLOCK).sum(axis))


def _digest_of_blocks(flat: Any, sums: Callable[[Any, int], Any]) -> int:
    """Return a number for sums in and across blocks of `flat`, a NumPy array or tensor of bytes, and for the rest."""
    size = 8 * _BLOCK
    end = len(flat) // size * size
    blocks, rest = flat[:end], flat[end:]
    if end > _SAMPLED:
        blocks = blocks.reshape(-1, size)[:: -(-end // _SAMPLED)].reshape(-1)
    digest = zlib.crc32(sums(blocks, 0), zlib.crc32(sums(blocks, 1)))
    return zlib.crc32(rest.cpu().numpy() if hasattr(rest, "cpu") else rest, digest)


_TENSOR, _TENSOR_OF_A_CLASS, _TABLE, _COLUMN = _Tensor(), _TensorOfAClass(), _Table(), _Column()
ARRAY, ARRAY_OF_A_CLASS = _Array(), _ArrayOfAClass()
