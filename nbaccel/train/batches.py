"""Batches: one function applied to every tensor of a nested batch, and common ones. Run in ranks and scripts.

Containers are those of `nested`; no process communicates here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from nbaccel.train.distributed import nested
from nbaccel.train.distributed.nested import is_container, leaves, map_children
from nbaccel.train.step.precision import to_fp32

__all__ = [
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "is_torch_tensor",
    "listify",
    "recursively_apply",
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
    return nested.concatenate(data, dim)


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
