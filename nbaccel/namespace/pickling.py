"""Pickling: turns the objects of a payload into one pickle and blocks of memory, and back into objects.

Runs in the kernel and in ranks; used by `payload` alone, which arranges pickle and blocks in a file. The packer is
cloudpickle with special treatment of tensors, arrays, functions of the notebook and objects that the other side has
already; that of prepared objects and of libraries is in `reductions`.
"""

from __future__ import annotations

import functools
import mmap
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import cloudpickle

from nbaccel.namespace.arrays import Values, is_as_it_lies
from nbaccel.namespace.event_files import reduce_writer
from nbaccel.namespace.kind import PLAIN
from nbaccel.namespace.reductions import (
    attributes_of_tensor,
    globals_of_module,
    module_of_maker,
    reduce_of_a_library,
    reduce_to_what_was_written,
    with_slots,
)
from nbaccel.namespace.sharded_tensors import Piece, ShardedTensors, is_sharded
from nbaccel.namespace.tensor_devices import InFile, device_here, device_there, in_file, storage_on
from nbaccel.namespace.unpicklable import (
    Absent,
    CannotJoin,
    Refused,
    depth_bounded,
    refuse_quantised_weights,
    refuse_to_send_nothing,
    refuse_what_knows_the_ranks,
    refuse_what_lives_here,
    what_it_is,
)
from nbaccel.namespace.wrappers import is_lightnings_trainer, itself, plain

__all__ = [
    "Contents",
    "Joined",
    "Packer",
    "Places",
    "PlacingPacker",
    "Unpacker",
    "is_ours",
]

_COPIED_BELOW = 64 * 1024
"""Bytes below which blocks are copied: a mapped view keeps the memory of the whole payload alive."""

_COPIED_IF_LASTING = 16 * 1024 * 1024
"""The same for values that outlive most of the payload, as in a notebook."""


class Packer(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle publishes no types
    """Writes objects to `file`, and collects the memory that has to follow them.

    Args:
        as_written: Send what a cell left as the user wrote it: wrappers that training put around objects are left out,
            at any depth in a value, and a tensor of a graph is sent without the graph.
        may_lack: Names whose values are sent with a replacement (`Absent`) for each part that cannot be sent.
        sharded: The tensors of which only this rank's rows are sent; of others no part is sent.
        unneeded: Names of the notebook's that functions of it do not bring along.

    Attributes:
        blocks: Each returns its bytes when its turn to be written comes, so a device tensor is copied to the host late.
        in_file: Places of blocks that are in a file already, by index.
        buffers: Indices of blocks that are out-of-band buffers of the pickle protocol, in its order.
        lacks: Descriptions of such parts, by name.
        at: The name whose value is being packed, or was last; empty before the first.
        packages: Those whose classes, functions and modules the pickle refers to.
        rows: These rows by the key of their tensor: the index of the block, and which rows it holds.
    """

    def __init__(
        self,
        file: Any,
        by_reference: Mapping[int, str],
        namespace: dict[str, Any] | None,
        as_written: bool = False,
        may_lack: Collection[str] = (),
        sharded: ShardedTensors | None = None,
        unneeded: Collection[str] = (),
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._add_buffer)
        self._unneeded = unneeded
        self.at = ""
        self.lacks: dict[str, list[str]] = {}
        self.packages: set[str] = set()
        self._may_lack = may_lack
        self._whole: Any = None  # the value that `at` names
        self._absent: dict[int, tuple[str, Any]] = {}  # by id: objects replaced by `Absent`, and why
        self.blocks: list[Callable[[], memoryview]] = []
        self.buffers: list[int] = []
        self.in_file: dict[int, InFile] = {}
        self.rows: dict[str, tuple[int, Piece]] = {}
        self._sharded = sharded
        self._index: dict[tuple[str, int, int], int] = {}
        self._by_reference = by_reference
        self._as_written = as_written
        self._namespace = namespace
        self._namespace_there = _NamespaceThere()
        if namespace is not None:
            # cloudpickle looks here for the globals that a function will have on the other side.
            self.globals_ref[id(namespace)] = self._namespace_there

    def dump_names(self, values: Mapping[str, Any]) -> None:
        """Pack `values` as one dict, and record the name of the one being packed."""
        with depth_bounded():
            # A plain value has no parts, and nothing to refuse: a rank would copy a hundred pages to find that out.
            self.dump({name: value if type(value) in PLAIN else _Named(name, value) for name, value in values.items()})

    def add_rows(self) -> None:
        """Send this rank's rows of all sharded tensors after the pickle."""
        for key, piece, read in () if not self._sharded else self._sharded.rows():
            self.rows[key] = (len(self.blocks), piece)
            self.blocks.append(read)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is _Named:
            self.at, self._whole = obj.name, obj.value
            if id(obj.value) in self._absent:
                raise Refused(*self._absent[id(obj.value)])
            if type(obj.value) in weakref.ProxyTypes:  # inside of objects its referent is sent
                raise Refused("a weak reference cannot be sent to another process; send the object itself", obj.value)
            return itself, (obj.value,)
        if self._as_written and obj is not self._whole and is_lightnings_trainer(obj):
            self._absent[id(obj)] = "a Trainer that knows its rank", obj
            return itself, (None,)  # as before the object was given to a trainer
        if self.at not in self._may_lack or obj is self._whole:
            return self._reduced(obj)
        try:
            reduced = self._reduced(obj)
            return self._reduced_as_usual(obj) if reduced is NotImplemented else reduced
        except (RecursionError, CannotJoin):
            raise
        except Exception as error:
            why = what_it_is(error, obj)
            self.lacks.setdefault(self.at, []).append(why)
            self._absent[id(obj)] = why, obj
            return Absent, (self.at, why)

    def _reduced_as_usual(self, obj: Any) -> Any:
        """Return the usual reduction of an object that has no special treatment here."""
        if issubclass(type(obj), (type, types.FunctionType, types.BuiltinFunctionType)):
            return NotImplemented  # found by its name
        special = self.dispatch_table.get(type(obj))
        return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if special is None else special(obj)

    def _reduced(self, obj: Any) -> Any:
        if id(obj) in self._by_reference:
            return _there, ("anchor", self._by_reference[id(obj)])
        self._note_package(obj)
        if obj is self._namespace_there:
            return _there, ("globals",)
        if type(obj) is _ModuleThere:
            return globals_of_module, (obj.name,)
        refuse_quantised_weights(obj, leaves_rank=self._as_written)
        if self._as_written:
            if reduced := reduce_to_what_was_written(obj):
                refuse_to_send_nothing(reduced, obj, is_whole=obj is plain(self._whole))
                return reduced
            refuse_what_knows_the_ranks(obj)
            if is_sharded(obj):
                return self._reduce_sharded(obj)
        if reduced := reduce_of_a_library(obj) or reduce_writer(obj):
            return reduced
        if reduced := self._reduce_array(obj) or self._reduce_tensor(obj) or self._reduce_of_a_device(obj):
            return reduced
        refuse_what_lives_here(obj)
        module = module_of_maker(obj)
        if module is not None:
            self.globals_ref.setdefault(id(obj.__globals__), _ModuleThere(module))
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            return reduced
        if module is not None or self._is_of_namespace(obj):
            make, args, state, items, pairs, set_state = reduced
            if module is not None:
                state[1]["__globals__"].clear()
            for name in self._unneeded:
                state[1]["__globals__"].pop(name, None)
            return make, args, (set_state, state), items, pairs, _set_function_state
        return with_slots(obj, reduced) if issubclass(type(obj), type) else reduced

    def forget(self) -> None:
        """Release the packed objects. A pickler is part of a cycle: all would stay until the collector runs.

        An error among them holds a traceback, and that every frame with the user's objects.
        """
        self.clear_memo()
        self._sharded = None
        self._absent.clear()
        self.blocks.clear()
        self._whole = None

    def _note_package(self, obj: Any) -> None:
        kind = type(obj)
        if issubclass(kind, types.ModuleType):
            name = obj.__name__
        elif issubclass(kind, (type, types.FunctionType)):
            name = type.__dict__["__module__"].__get__(obj) if issubclass(kind, type) else obj.__module__
        else:
            return
        self.packages.add(str(name).partition(".")[0])

    def _is_of_namespace(self, obj: Any) -> bool:
        """Return whether it is a function of the notebook."""
        return issubclass(type(obj), types.FunctionType) and obj.__globals__ is self._namespace

    def _add_buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.buffers.append(len(self.blocks))
        self.blocks.append(buffer.raw)

    def _block(self, device: str, address: int, nbytes: int, read: Callable[[], memoryview]) -> int:
        """Return the number of the block with this memory; `read` keeps it alive, so an address means one block."""
        key = (device, address, nbytes)
        if key not in self._index:
            self._index[key] = len(self.blocks)
            self.blocks.append(read)
        return self._index[key]

    def _reduce_array(self, obj: Any) -> Any:
        np = sys.modules.get("numpy")
        if np is None or type(obj) is not np.ndarray or obj.dtype.hasobject or obj.size == 0:
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
            if not self._as_written:
                raise Refused("part of an autograd graph; send x.detach()", obj)
            obj = obj.detach()
        if not is_as_it_lies(obj):
            return None
        index, device = self._block_of_storage(obj.untyped_storage())
        layout = (obj.storage_offset(), tuple(obj.size()), obj.stride())
        own, more = attributes_of_tensor(obj)
        return _there, ("tensor", type(obj), index, device, obj.dtype, layout, obj.requires_grad, own), *more

    def _reduce_sharded(self, obj: Any) -> Any:
        """Reduce a tensor of which each rank has a part to its key: the receiver joins the rows of all ranks."""
        if self._sharded is None:
            raise CannotJoin("the ranks have it in shards, which --out joins", obj)
        if why := self._sharded.obstacle(obj):
            raise CannotJoin(f"a tensor of it cannot be joined: {why}", obj)
        is_parameter = isinstance(obj, sys.modules["torch"].nn.Parameter)
        return _there, ("whole", self._sharded.key(obj), is_parameter, obj.is_leaf and obj.requires_grad)

    def _block_of_storage(self, storage: Any) -> tuple[int, str]:
        """Return the number of the block, and the device that the memory shall be on."""
        address = storage.data_ptr() or id(storage)  # storages without memory are not one storage
        read = functools.partial(_storage_bytes, storage)
        index = self._block(str(storage.device), address, storage.nbytes(), read)
        if (place := in_file(address)) is not None:
            self.in_file[index] = place
        return index, device_there(storage.device, address)

    def _reduce_of_a_device(self, obj: Any) -> Any:
        """Reduce an object that would be sent with its device's name: the other side has other devices, or none yet.

        Tensors of other classes, and those with a bit that changes the meaning of their memory, are sent by such a
        storage.
        """
        torch = sys.modules.get("torch")
        if torch is None or type(obj) not in (torch.UntypedStorage, torch.storage.TypedStorage, torch.Generator):
            return None
        memory = getattr(obj, "_untyped_storage", obj)  # a TypedStorage warns when it is used
        here = memory.device
        device = device_there(here, 0 if type(obj) is torch.Generator else memory.data_ptr())
        if (here.type, device) == ("cpu", "cpu") or here.type == "meta":
            return None
        if type(obj) is torch.storage.TypedStorage:
            return _typed_storage, (obj._untyped_storage, obj.dtype)
        if type(obj) is torch.UntypedStorage:
            return _there, ("storage", *self._block_of_storage(obj))
        if device == "cpu":
            raise Refused(f"it draws on {here}, which the notebook does not use", obj)
        return _there, ("generator", device, obj.get_state())


class PlacingPacker(Packer):
    """Packs what a cell has left: for the notebook's own objects only the place is sent.

    So the values lead to the notebook's objects, as they led to the rank's copies of them. A tensor of a graph is sent
    without the graph, and a view of the memory of a tensor of the notebook's as such a view.
    """

    def __init__(
        self,
        file: Any,
        by_reference: Mapping[int, str],
        namespace: dict[str, Any] | None,
        places: Places,
        may_lack: Collection[str] = (),
    ) -> None:
        super().__init__(file, by_reference, namespace, as_written=True, may_lack=may_lack)
        self._places = places
        self._of_memory: dict[tuple[str, int], Any] | None = None

    def persistent_id(self, obj: Any) -> Any:
        """Return the token of an object; called for every object before it is packed."""
        return self._places.token(obj)

    def _reduced(self, obj: Any) -> Any:
        if type(obj) is Values:
            reduced = super()._reduce_tensor(obj.tensor)
            return (itself, (obj.tensor,)) if reduced is None else (_there, ("values", *reduced[1][1:]))
        reduced = super()._reduced(obj)
        if reduced is not NotImplemented and self._is_of_namespace(obj):
            # It reads the notebook's globals there, or values that are sent under their own names.
            reduced[2][1][1]["__globals__"].clear()
        return reduced

    def _reduce_tensor(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return None
        reduced = self._reduce_view(obj if obj.is_leaf else obj.detach()) or super()._reduce_tensor(obj)
        has_gradient = (obj.is_leaf or obj.retains_grad) and obj.grad is not None
        if not reduced or len(reduced) > 2 or not self._places.takes_gradients or not has_gradient:
            return reduced
        return *reduced, obj.grad, None, None, _set_gradient

    def _reduce_view(self, tensor: Any) -> Any:
        """Reduce a tensor to a view of one of the notebook's tensors, if all its elements are in that one's memory."""
        if self._of_memory is None:
            self._of_memory = {_memory(each): each for each in self._places.tensors()}
        if type(tensor) is not sys.modules["torch"].Tensor or not is_as_it_lies(tensor) or not tensor.numel():
            return None
        known = self._of_memory.get(_memory(tensor))
        if known is None or known.dtype != tensor.dtype or not known.is_contiguous():
            return None
        offset = tensor.storage_offset() - known.storage_offset()
        last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.size(), strict=True))
        if offset < 0 or offset + last >= known.numel():
            return None
        return _there, ("view", known, offset, tuple(tensor.size()), tensor.stride(), tensor.requires_grad)


class Places(Protocol):
    """The places of the notebook's objects: an `Inventory`.

    Attributes:
        takes_gradients: New tensors are sent with their gradients.
    """

    takes_gradients: bool

    def token(self, obj: Any) -> Any:
        """Return the replacement of an object that the notebook has; None for any other."""

    def tensors(self) -> Iterator[Any]:
        """Yield the tensors that the notebook has, and whose memory is laid out as it is there."""


class Joined(Protocol):
    """The whole tensors of which ranks have sent rows: `JoinedTensors`."""

    def whole(self, key: str) -> Any:
        """Return the tensor, or raise `CannotJoin`: rows of it are missing, or do not belong together."""


def _set_gradient(tensor: Any, gradient: Any) -> None:
    tensor.grad = gradient


def _memory(tensor: Any) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _array_bytes(array: Any) -> memoryview:
    flat = array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)
    return memoryview(flat.view("uint8")).cast("B")


def _storage_bytes(storage: Any) -> memoryview:
    import torch

    host = storage if storage.device.type == "cpu" else storage.cpu()
    flat: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(host).numpy()
    return memoryview(flat)


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # as torch.load makes them


class _Named:
    """Stands for `value` in the pickle; it arrives as the value itself."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value


class _NamespaceThere:
    """Stands for the namespace that the receiver gives to `unpack`."""


class _ModuleThere:
    """Stands for the globals of a module that the receiver has, too."""

    def __init__(self, name: str) -> None:
        self.name = name


def _there(what: str, *args: Any) -> Any:
    """Stand in a payload for a call of `Contents` on the other side; ``_there("array", …)`` for its method `array`."""
    raise pickle.UnpicklingError(
        "this pickle is the inside of a payload; open it with nbaccel.namespace.payload.unpack"
    )


def _set_function_state(function: types.FunctionType, wrapped: tuple[Callable[[Any, Any], None], Any]) -> None:
    """Complete a notebook function as cloudpickle does; names that its new namespace has already are left alone."""
    set_state, (attributes, slots) = wrapped
    namespace = function.__globals__
    before = {name: namespace[name] for name in ("__builtins__", *slots["__globals__"]) if name in namespace}
    set_state(function, (attributes, slots))
    namespace.update(before)


class Contents:
    """The contents of one payload, and the methods that the pickle in it calls by `_there`.

    Args:
        mapping: The payload.
        places: Offset and length of each block.
        buffers: As in `Packer`.
        is_lasting: Blocks that are less than half of the payload are copied out, so that none keeps a larger rest
            alive. Nothing here refers to the unpickler: with a cycle the memory would stay until the collector runs.
        begin: Where the pickle is in it.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        places: Sequence[tuple[int, int]],
        buffers: Sequence[int],
        namespace: dict[str, Any] | None,
        anchored: Callable[[str], Any] | None,
        placed: Callable[[Any], Any] | None = None,
        is_lasting: bool = False,
        joined: Joined | None = None,
        begin: int = 0,
    ) -> None:
        self.begin = begin
        self._placed = placed
        self._joined = joined
        self._copied_below = max(_COPIED_IF_LASTING, len(mapping) // 2) if is_lasting else _COPIED_BELOW
        self.mapping = mapping
        self._places, self._buffers = places, buffers
        self._blocks: dict[int, memoryview | bytearray] = {}
        self._storages: dict[int, Any] = {}
        self._namespace = {"__name__": "__main__"} if namespace is None else namespace
        self._anchored = anchored

    def call(self, what: str, *args: Any) -> Any:
        return getattr(self, what)(*args)

    def buffers(self) -> Iterator[memoryview | bytearray]:
        """Yield the out-of-band buffers of the pickle protocol, in its order."""
        for index in self._buffers:
            yield self._block(index)

    def anchor(self, name: str) -> Any:
        if self._anchored is None:
            raise ValueError(
                f"the payload refers to {name!r} of this process; give unpack a way to find it: anchored=…"
            )
        return self._anchored(name)

    def globals(self) -> dict[str, Any]:
        return self._namespace

    def placed(self, token: Any) -> Any:
        """Return the notebook's object for the token that `Places.token` returned in the rank."""
        if self._placed is None:
            raise ValueError("the payload refers to objects of a notebook; give unpack a way to find them: placed=…")
        return self._placed(token)

    def view(self, known: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool) -> Any:
        view = known.detach().as_strided(size, stride, known.storage_offset() + offset)
        return view.requires_grad_(requires_grad)

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
        device: str,
        dtype: Any,
        layout: tuple[int, tuple[int, ...], tuple[int, ...]],
        requires_grad: bool,
        attributes: dict[str, Any],
    ) -> Any:
        import torch

        storage = self.storage(index, device)
        tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *layout)
        if kind is torch.nn.Parameter:
            tensor = torch.nn.Parameter(tensor, requires_grad)
        else:
            tensor.requires_grad_(requires_grad)
        vars(tensor).update(attributes)
        return tensor

    def whole(self, key: str, is_parameter: bool, requires_grad: bool) -> Any:
        """Return a tensor of which all ranks have sent rows, on the host."""
        import torch

        if self._joined is None:
            raise CannotJoin("only a part of it was sent")
        tensor = self._joined.whole(key)
        if is_parameter:
            return torch.nn.Parameter(tensor, requires_grad)
        return tensor.detach().requires_grad_(requires_grad)

    def values(
        self, kind: Any, index: int, device: str, dtype: Any, layout: Any, requires_grad: bool, attributes: Any
    ) -> Any:
        """Return a tensor whose values are about to be written into another and not kept: it is never copied out."""
        import torch

        return torch.empty(0, dtype=dtype, device="cpu").set_(_storage(self._memory(index)), *layout)

    def storage(self, index: int, device: str) -> Any:
        """Return the memory of a tensor, on the device of this process that `device` means."""
        if index not in self._storages:
            here = device_here(device)
            storage = None if here.type == "cpu" else storage_on(here, self._memory(index))
            self._storages[index] = _storage(self._block(index)) if storage is None else storage
        return self._storages[index]

    def generator(self, device: str, state: Any) -> Any:
        import torch

        generator = torch.Generator(device_here(device))
        generator.set_state(state)
        return generator

    def _block(self, index: int) -> memoryview | bytearray:
        if index not in self._blocks:
            memory = self._memory(index)
            self._blocks[index] = bytearray(memory) if memory.nbytes < self._copied_below else memory
        return self._blocks[index]

    def _memory(self, index: int) -> memoryview:
        offset, nbytes = self._places[index]
        return memoryview(self.mapping)[offset : offset + nbytes]


def _storage(block: memoryview | bytearray) -> Any:
    import torch

    return torch.frombuffer(block, dtype=torch.uint8).untyped_storage() if len(block) else torch.UntypedStorage(0)


def is_ours(module: str, name: str) -> bool:
    """Return whether this name in a pickle means a call of `Contents`."""
    return (module, name) == (__name__, _there.__name__)


class Unpacker(pickle.Unpickler):
    """Reads the objects of `contents` straight from the mapping."""

    def __init__(self, contents: Contents) -> None:
        contents.mapping.seek(contents.begin)
        super().__init__(contents.mapping, buffers=contents.buffers())
        self._contents = contents

    def persistent_load(self, token: Any) -> Any:
        return self._contents.placed(token)

    def find_class(self, module: str, name: str) -> Any:
        return self._contents.call if is_ours(module, name) else super().find_class(module, name)
