"""Functions over nested batches, and exchange between ranks: ``accelerate.utils.operations``. Run in ranks and scripts.

Containers are those of `train.distributed.nested`. What communicates calls the method of the same name on this
process's `PartialState`, on every rank; a process alone gets its own value back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from nbaccel.base.missing_names import missing_from
from nbaccel.errors import CollectiveMismatch as DistributedOperationException
from nbaccel.train.distributed import nested
from nbaccel.train.distributed.nested import is_container, leaves, map_children
from nbaccel.train.distributed.partial_state import PartialState
from nbaccel.train.step.precision import to_fp32

__all__ = [
    "DistributedOperationException",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "honor_type",
    "ignorant_find_batch_size",
    "is_namedtuple",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]

_P = ParamSpec("_P")


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether `tensor` is a torch tensor."""
    return isinstance(tensor, Tensor)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Return batches of one structure as one batch, their tensors joined along `dim`. A single one is returned itself.

    Raises:
        TypeError: a batch contains something that is no tensor.

    >>> concatenate([{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 2)}])["x"].shape
    torch.Size([3, 2])
    """
    strange = next((leaf for batch in data for leaf in leaves(batch) if not is_torch_tensor(leaf)), None)
    if len(data) > 1 and strange is not None:
        raise TypeError(f"concatenate joins tensors in any nesting of containers; in it was a {type(strange).__name__}")
    return nested.join_batches(data, dim)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return `data` rebuilt with ``func(leaf, *args, **kwargs)`` in the place of every leaf that passes `test_type`.

    error_on_other_type: raise TypeError for a leaf that does not pass, instead of keeping it.

    >>> recursively_apply(lambda tensor, by: tensor * by, {"x": torch.ones(2), "name": "a"}, 3)
    {'x': tensor([3., 3.]), 'name': 'a'}
    """
    if test_type(data):
        return func(data, *args, **kwargs)
    if is_container(data):
        return map_children(
            lambda child: recursively_apply(
                func, child, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
            ),
            data,
        )
    if error_on_other_type:
        name = getattr(func, "__name__", "the function")
        raise TypeError(f"{name} takes tensors in any nesting of containers; in it was a {type(data).__name__}")
    return data


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Return `tensor` with everything in it that has a ``to`` moved to `device`.

    non_blocking: do not wait for the copy; it overlaps where the source is in pinned memory.
    skip_keys: keys of mappings whose values stay where they are.

    >>> send_to_device({"x": torch.ones(1), "id": 7}, "cpu")
    {'x': tensor([1.]), 'id': 7}
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())

    def send(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device, non_blocking=non_blocking)
        if hasattr(value, "to"):
            return value.to(device)
        if skipped and isinstance(value, Mapping):
            kept = {key: child for key, child in value.items() if key in skipped}
            moved = map_children(send, {key: child for key, child in value.items() if key not in skipped})
            return {key: kept[key] if key in kept else moved[key] for key in value}
        return map_children(send, value)

    return send(tensor)


def find_batch_size(data: Any) -> int:
    """Return how many samples a batch holds: the first dimension of the first tensor in it.

    Raises:
        ValueError: no tensor in it has a dimension.

    >>> find_batch_size({"ids": ["a", "b"], "x": torch.ones(2, 3)})
    2
    """
    for leaf in leaves(data):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    raise ValueError(f"no batch size can be read from this {type(data).__name__}: it holds no tensor with a dimension")


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return `data` with every tensor in it sliced by `tensor_slice`.

    process_index, num_processes: accepted and not used; `slice_fn_for_dispatch` is called with them.

    >>> slice_tensors({"x": torch.arange(4), "name": "a"}, slice(2))
    {'x': tensor([0, 1]), 'name': 'a'}
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def listify(data: Any) -> Any:
    """Return `data` with every tensor as plain Python numbers in lists.

    >>> listify({"x": torch.ones(2)})
    {'x': [1.0, 1.0]}
    """
    return recursively_apply(Tensor.tolist, data)


def convert_to_fp32(tensor: Any) -> Any:
    """Return `tensor` with the fp16 and bf16 tensors anywhere in it as fp32; everything else is unchanged."""
    return to_fp32(tensor)


def convert_outputs_to_fp32(model_forward: Callable[_P, Any]) -> Callable[_P, Any]:
    """Wrap `model_forward` so that its result is converted by `convert_to_fp32`. A prepared model does so by itself."""

    @functools.wraps(model_forward)
    def in_fp32(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        return to_fp32(model_forward(*args, **kwargs))

    return in_fp32


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in `data`; None without a tensor."""
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, Tensor)), None)


def is_namedtuple(data: Any) -> bool:
    """Return whether `data` is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return what `generator` yields as a list, tuple or named tuple of the type of `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return `find_batch_size(data)`, or None where that is an error."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return `tensor` with the last row of every tensor repeated, until `batch_size` divides by `num_processes`.

    >>> pad_input_tensors(torch.arange(3), 3, 2)
    tensor([0, 1, 2, 2])
    """

    def pad(one: Tensor) -> Tensor:
        missing = -batch_size % num_processes
        last = one.narrow(dim, one.shape[dim] - 1, 1)
        return torch.cat([one, *[last] * missing], dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def gather(tensor: Any) -> Any:
    """Gather every tensor in `tensor`, those of all ranks joined along the first dimension, on every rank. Collective.

    Raises:
        CollectiveMismatch: the ranks called it with different structures or shapes.
        TypeError: tensors mixed with something else; see `gather_object`.

    >>> import torch
    >>> gather({"loss": torch.tensor([0.5])})
    {'loss': tensor([0.5000])}
    """
    return PartialState().gather(tensor)


def gather_object(object: Any) -> Any:
    """Gather picklable values of all ranks, on every rank: lists joined, mappings joined by key. Collective.

    >>> gather_object(["a", "b"])
    ['a', 'b']
    """
    return PartialState().collectives.gather_objects(object)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return `tensor` with every tensor in it reduced over the ranks; `tensor` is not changed. Collective.

    reduction: "mean" here and "sum" in `Accelerator.reduce`, as in Accelerate; "max" and "min" too.
    scale: factor of the result.
    """
    return PartialState().reduce(tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return every tensor in `tensor` as rank `from_process` has it; shapes and dtypes must agree. Collective."""
    return PartialState().collectives.broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill `object_list`, in place, with the picklable objects that rank `from_process` has in its own. Collective.

    >>> broadcast_object_list(["a", 1])
    ['a', 1]
    """
    object_list[:] = PartialState().collectives.broadcast_objects(object_list, from_process)
    return object_list


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Return the tensor that one rank has and the others leave out, on every rank and its device. Collective.

    Unlike `broadcast`, the others need to know neither its shape nor which rank has it.

    Raises:
        ValueError: no rank has a tensor, or several have one.

    >>> copy_tensor_to_devices(torch.ones(2))
    tensor([1., 1.])
    """
    state = PartialState()
    mine = [] if tensor is None else [(state.process_index, tensor.shape, tensor.dtype)]
    having = state.collectives.gather_objects(mine, "copy_tensor_to_devices")
    if len(having) != 1:
        who = f"ranks {', '.join(str(rank) for rank, _, _ in having)} have" if having else "none has"
        raise ValueError(
            f"copy_tensor_to_devices copies the tensor of one rank, and {who} one: the other ranks call it without a "
            "tensor"
        )
    source, shape, dtype = having[0]
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype, device=state.device)
    copied: Tensor = state.collectives.broadcast(tensor.to(state.device), source)
    return copied


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Return `tensor` with every tensor in it padded along `dim` to the longest of all ranks. Collective.

    pad_index: the value of the padding, which is at the front with `pad_first`, else at the end.
    """
    return PartialState().pad_across_processes(tensor, dim, pad_index, pad_first)


__getattr__ = missing_from(__name__, "nbaccel.utils")
