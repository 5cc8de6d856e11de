"""Estimate the bytes that would be sent with a value, without pickling it. Runs in the kernel and in ranks.

It is an estimate for decisions and warnings, not exact: storages count whole and once, as they are sent; long
containers are sampled; code counts nothing.

It ends on every object, and runs no code of the user's. Containers are read by the methods of the builtin types, other
objects by what they hold in memory (`gc.get_referents`, which asks C alone). Results that an object makes on request
are not read: properties, ``__getattr__``, ``items`` or ``__len__`` of the user's, ``flat`` of a numpy scalar. The type
is the true one, too: a proxy's ``__class__`` is a property like any other.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import sys
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from nbaccel.namespace.kind import PLAIN

__all__ = [
    "bytes_by_sharing",
    "met_in",
    "size_of",
    "sizes_of",
    "sizes_on_devices",
]

_PASSES = ((1000, 0.7), (30, 0.9), (3, 1.0))
"""Elements of a container that are read, and the fraction of the time that is over then.

The rest of a longer container is assumed to be alike. A value of too many objects is estimated again with a smaller
sample: lists of a thousand lists of a thousand lists take 30 ** 3 objects. The part that the last pass does not reach
is assumed to be as large as the part that it read. Storages are never multiplied, so those that are not read do not
count.
"""

_MOST_OBJECTS = 200_000
"""Objects read in one pass; a transformers Trainer has 4,000 of them."""

_MOST_SECONDS = 0.3
"""Time limit for one value. The kernel waits meanwhile, and a launch may read the notebook three times."""

_MOST_SECONDS_OF_SEVERAL = 1.0

_CLOSED = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, types.TracebackType),
    *(property, classmethod, staticmethod, types.GetSetDescriptorType, types.MemberDescriptorType),
    logging.Logger,  # knows all others, and is sent as its name
)
"""Objects that lead to the rest of the process, or to nothing."""

_PLAIN = (str, bytes, bytearray, int, float, complex)
_CONTAINERS = (list, tuple, set, frozenset, deque)

_SPARSE_PARTS = {
    "sparse_coo": ("_indices", "_values"),
    **dict.fromkeys(["sparse_csr", "sparse_bsr"], ("crow_indices", "col_indices", "values")),
    **dict.fromkeys(["sparse_csc", "sparse_bsc"], ("ccol_indices", "row_indices", "values")),
}
"""The parts of a tensor of such a layout."""


def size_of(value: Any) -> int:
    """Return the bytes that would be sent with `value`, roughly.

    Example:
        >>> size_of(b"x" * 1000) >= 1000
        True
    """
    return value.__sizeof__() if type(value) in PLAIN else round(_weighed(value, _MOST_SECONDS))


def sizes_of(values: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes that would be sent with each of `values` alone, roughly.

    Together they take a second at most: each may take half of what is left of it.

    Example:
        >>> sizes_of({"rows": [b"x" * 1000] * 2, "none": None})["rows"] >= 1000
        True
    """
    end = time.monotonic() + _MOST_SECONDS_OF_SEVERAL
    return {
        name: round(_weighed(value, min(_MOST_SECONDS, (end - time.monotonic()) / 2))) for name, value in values.items()
    }


def sizes_on_devices(values: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Return the bytes by name for each device that is not the host; objects of several names count for the first.

    Nothing is sampled. Names that are not reached within 0.3 s are left out.

    Example:
        >>> sizes_on_devices({"x": b"on the host"})
        {}
    """
    scale = _Scale(time.monotonic() + _MOST_SECONDS, sample=_MOST_OBJECTS)
    sizes: dict[str, Counter[str]] = {}
    for name, value in values.items():
        scale.on_devices.clear()
        scale.measure(value)
        for device, nbytes in scale.on_devices.items():
            sizes.setdefault(device, Counter())[name] += nbytes
    return sizes


def bytes_by_sharing(value: Any) -> tuple[int, int]:
    """Return the bytes of `value` that all ranks share when it is sent to them, and those that each gets for itself.

    Memory of tensors and arrays is mapped, and each process copies a page when it writes to it; other objects are built
    in every process.

    Example:
        >>> bytes_by_sharing(b"x" * 1000)[0], bytes_by_sharing(b"x" * 1000)[1] >= 1000
        (0, True)
    """
    weight, nbytes = _weight(value, _MOST_SECONDS)
    shared = min(nbytes, weight.memory_bytes)
    return round(shared), round(nbytes - shared)


def met_in(values: Mapping[str, Any], kinds: type | tuple[type, ...]) -> dict[str, list[Any]]:
    """Return the objects of `kinds` to which each of `values` leads, in the order in which they are met.

    An object of several names is returned for the first. Classes of the notebook are read with their attributes, which
    are sent with them. Nothing is sampled, and what is not reached within 0.3 s is left out.

    Example:
        >>> met_in({"x": [1, {"y": "text"}], "z": None}, dict)
        {'x': [{'y': 'text'}]}
    """
    scale = _Scale(time.monotonic() + _MOST_SECONDS, sample=_MOST_OBJECTS, reads_classes=True)
    found: dict[str, list[Any]] = {}
    for name, value in values.items():
        met = [obj for obj in scale.newly_met(value) if issubclass(type(obj), kinds)]
        if met:
            found[name] = met
    return found


def _weighed(value: Any, seconds: float) -> float:
    """Return the bytes of `value` by the largest sample for which the time is enough."""
    return _weight(value, seconds)[1]


def _weight(value: Any, seconds: float) -> tuple[_Weight, float]:
    """Return the last weight of `value`, and its bytes by the best of all passes."""
    began, least = time.monotonic(), 0.0
    for sample, share in _PASSES:
        weight = _Scale(began + share * seconds, sample).measure(value)
        least = max(least, weight.met_bytes)
        if weight.is_whole:
            break
    return weight, max(weight.nbytes, least)


class _Weight(NamedTuple):
    """Bytes of a value: of the objects that were read, and with an estimate of the rest.

    Args:
        memory_bytes: Those of them that are memory of tensors and arrays.
        is_whole: There is no rest, except for what the sample leaves out.
    """

    met_bytes: float
    nbytes: float
    memory_bytes: float
    is_whole: bool


class _Scale:
    """Adds up the bytes of objects, each memory and each object once.

    Args:
        until: The time to stop, in `time.monotonic()`.
        sample: Elements of a container that are read.
        reads_classes: The attributes of the notebook's classes belong to what leads to the class.

    Attributes:
        on_devices: Bytes by device that is not the host, of objects added since it was cleared.
    """

    def __init__(self, until: float, sample: int, reads_classes: bool = False) -> None:
        self.on_devices: Counter[str] = Counter()
        self._reads_classes = reads_classes
        self._until = until
        self._sample = sample
        self._seen: dict[int, Any] = {}  # keeps what it has seen, so that no other object gets its id
        self._memory: set[tuple[str, int]] = set()
        self._ways: dict[int, _Way] = {}  # by the id of the type: a metaclass may have a hash of its own

    def newly_met(self, value: Any) -> Iterable[Any]:
        """Measure `value`, and return the objects that were not measured before."""
        before = len(self._seen)
        self.measure(value)
        return islice(self._seen.values(), before, None)

    def measure(self, value: Any) -> _Weight:
        """Return the bytes of `value` and its parts; `share` is the number of elements a sampled one stands for."""
        memory = own = met = 0.0
        todo = [(value, 1.0)]
        most = len(self._seen) + _MOST_OBJECTS
        while todo and len(self._seen) < most and (time.monotonic() < self._until or not self._seen):
            obj, share = todo.pop()
            if id(obj) in self._seen:
                continue
            self._seen[id(obj)] = obj
            kind = type(obj)
            way = self._ways.get(id(kind)) or self._ways.setdefault(id(kind), self._way_into(kind))
            try:
                anatomy = way(obj)
                parts = list(islice(anatomy.parts, self._sample))
            except Exception:  # a foreign class of tensors, or a container that another thread has changed meanwhile
                continue
            met += share
            own += share * anatomy.nbytes
            if anatomy.memory is not None:
                memory += self._measure_memory(*anatomy.memory)
            if parts:
                share *= anatomy.holds / len(parts)
                todo.extend((part, share) for part in parts)
        rest = sum(share for _, share in todo)
        return _Weight(memory + own, memory + own * (1 + rest / max(1.0, met)), memory, is_whole=not todo)

    def _way_into(self, kind: type) -> _Way:
        return _class if self._reads_classes and issubclass(kind, type) else _way_into(kind)

    def _measure_memory(self, device: str, address: int, nbytes: int) -> int:
        if (device, address) in self._memory:
            return 0
        self._memory.add((device, address))
        if device != "cpu":
            self.on_devices[device] += nbytes
        return nbytes


class _Anatomy(NamedTuple):
    """The composition of an object.

    Args:
        nbytes: The size in bytes of the object itself.
        holds: Number of parts.
        parts: These objects; iterating makes no new ones.
        memory: Device, address and bytes of the storage behind a tensor or an array.
    """

    nbytes: int = 0
    holds: int = 0
    parts: Iterable[Any] = ()
    memory: tuple[str, int, int] | None = None


_Way = Callable[[Any], _Anatomy]


def _way_into(kind: type) -> _Way:
    """Return the function that reads objects of exactly this type.

    `issubclass` of these classes runs no code of the user's.
    """
    torch, np = sys.modules.get("torch"), sys.modules.get("numpy")
    if issubclass(kind, _CLOSED):
        return lambda obj: _Anatomy()
    if torch is not None and issubclass(kind, torch.Tensor):
        return _tensor
    if torch is not None and issubclass(kind, torch.UntypedStorage):
        return _storage
    if np is not None and issubclass(kind, np.ndarray):
        return _array
    if issubclass(kind, _PLAIN) or (np is not None and issubclass(kind, np.generic)):
        return functools.partial(_leaf, _size_in_memory(kind))
    if issubclass(kind, types.FunctionType):
        return _function
    if _is_of_sharding(kind):
        return lambda obj: _Anatomy()
    if issubclass(kind, dict):
        return functools.partial(_mapping, is_exact=kind is dict)
    for base in _CONTAINERS:
        if issubclass(kind, base):
            return functools.partial(_container, base, is_exact=kind is base)
    return functools.partial(_object, _size_in_memory(kind))


def _class(kind: Any) -> _Anatomy:
    """Read the attributes of a class that the notebook has defined: it is sent with them, another one by its name."""
    if type.__dict__["__module__"].__get__(kind) != "__main__":
        return _Anatomy()
    parts = list(type.__dict__["__dict__"].__get__(kind).values())
    return _Anatomy(0, len(parts), parts)


def _is_of_sharding(kind: type) -> bool:
    """Return whether it is a class of FSDP's own: its objects, on which hooks in a sharded model lead, stay behind."""
    torch = sys.modules.get("torch")
    is_of_fsdp = str(type.__dict__["__module__"].__get__(kind)).startswith("torch.distributed.fsdp.")
    return is_of_fsdp and torch is not None and not issubclass(kind, torch.nn.Module)


def _size_in_memory(kind: type) -> Callable[[Any], int]:
    """Return the ``__sizeof__`` of a type that is written in C, such as arrow's tables; else that of every object."""
    method = inspect.getattr_static(kind, "__sizeof__", None)
    is_c = isinstance(method, types.MethodDescriptorType | types.WrapperDescriptorType)
    sizeof: Callable[[Any], int] = method if is_c else object.__sizeof__
    return sizeof


def _leaf(sizeof: Callable[[Any], int], obj: Any) -> _Anatomy:
    return _Anatomy(sizeof(obj))


def _object(sizeof: Callable[[Any], int], obj: Any) -> _Anatomy:
    parts = gc.get_referents(obj)
    return _Anatomy(sizeof(obj), len(parts), parts)


def _mapping(obj: Any, is_exact: bool) -> _Anatomy:
    count, parts = 2 * dict.__len__(obj), chain.from_iterable(dict.items(obj))
    return _Anatomy(0, count, parts) if is_exact else _and_attributes(obj, 0, count, parts)


def _container(base: Any, obj: Any, is_exact: bool) -> _Anatomy:
    count, parts = base.__len__(obj), base.__iter__(obj)
    return _Anatomy(8 * count, count, parts) if is_exact else _and_attributes(obj, 8 * count, count, parts)


def _and_attributes(obj: Any, nbytes: int, count: int, parts: Iterable[Any]) -> _Anatomy:
    """Read an object of a class derived from a container's, with attributes; those of a long one are left out."""
    if count > _PASSES[0][0] // 2:
        return _Anatomy(nbytes, count, parts)
    referents = gc.get_referents(obj)  # the elements are among them: what was met already is passed over
    return _Anatomy(nbytes, count + len(referents), chain(parts, referents))


def _function(function: Any) -> _Anatomy:
    """Read the variables that a function has closed over, and its defaults. Its globals are shared by others."""
    closure = [part for cell in function.__closure__ or () for part in gc.get_referents(cell)]
    parts = [*closure, function.__defaults__, function.__kwdefaults__]
    return _Anatomy(0, len(parts), parts)


def _array(array: Any) -> _Anatomy:
    """Read an array; its objects only if its elements are the objects themselves, not those of a structured one."""
    np = sys.modules["numpy"]
    read = functools.partial(_attribute, np.ndarray)  # classes derived from it may answer in any way
    dtype = read(array, "dtype")
    if dtype.hasobject:
        parts = read(array, "flat") if dtype.kind == "O" else ()
        return _Anatomy(int(read(array, "nbytes")), int(read(array, "size")), parts)
    while isinstance(base := read(array, "base"), np.ndarray):
        array = base
    is_file = issubclass(type(array), np.memmap)  # only its name travels
    address = read(array, "__array_interface__")["data"][0]
    return _Anatomy(memory=("cpu", address, 0 if is_file else int(read(array, "nbytes"))))


def _tensor(tensor: Any) -> _Anatomy:
    torch = sys.modules["torch"]
    if inside := _tensors_inside(tensor, torch):
        return _Anatomy(0, len(inside), inside)
    with torch._C.DisableTorchFunctionSubclass():  # classes derived from it may answer in any way
        device = str(tensor.device)
        try:
            return _Anatomy(memory=_memory_of(torch.Tensor.untyped_storage(tensor), device, id(tensor)))
        except (NotImplementedError, RuntimeError):  # sparse, or a class without memory of its own
            parts = _SPARSE_PARTS.get(str(tensor.layout).removeprefix("torch."), ())
            held = [getattr(torch.Tensor, name)(tensor) for name in parts] or [tensor]
            return _Anatomy(memory=(device, id(tensor), sum(part.element_size() * part.numel() for part in held)))


def _tensors_inside(tensor: Any, torch: Any) -> list[Any]:
    """Return the tensors of which a tensor of another package's class consists, as quantised ones do.

    Its own storage has no memory, and the bytes of the type that it stands for. Classes of torch are not asked: of a
    sharded tensor the rows of this process would be counted as the whole.
    """
    kind = type(tensor)
    if not hasattr(kind, "__tensor_flatten__") or kind.__module__.partition(".")[0] == "torch":
        return []
    return [part for part in list(vars(tensor).values()) if issubclass(type(part), torch.Tensor)]


def _storage(storage: Any) -> _Anatomy:
    return _Anatomy(memory=_memory_of(storage, str(storage.device), id(storage)))


def _memory_of(storage: Any, device: str, otherwise: int) -> tuple[str, int, int]:
    """Return the memory of a storage.

    Args:
        otherwise: Replaces the address of a storage that has none.
    """
    nbytes = 0 if device == "meta" else storage.nbytes()  # of a tensor on "meta" only the shape travels
    return device, storage.data_ptr() or otherwise, nbytes


def _attribute(kind: type, obj: Any, name: str) -> Any:
    """Return an attribute of `obj` as `kind`, a base class of its own, defines it."""
    return vars(kind)[name].__get__(obj)
