"""Parcel: Python objects on their way to another process, in one memfd. Runs in the kernel and in ranks.

All names travel in one pickle, so what was shared stays shared. Memory of tensors and arrays lies beside the pickle,
page aligned, one block per storage: the receiver maps it copy-on-write instead of reading it, so n ranks hold one
copy and none sees another's writes. A view brings the whole storage that it looks at along, as ``torch.save`` does.
Tensors of any device arrive on the CPU, and without their gradients, which ``torch.save`` leaves behind as well. It
opens no connection: whoever wants to send hands over the file descriptor.
"""

from __future__ import annotations

import functools
import mmap
import os
import pickle
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from nbaccel.errors import CannotSend
from nbaccel.launch.refusal import Refused, reason, refuse_what_lives_here
from nbaccel.launch.weight import size_of

__all__ = ["Parcel", "pack", "pack_what_can_travel", "size_of", "unpack"]

_PAGE = mmap.PAGESIZE
_CACHE_LINE = 64

_COPIED_BELOW = 64 * 1024
"""Bytes. A mapped view keeps the memory of the whole parcel alive, so smaller blocks are copied out instead."""

_FOOTER = struct.Struct("<8sQ")
_MAGIC = b"nbparcel"


@dataclass(frozen=True, slots=True)
class Parcel:
    """A packed parcel. Whoever packed it closes `fd`; mappings of it outlive that.

    fd: the memfd.  nbytes: its length.
    """

    fd: int
    nbytes: int


def pack(
    values: dict[str, Any],
    *,
    anchors: Mapping[int, str] | None = None,
    namespace: dict[str, Any] | None = None,
) -> Parcel:
    """All of `values` in one parcel.

    anchors: ``id(object)`` to name, for classes and functions that the other side has already; only the name travels.
    namespace: the globals of notebook functions; over there they become the namespace given to `unpack`.

    Raises:
        CannotSend: if a value cannot travel; `names` has every such name with the reason.

    >>> parcel = pack({"x": 1, "y": [2, 3]})
    >>> unpack(parcel.fd)
    {'x': 1, 'y': [2, 3]}
    >>> os.close(parcel.fd)
    """
    try:
        return _write(values, anchors or {}, namespace)
    except Exception as error:
        refused = _culprits(values, anchors or {}, namespace) or {", ".join(values): reason(error, "", values)}
        lines = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
        raise CannotSend(
            f"{len(refused)} of {len(values)} names cannot be sent to another process:{lines}\n"
            "  Make such objects in the cell that uses them, or send the data they were made from.",
            refused,
        ) from error


def pack_what_can_travel(
    values: dict[str, Any],
    *,
    anchors: Mapping[int, str] | None = None,
    namespace: dict[str, Any] | None = None,
) -> tuple[Parcel, dict[str, str]]:
    """The parcel of every value that can travel, and the names that cannot, each with the reason."""
    try:
        return _write(values, anchors or {}, namespace), {}
    except Exception:
        refused = _culprits(values, anchors or {}, namespace)
    rest = {name: value for name, value in values.items() if name not in refused}
    return pack(rest, anchors=anchors, namespace=namespace), refused


def unpack(
    fd: int,
    *,
    namespace: dict[str, Any] | None = None,
    anchored: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """The values of the parcel behind `fd`, which stays open and is the caller's to close.

    namespace: becomes ``__globals__`` of the functions that were packed with one. Globals they refer to are added to
        it; a name that it has already keeps its value.
    anchored: finds an object of this process by the name it was anchored under.
    """
    contents = _Contents(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY), namespace, anchored)
    values: dict[str, Any] = _Unpickler(contents).load()
    return values


def _culprits(values: dict[str, Any], anchors: Mapping[int, str], namespace: dict[str, Any] | None) -> dict[str, str]:
    """The names whose values cannot be pickled even alone, each with the reason. Writes nothing, copies no buffer."""
    refused = {}
    for name, value in values.items():
        try:
            _Packer(_Nowhere(), anchors, namespace).dump(value)
        except Exception as error:
            refused[name] = reason(error, name, {**(namespace or {}), **values})
    return refused


# Packing ------------------------------------------------------------------------------------------------------------


def _write(values: dict[str, Any], anchors: Mapping[int, str], namespace: dict[str, Any] | None) -> Parcel:
    """Pickle first, then the blocks, then the table that finds them, then where the table is."""
    fd = os.memfd_create("nbaccel-parcel", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            packer = _Packer(file, anchors, namespace)
            packer.dump(values)
            end = file.tell()
        places = []
        for block in packer.blocks:
            with block() as source:
                offset = _aligned(end, source.nbytes)
                _write_all(fd, source, offset)
                end = offset + source.nbytes
            places.append((offset, end - offset))
        table = pickle.dumps((places, packer.buffers))
        _write_all(fd, memoryview(table + _FOOTER.pack(_MAGIC, end)), end)
        return Parcel(fd, end + len(table) + _FOOTER.size)
    except BaseException:
        os.close(fd)
        raise


def _aligned(offset: int, nbytes: int) -> int:
    unit = _PAGE if nbytes >= _PAGE else _CACHE_LINE
    return -(-offset // unit) * unit


def _write_all(fd: int, source: memoryview, offset: int) -> None:
    done = 0
    while done < source.nbytes:
        done += os.pwrite(fd, source[done:], offset + done)


class _Nowhere:
    """A file for a trial: takes everything, keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle publishes no types
    """Writes objects to `file`, and collects the memory that has to follow them.

    blocks: each returns its bytes when its turn to be written comes, so a device tensor is copied to the host late.
    buffers: which blocks are the out-of-band buffers of the pickle protocol, in its order.
    """

    def __init__(self, file: Any, anchors: Mapping[int, str], namespace: dict[str, Any] | None) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._add_buffer)
        self.blocks: list[Callable[[], memoryview]] = []
        self.buffers: list[int] = []
        self._index: dict[tuple[str, int, int], int] = {}
        self._anchors = anchors
        self._namespace = namespace
        self._namespace_there = _NamespaceThere()
        if namespace is not None:
            # cloudpickle looks here for the globals that a function will have on the other side.
            self.globals_ref[id(namespace)] = self._namespace_there

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self._anchors:
            return _there, ("anchor", self._anchors[id(obj)])
        if obj is self._namespace_there:
            return _there, ("globals",)
        if reduced := _reduce_standard(obj) or self._reduce_array(obj) or self._reduce_tensor(obj):
            return reduced
        refuse_what_lives_here(obj)
        reduced = super().reducer_override(obj)
        if isinstance(obj, types.FunctionType) and reduced is not NotImplemented and self._is_of_namespace(obj):
            make, args, state, items, pairs, set_state = reduced
            return make, args, (set_state, state), items, pairs, _set_function_state
        return reduced

    def _is_of_namespace(self, function: types.FunctionType) -> bool:
        return self._namespace is not None and function.__globals__ is self._namespace

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.buffers.append(len(self.blocks))
        self.blocks.append(buffer.raw)

    def _block(self, device: str, address: int, nbytes: int, read: Callable[[], memoryview]) -> int:
        """The number of the block with this memory; `read` keeps the memory alive, so an address names one block."""
        key = (device, address, nbytes)
        if key not in self._index:
            self._index[key] = len(self.blocks)
            self.blocks.append(read)
        return self._index[key]

    def _reduce_array(self, obj: Any) -> Any:
        np = sys.modules.get("numpy")
        if np is None:
            return None
        if type(obj) is np.memmap and isinstance(obj.base, mmap.mmap) and obj.filename is not None:
            return _map_file, (obj.filename, obj.dtype, obj.mode, obj.offset, obj.shape, obj.flags.f_contiguous)
        if type(obj) is not np.ndarray or obj.dtype.hasobject or obj.size == 0:
            return None
        root = obj
        while isinstance(root.base, np.ndarray):
            root = root.base
        if type(root) is not np.ndarray or not root.flags.forc or root.dtype.hasobject:
            return None
        address = root.__array_interface__["data"][0]
        offset = obj.__array_interface__["data"][0] - address
        index = self._block("cpu", address, root.nbytes, functools.partial(_array_bytes, root))
        return _there, ("array", index, offset, obj.shape, obj.strides, obj.dtype, obj.flags.writeable)

    def _reduce_tensor(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return None
        if not obj.is_leaf:
            raise Refused("part of an autograd graph; send x.detach()", obj)
        if (
            obj.layout is not torch.strided
            or obj.device.type == "meta"
            or obj.is_quantized
            or obj.is_conj()
            or obj.is_neg()
        ):
            return None
        storage = obj.untyped_storage()
        address = storage.data_ptr() or id(storage)  # storages without memory are not one storage
        index = self._block(str(obj.device), address, storage.nbytes(), functools.partial(_storage_bytes, storage))
        layout = (obj.storage_offset(), tuple(obj.size()), obj.stride())
        return _there, ("tensor", type(obj), index, obj.dtype, layout, obj.requires_grad, vars(obj))


def _array_bytes(array: Any) -> memoryview:
    flat = array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)
    return memoryview(flat.view("uint8")).cast("B")


def _map_file(filename: Any, dtype: Any, mode: str, offset: int, shape: tuple[int, ...], is_fortran: bool) -> Any:
    """A memory map is the file, so only its name travels; "w+" would empty the file once more."""
    import numpy as np

    order: Any = "F" if is_fortran else "C"
    return np.memmap(filename, dtype, "r+" if mode == "w+" else mode, offset, shape, order)  # type: ignore[call-overload]


def _storage_bytes(storage: Any) -> memoryview:
    import torch

    host = storage if storage.device.type == "cpu" else storage.cpu()
    flat: Any = torch.empty(0, dtype=torch.uint8).set_(host).numpy()
    return memoryview(flat)


def _reduce_standard(obj: Any) -> Any:
    """Things of the standard library that cloudpickle would refuse, or copy where they should be found."""
    if type(obj) is functools.cached_property:  # holds a lock before Python 3.12
        return _cached_property, (obj.func, obj.attrname)
    for name in ("stdin", "stdout", "stderr"):
        if obj is getattr(sys, name):
            return getattr, (sys, name)
    return None


def _cached_property(function: Any, name: str) -> Any:
    made = functools.cached_property(function)
    made.__set_name__(type(made), name)
    return made


class _NamespaceThere:
    """Stands for the namespace that the receiver gives to `unpack`."""


def _there(what: str, *args: Any) -> Any:
    """Stands in a parcel for a call of `_Contents` on the other side; ``_there("array", …)`` for its method `array`."""
    raise pickle.UnpicklingError("this pickle is the inside of a parcel; open it with nbaccel.launch.parcel.unpack")


def _set_function_state(function: types.FunctionType, wrapped: tuple[Callable[[Any, Any], None], Any]) -> None:
    """Complete a notebook function as cloudpickle does; names that its new namespace has already are left alone."""
    set_state, (attributes, slots) = wrapped
    namespace = function.__globals__
    before = {name: namespace[name] for name in ("__builtins__", *slots["__globals__"]) if name in namespace}
    set_state(function, (attributes, slots))
    namespace.update(before)


# Unpacking ----------------------------------------------------------------------------------------------------------


class _Contents:
    """What lies in one parcel, and the methods that the pickle in it calls by `_there`.

    Nothing here refers to the unpickler: with a cycle the memory would stay until the collector comes.
    """

    def __init__(
        self, mapping: mmap.mmap, namespace: dict[str, Any] | None, anchored: Callable[[str], Any] | None
    ) -> None:
        magic, table = _FOOTER.unpack_from(mapping, len(mapping) - _FOOTER.size)
        if magic != _MAGIC:
            raise ValueError("this file descriptor does not hold a parcel")
        self.mapping = mapping
        self._places, self._buffers = pickle.loads(memoryview(mapping)[table:])
        self._blocks: dict[int, memoryview | bytearray] = {}
        self._storages: dict[int, Any] = {}
        self._namespace = {"__name__": "__main__"} if namespace is None else namespace
        self._anchored = anchored

    def call(self, what: str, *args: Any) -> Any:
        return getattr(self, what)(*args)

    def buffers(self) -> Iterator[memoryview | bytearray]:
        """The out-of-band buffers of the pickle protocol, in its order."""
        for index in self._buffers:
            yield self._block(index)

    def anchor(self, name: str) -> Any:
        if self._anchored is None:
            raise ValueError(f"the parcel refers to {name!r} of this process; give unpack a way to find it: anchored=…")
        return self._anchored(name)

    def globals(self) -> dict[str, Any]:
        return self._namespace

    def array(
        self, index: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, is_writeable: bool
    ) -> Any:
        import numpy as np

        array: Any = np.ndarray(shape, dtype, self._block(index), offset, strides)
        array.flags.writeable = is_writeable
        return array

    def tensor(
        self,
        kind: Any,
        index: int,
        dtype: Any,
        layout: tuple[int, tuple[int, ...], tuple[int, ...]],
        requires_grad: bool,
        attributes: dict[str, Any],
    ) -> Any:
        import torch

        if index not in self._storages:
            block = self._block(index)
            self._storages[index] = (
                torch.frombuffer(block, dtype=torch.uint8).untyped_storage() if len(block) else torch.UntypedStorage(0)
            )
        tensor = torch.empty(0, dtype=dtype).set_(self._storages[index], *layout)
        if kind is torch.nn.Parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad)
        else:
            tensor.requires_grad_(requires_grad)
        vars(tensor).update(attributes)
        return tensor

    def _block(self, index: int) -> memoryview | bytearray:
        if index not in self._blocks:
            offset, nbytes = self._places[index]
            memory = memoryview(self.mapping)[offset : offset + nbytes]
            self._blocks[index] = bytearray(memory) if nbytes < _COPIED_BELOW else memory
        return self._blocks[index]


class _Unpickler(pickle.Unpickler):
    """Reads the objects of `contents` straight from the mapping."""

    def __init__(self, contents: _Contents) -> None:
        super().__init__(contents.mapping, buffers=contents.buffers())
        self._contents = contents

    def find_class(self, module: str, name: str) -> Any:
        return (
            self._contents.call if (module, name) == (__name__, _there.__name__) else super().find_class(module, name)
        )
