"""Operations: the collectives, and what walks through containers, as functions; for programs that import them.

Run in ranks. The names, arguments and defaults are those of `accelerate.utils`; the work is done by the parts that
`Accelerator` and `PartialState` use too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from nbaccel.train.collectives import Collectives
from nbaccel.train.nested import concatenate as join_batches, count_rows, is_container, map_children
from nbaccel.train.state import PartialState

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_to_fp32",
    "find_batch_size",
    "gather",
    "gather_object",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "wait_for_everyone",
]

_HALF = (torch.float16, torch.bfloat16)


def gather(tensor: Any) -> Any:
    """`Accelerator.gather`: every tensor in `tensor` of all ranks, joined by rows, on every rank. Collective.

    >>> gather({"loss": torch.ones(2)})
    {'loss': tensor([1., 1.])}
    """
    return _collectives().gather(tensor)


def gather_object(object: Any) -> Any:
    """Any picklable value of all ranks, on every rank: lists joined, mappings joined by key. Collective.

    Other values come back as a list by rank; tensors that were on a device are on this rank's.
    Raises:
        TypeError: on every rank, if some rank's value cannot be pickled.

    >>> gather_object(["cat", "dog"])
    ['cat', 'dog']
    """
    return _collectives().gather_objects(object)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Every tensor in `tensor` as rank `from_process` has it, as new tensors. Collective.

    Every rank gives tensors of the same dtypes and shapes.

    >>> broadcast(torch.ones(2))
    tensor([1., 1.])
    """
    return _collectives().broadcast(tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """The picklable entries of `object_list` as rank `from_process` has them. In place, and returned. Collective.

    Raises:
        TypeError: on every rank, if an entry cannot be pickled there.

    >>> broadcast_object_list(["settings", 3])
    ['settings', 3]
    """
    return _collectives().broadcast_objects(object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Every tensor in `tensor` reduced over the ranks by "mean", "sum", "max" or "min". Collective.

    The default is the mean, where that of `Accelerator.reduce` is the sum; Accelerate has it so.

    >>> reduce(torch.tensor([2.0, 4.0]), scale=0.5)
    tensor([1., 2.])
    """
    return _collectives().reduce(tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Every tensor in `tensor` padded along `dim` to the longest of all ranks. Collective.

    >>> pad_across_processes(torch.ones(2)).shape
    torch.Size([2])
    """
    return _collectives().pad(tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Return once every rank is here. Collective.

    >>> wait_for_everyone()
    """
    _collectives().barrier()


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """The tensors of equally built batches joined along `dim`, in the batches' structure.

    >>> concatenate([{"x": torch.ones(1, 2)}, {"x": torch.ones(2, 2)}])["x"].shape
    torch.Size([3, 2])
    """
    return join_batches(data, dim)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] | None = None,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """`data` with ``func(leaf, *args, **kwargs)`` in place of each leaf that is a tensor, or that `test_type` is for.

    Containers keep their types, and other leaves stay.
    Raises:
        TypeError: `error_on_other_type`, and there is another leaf.

    >>> recursively_apply(torch.neg, {"x": (torch.ones(2), "text")})
    {'x': (tensor([-1., -1.]), 'text')}
    """
    is_meant = test_type or is_torch_tensor
    if is_meant(data):
        return func(data, *args, **kwargs)
    if error_on_other_type and not is_container(data):
        raise TypeError(f"{getattr(func, '__name__', func)} does not take a {type(data).__name__}")

    def child(value: Any) -> Any:
        return recursively_apply(
            func, value, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
        )

    return map_children(child, data)


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Everything in `tensor` that has a `to`, on `device`; the rest stays.

    non_blocking: copies do not wait for the host.  skip_keys: keys of the outermost mapping that stay where they are.

    >>> send_to_device({"x": torch.ones(2), "id": "a"}, "meta")["x"].device
    device(type='meta')
    """
    skipped = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    if isinstance(tensor, Tensor):
        return tensor.to(device, non_blocking=non_blocking)
    if hasattr(tensor, "to") and not skipped:
        return _moved(tensor, device, non_blocking)
    keys = iter(tensor) if isinstance(tensor, Mapping) else repeat(None)  # in the order of map_children
    return map_children(
        lambda child: child if next(keys) in skipped else send_to_device(child, device, non_blocking), tensor
    )


def find_batch_size(data: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor.

    Raises:
        TypeError: there is no tensor with a first dimension.

    >>> find_batch_size({"x": torch.ones(4, 2)})
    4
    """
    rows = count_rows(data)
    if rows is None:
        raise TypeError(f"there is no tensor with rows to count in this {type(data).__name__}")
    return rows


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Every tensor in `data` cut by `tensor_slice`; the last two arguments are accepted and not used.

    >>> slice_tensors((torch.arange(4),), slice(1, 3))
    (tensor([1, 2]),)
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def listify(data: Any) -> Any:
    """Every tensor in `data` as plain numbers.

    >>> listify({"x": torch.ones(2)})
    {'x': [1.0, 1.0]}
    """
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def convert_to_fp32(tensor: Any) -> Any:
    """Every fp16 and bf16 tensor in `tensor` as float32.

    >>> convert_to_fp32([torch.ones(1, dtype=torch.float16)])[0].dtype
    torch.float32
    """
    return recursively_apply(torch.Tensor.float, tensor, test_type=_is_half)


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor.

    >>> is_torch_tensor(3)
    False
    """
    return isinstance(tensor, Tensor)


def _collectives() -> Collectives:
    return PartialState().collectives


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALF


def _moved(thing: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    try:
        return thing.to(device, non_blocking=non_blocking)
    except TypeError:  # not every `to` knows that word (BatchEncoding of transformers < 4.48 for one)
        return thing.to(device)
