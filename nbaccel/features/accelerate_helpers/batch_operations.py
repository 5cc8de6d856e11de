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

from nbaccel.errors import CollectiveMismatch as DistributedOperationException
from nbaccel.train.distributed.nested import children, is_container, leaves, map_children
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
    """Return whether a value is a torch tensor.

    Args:
        tensor: Any value.

    Example:
        >>> is_torch_tensor(torch.ones(1)), is_torch_tensor([1.0])
        (True, False)
    """
    return isinstance(tensor, Tensor)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Return batches of one structure as one batch. A single batch is returned itself.

    Args:
        data: The batches: tensors in any nesting, the same for all.
        dim: The dimension along which their tensors are joined.

    Raises:
        TypeError: A batch contains something that is no tensor.

    Example:
        >>> concatenate([{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 2)}])["x"].shape
        torch.Size([3, 2])
    """
    strange = next((leaf for batch in data for leaf in leaves(batch) if not is_torch_tensor(leaf)), None)
    if len(data) > 1 and strange is not None:
        raise TypeError(f"concatenate joins tensors in any nesting of containers; in it was a {type(strange).__name__}")
    return _joined(data, dim)


def _joined(data: Sequence[Any], dim: int) -> Any:
    first = data[0]
    if isinstance(first, Tensor):
        return torch.cat(list(data), dim) if first.ndim else first
    parts = iter([[child for _, child in children(value)] for value in data])
    columns = iter(list(zip(*parts, strict=True)))
    return map_children(lambda _: _joined(next(columns), dim), first)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Return `data` with the result of a function in the place of every leaf of a kind.

    Args:
        func: Called as ``func(leaf, *args, **kwargs)``.
        data: Leaves in any nesting of lists, tuples and mappings.
        test_type: Says whether a leaf is of the kind; by default whether it is a tensor.
        error_on_other_type: Raise TypeError for another leaf, instead of keeping it.
        *args: More arguments of `func`.
        **kwargs: More arguments of `func`.

    Example:
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
    """Return `tensor` with everything in it that has a ``to`` moved to a device.

    Args:
        tensor: Tensors in any nesting.
        device: The device.
        non_blocking: Do not wait for the copy. It overlaps where the source is in pinned memory.
        skip_keys: Keys of mappings whose values stay where they are.

    Example:
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
    """Return the number of samples in a batch: the first dimension of the first tensor in it.

    Args:
        data: The batch: tensors in any nesting.

    Raises:
        ValueError: No tensor in it has a dimension.

    Example:
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
    """Return `data` with every tensor in it sliced along its first dimension.

    Args:
        data: Tensors in any nesting.
        tensor_slice: The slice.
        process_index, num_processes: Not used; a `slice_fn_for_dispatch` gets them.

    Example:
        >>> slice_tensors({"x": torch.arange(4), "name": "a"}, slice(2))
        {'x': tensor([0, 1]), 'name': 'a'}
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def listify(data: Any) -> Any:
    """Return a value with every tensor in it as plain Python numbers in lists.

    Args:
        data: Tensors in any nesting.

    Example:
        >>> listify({"x": torch.ones(2)})
        {'x': [1.0, 1.0]}
    """
    return recursively_apply(Tensor.tolist, data)


def convert_to_fp32(tensor: Any) -> Any:
    """Return a value with the fp16 and bf16 tensors anywhere in it as fp32; everything else is unchanged.

    Args:
        tensor: Tensors in any nesting.

    Example:
        >>> convert_to_fp32({"logits": torch.ones(1, dtype=torch.float16)})["logits"].dtype
        torch.float32
    """
    return to_fp32(tensor)


def convert_outputs_to_fp32(model_forward: Callable[_P, Any]) -> Callable[_P, Any]:
    """Return `model_forward` with its result converted by `convert_to_fp32`. A prepared model does so by itself.

    Args:
        model_forward: The forward of a model.

    Example:
        >>> forward = convert_outputs_to_fp32(lambda inputs: inputs.bfloat16())
        >>> forward(torch.ones(1)).dtype
        torch.float32
    """

    @functools.wraps(model_forward)
    def in_fp32(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        return to_fp32(model_forward(*args, **kwargs))

    return in_fp32


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in a value; None without a tensor.

    Args:
        data: Tensors in any nesting.

    Example:
        >>> find_device({"inputs": [torch.ones(1)]})
        device(type='cpu')
    """
    return next((leaf.device for leaf in leaves(data) if isinstance(leaf, Tensor)), None)


def is_namedtuple(data: Any) -> bool:
    """Return whether a value is a named tuple.

    Args:
        data: Any value.

    Example:
        >>> is_namedtuple((1, 2))
        False
    """
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return what `generator` yields as a list, tuple or named tuple.

    Args:
        obj: An object of the type that is wanted.
        generator: Yields the members.

    Example:
        >>> honor_type((1, 2), (2 * number for number in (1, 2)))
        (2, 4)
    """
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return `find_batch_size(data)`, or None where that is an error.

    Args:
        data: The batch.

    Example:
        >>> ignorant_find_batch_size(torch.ones(8, 2)), ignorant_find_batch_size("text")
        (8, None)
    """
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Return `tensor` with the last row of every tensor in it repeated until the batch divides by the number of ranks.

    Args:
        tensor: Tensors in any nesting.
        batch_size: The number of rows.
        num_processes: The number of ranks.
        dim: Accepted as by Accelerate, without effect.

    Example:
        >>> pad_input_tensors(torch.arange(3), 3, 2)
        tensor([0, 1, 2, 2])
    """

    def pad(one: Tensor) -> Tensor:
        missing = -batch_size % num_processes
        last = one.narrow(dim, one.shape[dim] - 1, 1)
        return torch.cat([one, *[last] * missing], dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def gather(tensor: Any) -> Any:
    """Gather every tensor in `tensor` from all ranks. Collective.

    Args:
        tensor: Tensors of equal shapes on all ranks, in any nesting.

    Returns:
        The same structure on every rank, with the tensors of all ranks joined along the first dimension.

    Raises:
        CollectiveMismatch: The ranks called it with different structures or shapes.
        TypeError: Tensors are mixed with something else; see `gather_object`.

    Example:
        >>> import torch
        >>> gather({"loss": torch.tensor([0.5])})
        {'loss': tensor([0.5000])}
    """
    return PartialState().gather(tensor)


def gather_object(object: Any) -> Any:
    """Gather values of all ranks by pickle. Collective.

    Args:
        object: A value that can be pickled.

    Returns:
        On every rank: lists joined, mappings joined by key, other values as a list by rank.

    Example:
        >>> gather_object(["a", "b"])
        ['a', 'b']
    """
    return PartialState().collectives.gather_objects(object)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return `tensor` with every tensor in it reduced over the ranks; `tensor` itself is not changed. Collective.

    Args:
        tensor: Tensors of equal shapes on all ranks, in any nesting.
        reduction: "mean", "sum", "max" or "min". The default is "mean" here and "sum" in `Accelerator.reduce`, as in
            Accelerate.
        scale: A factor of the result.

    Example:
        >>> reduce({"loss": torch.tensor(0.5)}, reduction="mean")
        {'loss': tensor(0.5000)}
    """
    return PartialState().reduce(tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return `tensor` with every tensor in it as one rank has it. Collective.

    Args:
        tensor: Tensors in any nesting, of equal shapes and dtypes on all ranks.
        from_process: The rank whose values count.

    Example:
        >>> broadcast({"lr": torch.tensor(0.1)})  # rank 0's, on every rank
        {'lr': tensor(0.1000)}
    """
    return PartialState().collectives.broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill a list, in place, with the objects that one rank has in its own list. Collective.

    Args:
        object_list: Objects that can be pickled; as many on every rank.
        from_process: The rank whose objects count.

    Returns:
        The same list.

    Example:
        >>> broadcast_object_list(["a", 1])
        ['a', 1]
    """
    object_list[:] = PartialState().collectives.broadcast_objects(object_list, from_process)
    return object_list


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Return the tensor that one rank has, on every rank and its device. Collective.

    Unlike in `broadcast`, the other ranks need to know neither its shape nor which rank has it.

    Args:
        tensor: The tensor, on the one rank that has it; None on the others.

    Raises:
        ValueError: No rank has a tensor, or several have one.

    Example:
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
    """Return `tensor` with every tensor in it padded along a dimension to the longest of all ranks. Collective.

    Args:
        tensor: Tensors in any nesting.
        dim: The dimension.
        pad_index: The value of the padding.
        pad_first: Put the padding at the front instead of the end.

    Example:
        >>> pad_across_processes(torch.ones(2, 3), dim=1).shape  # 3 is the longest of all ranks
        torch.Size([2, 3])
    """
    return PartialState().pad_across_processes(tensor, dim, pad_index, pad_first)
