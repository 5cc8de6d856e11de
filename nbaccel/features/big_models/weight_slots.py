"""Places of a model's tensors that are fetched for a forward, and how autograd holds them meanwhile. Runs in ranks.

A forward that is recorded saves weights for its backward. `RecordedWeights` lets the graph hold where they are stored
instead, and reads them again in the backward: so adapters can be trained although the weights between them do not fit.
Fetched weights themselves cannot be trained, which a backward that comes to one says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter, RNNBase

from nbaccel.features.big_models.stored_tensors import Stored

__all__ = ["RecordedWeights", "Slot", "WaitingParameter", "waiting"]


class WaitingParameter(Parameter):
    """A parameter between forwards: on the meta device, with a shape and a type.

    Where another module than its own computes with it, or with a part of it, it is read for that, each time. It cannot
    be changed. Without this class some products of torch (2.13, on the CPU) take a tensor on the meta device for one
    with numbers, and return what happens to be in memory.
    """

    name = ""
    stored: Stored | None = None
    """Where its numbers are."""

    made_by: _Call | None = None
    """The call that gives its numbers, for what was computed from waiting parameters alone."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _Call(func, args, kwargs or {})
        tensors = list(_tensors((args, kwargs)))
        waiting = [each for each in tensors if isinstance(each, cls)]
        device = next((each.device for each in tensors if not isinstance(each, cls) and not each.is_meta), None)
        if getattr(func, "__name__", "") in _TELLS:
            device = torch.device("cpu")
        if waiting and call.changes(also_marks=device is not None):
            raise RuntimeError(
                f"{waiting[0].name or 'a weight'} waits on the host or on the disk, and "
                f"{getattr(func, '__name__', func)} would change what is only read from there: give it a place on a "
                "device in the map, or change it before the model is dispatched"
            )
        if device is not None:
            return call.on(device)
        # Tensor's, by which results are of this class too: that of Parameter makes plain tensors of them.
        of_tensors: Any = Tensor.__torch_function__
        result = of_tensors.__func__(cls, func, types, args, kwargs or {})
        parts = result if isinstance(result, list | tuple) else [result]
        for number, part in enumerate(parts):
            if isinstance(part, cls) and part.stored is None and part.made_by is None:
                part.made_by = call if part is result else _Call(_nth, (call, number), {})
        return result

    def read(self, device: torch.device) -> Tensor:
        """Return its numbers on `device`, as a tensor whose gradient is refused."""
        if self.made_by is not None:
            made: Tensor = self.made_by.on(device)
            return made
        if self.stored is None:
            raise RuntimeError(f"a weight of the shape {tuple(self.shape)} has no numbers: it is on the meta device")
        read = Parameter(on_device(self.stored, self.shape, self.dtype, device, {}), self.requires_grad)
        if read.requires_grad and torch.is_grad_enabled():
            read.register_post_accumulate_grad_hook(_CannotTrain(self.name))
        return read

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _waiting, (tuple(self.shape), self.dtype, self.requires_grad, self.name, self.stored)


def _waiting(
    shape: Sequence[int], dtype: torch.dtype, requires_grad: bool, name: str, stored: Stored | None
) -> WaitingParameter:
    parameter = WaitingParameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
    parameter.name, parameter.stored = name, stored
    return parameter


def waiting(tensor: Tensor, name: str, stored: Stored) -> Tensor:
    """Return what stands for `tensor` between forwards.

    Args:
        name: In the model.
    """
    if isinstance(tensor, Parameter):
        return _waiting(tensor.shape, tensor.dtype, tensor.requires_grad, name, stored)
    return torch.empty_like(tensor, device="meta")


_MARKS = ("__set__", "requires_grad_", "detach_")
"""Functions that change what is known of a tensor and not its numbers, unless they get a tensor that has some."""

_ASSIGNS = frozenset({"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow"))})
"""Functions of operators that change their first argument."""

_TELLS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__")
"""Functions that say what the numbers of a tensor are."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A function of torch with its arguments, some of them waiting."""

    function: Any
    args: Any
    kwargs: dict[str, Any]

    def changes(self, also_marks: bool) -> bool:
        """Return whether the function, by its name, changes its first argument, and that is one that waits."""
        if not (self.args and isinstance(self.args[0], WaitingParameter)):
            return False
        name = getattr(self.function, "__name__", "")
        if name in _MARKS:
            return also_marks
        return name in _ASSIGNS or (name.endswith("_") and not name.endswith("__"))

    def on(self, device: torch.device) -> Any:
        """Return the result with the numbers of what waits, on `device`."""
        return self.function(*_read(self.args, device), **_read(self.kwargs, device))


def _nth(results: Sequence[Any], number: int) -> Any:
    return results[number]


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of a function of torch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _read(value: Any, device: torch.device) -> Any:
    """Return arguments with the numbers of what waits, on `device`."""
    if isinstance(value, WaitingParameter):
        return value.read(device)
    if isinstance(value, _Call):
        return value.on(device)
    if isinstance(value, dict):
        return {name: _read(each, device) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_read(each, device) for each in value) if type(value) in (list, tuple) else value
    return value


def on_device(
    stored: Stored, shape: torch.Size, dtype: torch.dtype, device: torch.device, opened: dict[str, Any]
) -> Tensor:
    """Return a stored tensor in memory of torch on `device`.

    Not a view of a file, although it would do: products of matrices that begin elsewhere than torch's memory are
    rounded otherwise, and the outputs would differ from the plain model's in their last bit.
    """
    if device.type != "cpu":
        return stored.read(opened).to(dtype).to(device)
    made = torch.empty(shape, dtype=dtype, device="cpu")
    stored.fill(made, opened)
    return made


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The place of one tensor in a model.

    Args:
        name: From the block on.
        placeholder: What is there between forwards; shape and dtype are its own.
    """

    owner: Module
    leaf: str
    name: str
    placeholder: Tensor
    stored: Stored
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def put(self, tensor: Tensor) -> Tensor:
        """Put a tensor there, and return it; a parameter is made of it if there was one.

        It requires gradients if the placeholder does, since some products are rounded otherwise without.
        """
        if self.leaf not in self.owner._parameters:
            self.owner._buffers[self.leaf] = tensor
            return tensor
        parameter = tensor if isinstance(tensor, Parameter) else Parameter(tensor, self.placeholder.requires_grad)
        if isinstance(self.owner, RNNBase):
            setattr(self.owner, self.leaf, parameter)  # which lists its weights a second time
        else:
            self.owner._parameters[self.leaf] = parameter
        return parameter

    def read(self, opened: dict[str, Any]) -> Tensor:
        """Return the tensor as the model has it, in the type of its placeholder; it may be a view of a file."""
        return self.stored.read(opened).to(self.dtype)

    def on(self, device: torch.device, opened: dict[str, Any]) -> Tensor:
        """Return the tensor in memory of torch on `device`."""
        return on_device(self.stored, self.shape, self.dtype, device, opened)


class RecordedWeights:
    """The weights of one forward that autograd records.

    Args:
        block: Its name, for errors.
        slots, tensors: The places, and what is in them for this forward.
    """

    def __init__(self, block: str, slots: Sequence[Slot], tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._by_storage: dict[int, list[tuple[range, Slot, torch.device]]] = defaultdict(list)
        for slot, tensor in zip(slots, tensors, strict=True):
            begin = int(tensor.storage_offset()) * tensor.itemsize
            place = range(begin, begin + tensor.nbytes), slot, tensor.device
            self._by_storage[tensor.untyped_storage().data_ptr()].append(place)
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(_CannotTrain(f"{block}.{slot.name}" if block else slot.name))
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()

    def leave(self) -> None:
        """Give up the weights; called when the forward is over. The graph keeps tensors of their shape for its ends."""
        self._hooks.__exit__()
        for tensor in self._tensors:
            if tensor.requires_grad:
                tensor.data = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        # The graph has this object: torch keeps the hook with what the hook has packed.
        self._tensors = ()
        self._by_storage.clear()

    def _pack(self, tensor: Tensor) -> Tensor | _Reference:
        if tensor.layout is not torch.strided:
            return tensor
        begin = int(tensor.storage_offset()) * tensor.itemsize
        for places, slot, device in self._by_storage.get(tensor.untyped_storage().data_ptr(), ()):
            if begin in places:
                offset = (begin - places.start) // tensor.itemsize
                return _Reference(slot, tensor.size(), tensor.stride(), offset, device)
        return tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """A view of a weight that is read again in the backward.

    Args:
        offset: In elements, from where the weight begins.
    """

    slot: Slot
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    device: torch.device

    def tensor(self) -> Tensor:
        read = self.slot.on(self.device, {})
        return read.detach().as_strided(self.size, self.stride, int(read.storage_offset()) + self.offset)


def _unpack(saved: Tensor | _Reference) -> Tensor:
    return saved.tensor() if isinstance(saved, _Reference) else saved


class _CannotTrain:
    """Refuses the gradient of a weight that is fetched for each forward."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, parameter: Tensor) -> None:
        parameter.grad = None
        raise RuntimeError(
            f"{self._name} waits on the host or on the disk, so it cannot be trained: freeze it, "
            "requires_grad_(False), and train adapters, or give it a place on a device in the map"
        )
