"""Places of a model's tensors that are fetched for a forward, and how autograd holds them meanwhile. Runs in ranks.

A forward that is recorded saves weights for its backward. `RecordedWeights` lets the graph hold where they are stored
instead, and reads them again in the backward: so adapters can be trained although the weights between them do not fit.
Fetched weights themselves cannot be trained, which a backward that comes to one says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter

from nbaccel.train.device_maps.stored_tensors import Stored

__all__ = ["RecordedWeights", "Slot", "WaitingParameter", "waiting"]


class WaitingParameter(Parameter):
    """A parameter between forwards: on the meta device, with a shape and a type.

    It can be looked at, but not computed with: some products of torch (2.13, on the CPU) take a tensor on the meta
    device for one with numbers, and return what happens to be in memory.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [*args, *(kwargs or {}).values()]
        tensors = [
            each
            for value in values
            for each in (value if isinstance(value, list | tuple) else [value])
            if isinstance(each, Tensor)
        ]
        if any(not isinstance(each, cls) and not each.is_meta for each in tensors):
            shape = next(tuple(each.shape) for each in tensors if isinstance(each, cls))
            raise RuntimeError(
                f"a weight of the shape {shape} waits on the host or on the disk, and is used by "
                f"{getattr(func, '__name__', func)} outside of the forward of its module: name the class of the module "
                "whose forward uses it in preload_module_classes, or give it a place on a device in the map"
            )
        # Tensor's, by which views are of this class too: that of Parameter makes plain tensors of them.
        of_tensors: Any = Tensor.__torch_function__
        return of_tensors.__func__(cls, func, types, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _waiting, (tuple(self.shape), self.dtype, self.requires_grad)


def _waiting(shape: Sequence[int], dtype: torch.dtype, requires_grad: bool) -> WaitingParameter:
    return WaitingParameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)


def waiting(tensor: Tensor) -> Tensor:
    """Return what stands for `tensor` between forwards."""
    if isinstance(tensor, Parameter):
        return _waiting(tensor.shape, tensor.dtype, tensor.requires_grad)
    return torch.empty_like(tensor, device="meta")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The place of one tensor in a model.

    name: from the block on.  placeholder: what is there between forwards; shape and dtype are its own.
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
        self.owner._parameters[self.leaf] = parameter
        return parameter

    def read(self, opened: dict[str, Any]) -> Tensor:
        """Return the tensor as the model has it, in the type of its placeholder; it may be a view of a file."""
        return self.stored.read(opened).to(self.dtype)

    def on(self, device: torch.device, opened: dict[str, Any]) -> Tensor:
        """Return the tensor in memory of torch on `device`.

        Not a view of a file, although it would do: products of matrices that begin elsewhere than torch's memory are
        rounded otherwise, and the outputs would differ from the plain model's in their last bit.
        """
        if device.type != "cpu":
            return self.read(opened).to(device)
        made = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.stored.fill(made, opened)
        return made


class RecordedWeights:
    """The weights of one forward that autograd records.

    block: its name, for errors.  slots, tensors: the places, and what is in them for this forward.
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

    offset: in elements, from where the weight begins.
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
